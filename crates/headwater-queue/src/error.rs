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
            Self::Stopped { what } => Self::Stopped { what: what.clone() },
            Self::Backend(error) => Self::Backend(error.again()),
        }
    }

    /// Whether the same call may succeed later without anybody mending anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Backlogged { .. } | Self::DeadlineExceeded { .. } | Self::Busy { .. } => true,
            Self::Backend(error) => error.is_transient(),
            _ => false,
        }
    }
}
