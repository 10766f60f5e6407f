//! What became of the webhooks of this process: counts per integration, and the latest that were rejected or ignored.
//!
//! Upstream: `webhooks/`. Downstream: `api/webhooks.rs`. Guarantees: memory is bounded; nothing of a payload is kept.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use headwater_stream::clock::{Clock, SystemClock, Timestamp};

use crate::text::cut;

/// Number of rejected and ignored webhooks that are kept.
const RECENT_MAX: usize = 100;

/// Maximum bytes of a reason or name.
const REASON_BYTES_MAX: usize = 300;

/// What became of a webhook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WebhookResult {
    Recorded,
    Duplicate,
    Ignored,
    Rejected,
}

impl WebhookResult {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Recorded => "recorded",
            Self::Duplicate => "duplicate",
            Self::Ignored => "ignored",
            Self::Rejected => "rejected",
        }
    }
}

/// Counts of one integration since the process started.
#[derive(Clone, Debug, Default)]
pub(crate) struct WebhookCounts {
    pub(crate) recorded: u64,
    pub(crate) duplicate: u64,
    pub(crate) ignored: u64,
    pub(crate) rejected: u64,
    pub(crate) last_at: Option<Timestamp>,
}

/// A webhook that was rejected or ignored.
#[derive(Clone, Debug)]
pub(crate) struct UnrecordedWebhook {
    pub(crate) at: Timestamp,
    /// As in the address of the request.
    pub(crate) integration: String,
    pub(crate) result: WebhookResult,
    pub(crate) reason: String,
}

#[derive(Default)]
struct LoggedWebhooks {
    counts: BTreeMap<String, WebhookCounts>,
    recent: VecDeque<UnrecordedWebhook>,
}

/// The log of one process.
#[derive(Default)]
pub(crate) struct WebhookLog(Mutex<LoggedWebhooks>);

impl WebhookLog {
    /// Records what became of a webhook. Only known integrations are counted: a sender must not be able to fill the
    /// memory with names.
    pub(crate) fn record(
        &self,
        integration: &str,
        is_known: bool,
        result: WebhookResult,
        reason: &str,
    ) {
        let at = SystemClock.now();
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if is_known {
            let counts = logged.counts.entry(integration.to_owned()).or_default();
            let count = match result {
                WebhookResult::Recorded => &mut counts.recorded,
                WebhookResult::Duplicate => &mut counts.duplicate,
                WebhookResult::Ignored => &mut counts.ignored,
                WebhookResult::Rejected => &mut counts.rejected,
            };
            *count += 1;
            counts.last_at = Some(at);
        }
        if matches!(result, WebhookResult::Ignored | WebhookResult::Rejected) {
            logged.recent.truncate(RECENT_MAX - 1);
            let short = |text: &str| cut(text, REASON_BYTES_MAX).to_owned();
            let (integration, reason) = (short(integration), short(reason));
            logged.recent.push_front(UnrecordedWebhook { at, integration, result, reason });
        }
    }

    /// The counts of an integration.
    pub(crate) fn counts(&self, integration: &str) -> WebhookCounts {
        let logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        logged.counts.get(integration).cloned().unwrap_or_default()
    }

    /// The latest rejected and ignored webhooks, newest first.
    pub(crate) fn recent(&self) -> Vec<UnrecordedWebhook> {
        let logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        logged.recent.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_unknown_integrations_are_not_counted() {
        let log = WebhookLog::default();
        for number in 0..3 * RECENT_MAX {
            let name = format!("unknown-{number}-{}", "x".repeat(1000));
            log.record(&name, false, WebhookResult::Rejected, "no such integration");
        }
        log.record("shop", true, WebhookResult::Recorded, "");
        log.record("shop", true, WebhookResult::Ignored, "sent by a bot");
        let recent = log.recent();
        assert_eq!((recent.len(), &*recent[0].reason), (RECENT_MAX, "sent by a bot"));
        assert!(recent.iter().all(|one| one.integration.len() <= REASON_BYTES_MAX));
        assert_eq!(log.0.lock().unwrap().counts.len(), 1);
        let counts = log.counts("shop");
        assert_eq!((counts.recorded, counts.ignored, counts.rejected), (1, 1, 0));
    }
}
