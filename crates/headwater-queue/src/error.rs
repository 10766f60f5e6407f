//! What can go wrong with topics and messages, split by what the caller does next.

use std::time::Duration;

use headwater_stream::StreamError;

/// A result of this crate.
pub type Result<T, E = QueueError> = std::result::Result<T, E>;

/// Why a call to the queue failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// The caller asked for something the queue does not do. Mend the call; nothing happened.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// Which argument.
        what: String,
        /// What is wrong with it, and what is allowed.
        problem: String,
    },

    /// There is no such topic. Create it, or mend the name.
    #[error("there is no topic `{topic}`; create it first")]
    NoTopic {
        /// The name asked for.
        topic: String,
    },

    /// There is a topic of this name with other settings. Choose another name, or grow the one that is there.
    #[error("topic `{topic}` exists with other settings: {difference}")]
    TopicExists {
        /// The name.
        topic: String,
        /// What differs.
        difference: String,
    },

    /// Nobody knows a group of this name on the topic.
    #[error("topic `{topic}` has no group `{group}`")]
    NoGroup {
        /// The topic.
        topic: String,
        /// The group it lacks.
        group: String,
    },

    /// There is no dead letter of this id. It may have been replayed or purged meanwhile.
    #[error("topic `{topic}` has no dead letter `{id}`")]
    NoDeadLetter {
        /// The topic.
        topic: String,
        /// The id asked for.
        id: String,
    },

    /// Somebody reads, so what was asked for would surprise them. Stop them first, or force it by name.
    #[error(
        "group `{group}` of topic `{topic}` is at work ({who}); stop it first (a reset can be forced)"
    )]
    GroupAtWork {
        /// The topic.
        topic: String,
        /// The group.
        group: String,
        /// Some of those who are at work.
        who: String,
    },

    /// Somebody else changes the topic at this moment. Try again.
    #[error("topic `{topic}` is being changed by somebody else ({by}); try again")]
    Busy {
        /// The topic.
        topic: String,
        /// Who changes it.
        by: String,
    },

    /// The topic holds as many bytes as it may and its consumers have not caught up. Send again later; nothing was sent.
    #[error(
        "topic `{topic}` holds {bytes} bytes of at most {budget}; send again in {retry_after:?}, \
         consume faster or raise the budget"
    )]
    Backlogged {
        /// The topic.
        topic: String,
        /// What it holds.
        bytes: u64,
        /// What it may hold.
        budget: u64,
        /// When it is worth trying again.
        retry_after: Duration,
    },

    /// The deadline of a send passed. It may still be carried out: repeat it with the same id to be sure it counts once.
    #[error("the message to `{topic}` was not confirmed within {deadline:?}; it may still arrive")]
    DeadlineExceeded {
        /// The topic.
        topic: String,
        /// How long was allowed.
        deadline: Duration,
    },

    /// A change of several partitions failed after some of them were changed. [`Interrupted`] says how far it came, and what to
    /// do next.
    #[error(transparent)]
    Interrupted(Box<Interrupted>),

    /// The queue or subscription was stopped.
    #[error("{what} is stopped")]
    Stopped {
        /// What was asked to work.
        what: String,
    },

    /// The backend failed. [`StreamError`] says whether the same call may succeed later.
    #[error(transparent)]
    Backend(#[from] StreamError),
}

impl QueueError {
    /// An invalid argument: which one, and what is wrong with it.
    pub(crate) fn invalid(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), problem: problem.into() }
    }

    /// The same error for one more caller of a shared call.
    pub(crate) fn again(&self) -> Self {
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
            Self::GroupAtWork { topic, group, who } => {
                Self::GroupAtWork { topic: topic.clone(), group: group.clone(), who: who.clone() }
            }
            Self::Busy { topic, by } => Self::Busy { topic: topic.clone(), by: by.clone() },
            Self::Backlogged { topic, bytes, budget, retry_after } => Self::Backlogged {
                topic: topic.clone(),
                bytes: *bytes,
                budget: *budget,
                retry_after: *retry_after,
            },
            Self::DeadlineExceeded { topic, deadline } => {
                Self::DeadlineExceeded { topic: topic.clone(), deadline: *deadline }
            }
            Self::Interrupted(interrupted) => {
                let source = interrupted.source.again();
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
            Self::Backend(error) => Self::Backend(error.again()),
        }
    }

    /// Whether the same call may succeed later without anybody mending anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Backlogged { .. } | Self::DeadlineExceeded { .. } | Self::Busy { .. } => true,
            Self::Backend(error) => error.is_transient(),
            Self::Interrupted(interrupted) => interrupted.source.is_transient(),
            _ => false,
        }
    }
}

/// How far a change of several partitions came before it failed. Doing what `next` says finishes it, and is harmless where it
/// is done.
#[derive(Debug, thiserror::Error)]
#[error("{what} was interrupted: {}: {source}; {next}", describe(done, uncertain, left))]
pub struct Interrupted {
    /// What was being done, and to which topic and group.
    pub what: String,
    /// Partitions that are changed.
    pub done: Vec<u16>,
    /// Partitions that may be changed or not: the backend did not answer.
    pub uncertain: Vec<u16>,
    /// Partitions that are as they were.
    pub left: Vec<u16>,
    /// What to do next.
    pub next: String,
    /// Why it failed.
    pub source: QueueError,
}

impl Interrupted {
    /// The same in words, without the reason: that may name servers.
    pub fn progress(&self) -> String {
        let progress = describe(&self.done, &self.uncertain, &self.left);
        format!("{} was interrupted: {progress}; {}", self.what, self.next)
    }
}

/// How far a change came, in words.
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
    fn partitions_are_written_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[u16::MAX]), "65535");
    }
}
