//! Progress of a change over several partitions, and the error when it is interrupted.
//!
//! Upstream: `reset`, `remove_group`, `topics`. Guarantees: the error says which partitions are changed, which may be and
//! which are not, and how to continue. If nothing was changed, the original error is returned.

use headwater_stream::StreamError;

use crate::error::{Interrupted, QueueError};
use crate::topic::Partition;

/// Progress of a change over partitions, in the order they are changed.
pub(crate) struct PartitionProgress {
    partitions: Vec<Partition>,
    done: usize,
    begun: usize,
    /// Whether something else was changed before the first partition.
    has_begun: bool,
}

impl PartitionProgress {
    pub(crate) fn new(partitions: impl IntoIterator<Item = Partition>) -> Self {
        let partitions = partitions.into_iter().collect();
        Self { partitions, done: 0, begun: 0, has_begun: false }
    }

    /// Records that something other than a partition is being changed.
    pub(crate) fn begin(&mut self) {
        self.has_begun = true;
    }

    /// Starts the next `count` partitions; all before are done.
    pub(crate) fn next(&mut self, count: usize) {
        self.done = self.begun;
        self.begun += count;
    }

    /// Records that all started partitions are done.
    pub(crate) fn done(&mut self) {
        self.done = self.begun;
    }

    /// Returns the error for a change interrupted here: `what` was interrupted, and what to do `next`.
    pub(crate) fn interrupt(&self, what: String, next: String, source: QueueError) -> QueueError {
        let is_uncertain = matches!(
            source,
            QueueError::Backend(
                StreamError::Unavailable { .. }
                    | StreamError::Full { .. }
                    | StreamError::Protocol { .. }
            )
        );
        // A single change fails without effect or with an unknown effect. Of several concurrent ones, some may succeed.
        let begun = self.begun - self.done;
        let uncertain = if is_uncertain || begun > 1 { begun } else { 0 };
        if !self.has_begun && self.done + uncertain == 0 {
            return source;
        }
        let (done, rest) = self.partitions.split_at(self.done);
        let (uncertain, left) = rest.split_at(uncertain);
        QueueError::Interrupted(Box::new(Interrupted {
            what,
            done: done.to_vec(),
            uncertain: uncertain.to_vec(),
            left: left.to_vec(),
            next,
            source,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unavailable() -> QueueError {
        let problem = "no answer".to_owned();
        StreamError::Unavailable { problem, source: None }.into()
    }

    fn interrupt(progress: &PartitionProgress, source: QueueError) -> QueueError {
        progress.interrupt("a reset".to_owned(), "repeat it".to_owned(), source)
    }

    #[test]
    fn the_error_says_which_partitions_are_done_and_what_to_do_next() {
        let mut progress = PartitionProgress::new(0..8);
        progress.next(1);
        progress.next(1);
        progress.next(1);
        let error = interrupt(&progress, unavailable());
        assert_eq!(
            error.to_string(),
            "a reset was interrupted: done on partitions 0-1, perhaps done on partition 2, not done \
             on partitions 3-7: the backend is unavailable: no answer; repeat it"
        );
        assert!(error.is_transient());
        assert_eq!(error.duplicate().to_string(), error.to_string());
        let denied = || QueueError::Backend(StreamError::Denied { problem: "no".to_owned() });
        let error = interrupt(&progress, denied());
        assert!(error.to_string().contains("not done on partitions 2-7"), "{error}");
        assert!(!error.is_transient());
    }

    #[test]
    fn a_change_without_effect_returns_the_original_error() {
        let mut progress = PartitionProgress::new([3]);
        assert!(matches!(interrupt(&progress, unavailable()), QueueError::Backend(_)));
        progress.next(1);
        let denied = StreamError::Denied { problem: "no".to_owned() };
        assert!(matches!(interrupt(&progress, denied.into()), QueueError::Backend(_)));
        assert!(matches!(interrupt(&progress, unavailable()), QueueError::Interrupted(_)));
        progress.begin();
        let denied = StreamError::Denied { problem: "no".to_owned() };
        assert!(matches!(interrupt(&progress, denied.into()), QueueError::Interrupted(_)));
    }
}
