//! Settings of the desk.
//!
//! Upstream: `config`. Downstream: `handler`, and the recorders and workers of the desk.

use std::time::Duration;

use headwater_issue::{DebounceWindow, OnNewEvent, WorkerConfig};

use crate::desk::budget::TokenBudget;
use crate::desk::model_runs::Prices;
use crate::desk::tools::SearchScope;

/// Settings of the desk.
#[derive(Clone, Copy, Debug)]
pub struct DeskConfig {
    /// Debounce: a run starts when no event has arrived for this long. Default: 800 ms.
    pub quiet: Duration,
    /// Upper bound of the debounce delay. Default: 5 s.
    pub max_wait: Duration,
    /// Maximum events per run. Default: 200.
    pub events_max: usize,
    /// How many runs in a row newer events may supersede; the next run is finished. Default: 5.
    pub supersede_max: u32,
    /// Maximum tokens of one answer. An answer that reaches it is requested again with four times as many, at most
    /// twice. Default: 1024.
    pub output_tokens_max: u32,
    /// Minimum pause before a run calls a failing model again. Such a run counts no attempt.
    /// Default: 5 s.
    pub unreachable_pause: Duration,
    /// Token limits.
    pub budget: TokenBudget,
    /// Which tickets the model may search. Default: those of the same user.
    pub search: SearchScope,
    /// Price of the tokens of the model of [`Desk::new`](crate::desk::Desk::new).
    pub prices: Prices,
}

impl Default for DeskConfig {
    fn default() -> Self {
        Self {
            quiet: Duration::from_millis(800),
            max_wait: Duration::from_secs(5),
            events_max: 200,
            supersede_max: 5,
            output_tokens_max: 1024,
            unreachable_pause: Duration::from_secs(5),
            budget: TokenBudget::default(),
            search: SearchScope::default(),
            prices: Prices::default(),
        }
    }
}

impl DeskConfig {
    /// The debounce window for recorders of desk events.
    pub fn debounce_window(&self) -> DebounceWindow {
        DebounceWindow {
            quiet_for: self.quiet,
            max_wait: self.max_wait,
            events_max: self.events_max,
        }
    }

    /// Settings of a worker that runs the desk; everything else as in `others`.
    pub fn worker(&self, others: WorkerConfig) -> WorkerConfig {
        WorkerConfig {
            events_max: self.events_max,
            on_new_event: OnNewEvent::Supersede { times_max: self.supersede_max },
            ..others
        }
    }
}
