//! Errors of the queue, split by what the caller does next.

use std::time::Duration;

use headwater_stream::StreamError;

/// A result of this crate.
pub type Result<T, E = QueueError> = std::result::Result<T, E>;

/// Why a call to the queue failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// An argument is invalid. Fix the arguments; retrying will not help. The call had no effect.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// Which argument.
        what: String,
        /// What is wrong with it, and what is allowed.
        problem: String,
    },

    /// The topic does not exist. Create it, or fix the name.
    #[error("topic `{topic}` does not exist; create it first")]
    NoTopic {
        /// The requested name.
        topic: String,
    },

    /// A topic of this name exists with other settings. Choose another name, or resize the existing topic.
    #[error("topic `{topic}` exists with other settings: {difference}")]
    TopicExists {
        /// The name.
        topic: String,
        /// What differs.
        difference: String,
    },

    /// The topic has no group of this name.
    #[error("topic `{topic}` has no group `{group}`")]
    NoGroup {
        /// The topic.
        topic: String,
        /// The requested group.
        group: String,
    },

    /// The topic has no dead letter with this id. It may have been replayed or purged.
    #[error("topic `{topic}` has no dead letter `{id}`")]
    NoDeadLetter {
        /// The topic.
        topic: String,
        /// The requested id.
        id: String,
    },

    /// The group has active members, so it must not be changed. Stop them first; a reset can be forced.
    #[error(
        "group `{group}` of topic `{topic}` is active ({who}); stop its members first (a reset can be forced)"
    )]
    GroupActive {
        /// The topic.
        topic: String,
        /// The group.
        group: String,
        /// Some of the active members.
        who: String,
    },

    /// Another process is changing the topic. Try again.
    #[error("topic `{topic}` is being changed by another process ({by}); try again")]
    Busy {
        /// The topic.
        topic: String,
        /// The process that changes it.
        by: String,
    },

    /// The byte budget of the topic is exhausted: its consumers have not caught up. Send again later; nothing was sent.
    #[error(
        "byte budget of topic `{topic}` exceeded: it holds {bytes} bytes of at most {budget}; \
         send again in {} ms, consume faster or raise the budget",
        .retry_after.as_millis() + 1
    )]
    BudgetExceeded {
        /// The topic.
        topic: String,
        /// Bytes it holds.
        bytes: u64,
        /// Bytes it may hold.
        budget: u64,
        /// When to try again.
        retry_after: Duration,
    },

    /// Too many messages of the group are leased and not settled. Settle some, then pull again.
    #[error(
        "group `{group}` of topic `{topic}` has {leased} messages that are delivered and not settled; settle some of \
         them, then pull again"
    )]
    TooManyLeased {
        /// The topic.
        topic: String,
        /// The group.
        group: String,
        /// Messages delivered and not settled.
        leased: u64,
    },

    /// The deadline of a send passed. The message may still arrive: retry with the same id to avoid a duplicate.
    #[error(
        "the message to topic `{topic}` was not confirmed within {deadline:?}; it may still arrive"
    )]
    DeadlineExceeded {
        /// The topic.
        topic: String,
        /// The deadline.
        deadline: Duration,
    },

    /// A change of several partitions failed after some of them were changed. [`Interrupted`] reports the progress and
    /// the next step.
    #[error(transparent)]
    Interrupted(Box<Interrupted>),

    /// The queue or subscription was stopped.
    #[error("{what} is stopped")]
    Stopped {
        /// What was stopped.
        what: String,
    },

    /// The backend failed. [`StreamError::is_transient`] tells whether a retry may succeed.
    #[error(transparent)]
    Backend(#[from] StreamError),
}

impl QueueError {
    /// An invalid argument: which one, and what is wrong with it.
    pub(crate) fn invalid(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), problem: problem.into() }
    }

    /// The same error for another caller of a shared call.
    pub(crate) fn duplicate(&self) -> Self {
        match self {
            Self::Invalid { what, problem } => Self::invalid(what, problem),
            Self::NoTopic { topic } => Self::NoTopic { topic: topic.clone() },
            Self::TopicExists { topic, difference } => {
                Self::TopicExists { topic: topic.clone(), difference: difference.clone() }
            }
            Self::NoGroup { topic, group } => {
                Self::NoGroup { topic: topic.clone(), group: group.clone() }
            }
            Self::NoDeadLetter { topic, id } => {
                Self::NoDeadLetter { topic: topic.clone(), id: id.clone() }
            }
            Self::GroupActive { topic, group, who } => {
                Self::GroupActive { topic: topic.clone(), group: group.clone(), who: who.clone() }
            }
            Self::Busy { topic, by } => Self::Busy { topic: topic.clone(), by: by.clone() },
            Self::BudgetExceeded { topic, bytes, budget, retry_after } => Self::BudgetExceeded {
                topic: topic.clone(),
                bytes: *bytes,
                budget: *budget,
                retry_after: *retry_after,
            },
            Self::TooManyLeased { topic, group, leased } => {
                Self::TooManyLeased { topic: topic.clone(), group: group.clone(), leased: *leased }
            }
            Self::DeadlineExceeded { topic, deadline } => {
                Self::DeadlineExceeded { topic: topic.clone(), deadline: *deadline }
            }
            Self::Interrupted(interrupted) => {
                let source = interrupted.source.duplicate();
                let Interrupted { what, done, uncertain, left, next, .. } = &**interrupted;
                Self::Interrupted(Box::new(Interrupted {
                    what: what.clone(),
                    done: done.clone(),
                    uncertain: uncertain.clone(),
                    left: left.clone(),
                    next: next.clone(),
                    source,
                }))
            }
            Self::Stopped { what } => Self::Stopped { what: what.clone() },
            Self::Backend(error) => Self::Backend(error.duplicate()),
        }
    }

    /// Whether the same call may succeed later without a change.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::BudgetExceeded { .. }
            | Self::DeadlineExceeded { .. }
            | Self::TooManyLeased { .. }
            | Self::Busy { .. } => true,
            Self::Backend(error) => error.is_transient(),
            Self::Interrupted(interrupted) => interrupted.source.is_transient(),
            _ => false,
        }
    }
}

/// Progress of a change of several partitions that failed. The step in `next` completes it; it is idempotent.
#[derive(Debug, thiserror::Error)]
#[error("{what} was interrupted: {}: {source}; {next}", describe(done, uncertain, left))]
pub struct Interrupted {
    /// The operation, with topic and group.
    pub what: String,
    /// Partitions that were changed.
    pub done: Vec<u16>,
    /// Partitions that may have been changed: the backend did not answer.
    pub uncertain: Vec<u16>,
    /// Partitions that were not changed.
    pub left: Vec<u16>,
    /// The next step.
    pub next: String,
    /// Why it failed.
    pub source: QueueError,
}

impl Interrupted {
    /// The message without the source, which may name servers.
    pub fn progress(&self) -> String {
        let progress = describe(&self.done, &self.uncertain, &self.left);
        format!("{} was interrupted: {progress}; {}", self.what, self.next)
    }
}

/// The progress of a change as text.
fn describe(done: &[u16], uncertain: &[u16], left: &[u16]) -> String {
    let parts = [("done on", done), ("perhaps done on", uncertain), ("not done on", left)];
    let parts = parts.iter().filter(|(_, partitions)| !partitions.is_empty());
    let parts = parts.map(|(how, partitions)| match partitions {
        [one] => format!("{how} partition {one}"),
        several => format!("{how} partitions {}", ranges(several)),
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// `0-2, 5` for 0, 1, 2 and 5.
fn ranges(partitions: &[u16]) -> String {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for partition in partitions {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*partition) => *last = *partition,
            _ => ranges.push((*partition, *partition)),
        }
    }
    let text = |(first, last): &(u16, u16)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_formatted_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[u16::MAX]), "65535");
    }
}
