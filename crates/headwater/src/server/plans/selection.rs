//! Which dead letters a plan replays, and how many there are.
//!
//! Upstream: `api/plans.rs` makes a selection and counts it; `runner.rs` goes through it. Downstream: the dead letters of
//! the queue, which are only read. Guarantees: a selection ends at the newest dead letter of each topic at the time it was
//! made, so letters that come back are not taken again; counting is bounded in time and number, and a selection that was
//! not counted to its end is cut there.

use std::collections::BTreeSet;
use std::time::Duration;

use headwater_queue::{DeadLetter, DeadLetterFilter, Queue, QueueError, ReplayReadiness};
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::server::plans::SCANNED_MAX;
use crate::server::plans::cause::cause_of;

/// Time for counting.
const COUNT_TIME_MAX: Duration = Duration::from_secs(5);

/// Dead letters of one page while counting.
const PAGE: usize = 500;

/// Maximum examples.
const EXAMPLES_MAX: usize = 10;

/// Which dead letters. Stored as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlanSelection {
    /// Id of the cause, as in `/failures`.
    pub(crate) failure: Option<String>,
    /// Only letters with this cause.
    pub(crate) cause: Option<String>,
    /// In this order.
    pub(crate) topics: Vec<PlanTopic>,
    pub(crate) reason: Option<String>,
    pub(crate) key: Option<String>,
    pub(crate) partition: Option<u16>,
    /// Milliseconds since 1970.
    pub(crate) from_ms: Option<u64>,
    pub(crate) to_ms: Option<u64>,
    /// Letters replayed this often are refused.
    pub(crate) max_replays: u32,
}

/// The dead letters of a topic, up to one of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlanTopic {
    pub(crate) topic: String,
    /// Id of the last dead letter.
    pub(crate) to: String,
}

impl PlanTopic {
    /// The id of the last dead letter; the smallest id if it is unreadable, so that nothing is sent.
    pub(crate) fn last(&self) -> EntryId {
        self.to.parse().unwrap_or(EntryId::MIN)
    }
}

impl PlanSelection {
    pub(crate) fn filter(&self) -> DeadLetterFilter {
        DeadLetterFilter {
            reason: self.reason.clone(),
            key: self.key.clone(),
            partition: self.partition,
            from: self.from_ms.map(Timestamp::from_millis),
            to: self.to_ms.map(Timestamp::from_millis),
        }
    }

    /// Whether a letter that matches the filter has the cause.
    pub(crate) fn has_cause(&self, letter: &DeadLetter) -> bool {
        self.cause.as_ref().is_none_or(|cause| *cause == cause_of(&letter.reason))
    }
}

/// What a plan would do.
#[derive(Debug, Default)]
pub(crate) struct PlanPreview {
    /// Letters that would be replayed.
    pub(crate) ready: u64,
    /// Letters that were replayed before, and copies.
    pub(crate) already_replayed: u64,
    /// Letters that cannot or must not be replayed, and why the first one.
    pub(crate) refused: u64,
    pub(crate) refusal: Option<String>,
    /// Whether all letters were counted. If not, the plan ends where the count ended.
    pub(crate) is_complete: bool,
    /// Topics and some of the letters.
    pub(crate) examples: Vec<(String, DeadLetter)>,
    /// The groups that handle them.
    pub(crate) groups: BTreeSet<String>,
}

impl PlanPreview {
    /// All letters that match.
    pub(crate) fn total(&self) -> u64 {
        self.ready + self.already_replayed + self.refused
    }
}

/// Counts the letters of a selection and sets the end of each topic.
pub(crate) async fn count(
    queue: &Queue,
    selection: &mut PlanSelection,
) -> Result<PlanPreview, QueueError> {
    let mut preview = PlanPreview { is_complete: true, ..PlanPreview::default() };
    let (filter, deadline) = (selection.filter(), Instant::now() + COUNT_TIME_MAX);
    let (mut topics, mut scanned) = (Vec::new(), 0);
    for named in selection.topics.clone() {
        if !preview.is_complete {
            break;
        }
        let letters = queue.dead_letters(&named.topic).await?;
        let Some(to) = letters.last_id().await? else { continue };
        let mut after = EntryId::MIN;
        loop {
            let page = letters.candidates(&filter, (after, to), PAGE, selection.max_replays);
            let page = page.await?;
            scanned += page.items.len();
            after = page.last.unwrap_or(after);
            let matching = page.items.into_iter().filter(|one| selection.has_cause(&one.letter));
            for candidate in matching {
                match candidate.readiness {
                    ReplayReadiness::Replayed => preview.already_replayed += 1,
                    ReplayReadiness::Refused(problem) => {
                        preview.refused += 1;
                        preview.refusal.get_or_insert(problem);
                    }
                    ReplayReadiness::Ready(_) => {
                        preview.ready += 1;
                        preview.groups.extend(candidate.letter.group.clone());
                        if preview.examples.len() < EXAMPLES_MAX {
                            preview.examples.push((named.topic.clone(), candidate.letter));
                        }
                    }
                }
            }
            let is_over = scanned >= SCANNED_MAX || Instant::now() >= deadline;
            if page.has_ended || is_over {
                preview.is_complete = page.has_ended;
                break;
            }
        }
        let to = if preview.is_complete { to } else { after };
        topics.push(PlanTopic { topic: named.topic, to: to.to_string() });
    }
    selection.topics = topics;
    Ok(preview)
}
