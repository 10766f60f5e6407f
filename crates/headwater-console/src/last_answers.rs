//! The last answers of the API, for the time when a dependency does not answer.
//!
//! Upstream: `api_client.rs`. Guarantees: an answer is for callers of the same role and view; at most [`LAST_MAX`] answers of at most
//! [`LAST_BYTES_MAX`] bytes each, for [`LAST_FOR`]. Whoever shows one says how old it is.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use crate::user::ConsoleRole;

/// How long, how many and how large answers are kept.
pub(crate) const LAST_FOR: Duration = Duration::from_secs(15 * 60);
pub(crate) const LAST_MAX: usize = 64;
pub(crate) const LAST_BYTES_MAX: usize = 128 * 1024;

/// Role, view and path of a read.
pub(crate) type AnswerKey = (ConsoleRole, String, String);

/// An answer, and how long ago it was given.
pub(crate) type LastAnswer = (Arc<Value>, Duration);

#[derive(Default)]
pub(crate) struct LastAnswers {
    answers: Mutex<HashMap<AnswerKey, (Instant, Arc<Value>)>>,
}

impl LastAnswers {
    fn answers(&self) -> MutexGuard<'_, HashMap<AnswerKey, (Instant, Arc<Value>)>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn remember(&self, key: AnswerKey, answer: Arc<Value>) {
        let now = Instant::now();
        let mut answers = self.answers();
        answers.retain(|_, (at, _)| now.duration_since(*at) < LAST_FOR);
        if answers.len() >= LAST_MAX && !answers.contains_key(&key) {
            let oldest = answers.iter().min_by_key(|(_, (at, _))| *at);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                answers.remove(&oldest);
            }
        }
        answers.insert(key, (now, answer));
    }

    pub(crate) fn recall(&self, key: &AnswerKey) -> Option<LastAnswer> {
        let answers = self.answers();
        let (at, answer) = answers.get(key)?;
        Some((Arc::clone(answer), at.elapsed())).filter(|(_, age)| *age < LAST_FOR)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(role: ConsoleRole, path: &str) -> AnswerKey {
        (role, String::new(), path.to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_kept_with_its_age_for_its_role_and_memory_is_bounded() {
        let last = LastAnswers::default();
        let topics = key(ConsoleRole::Read, "/topics");
        last.remember(topics.clone(), Arc::new(json!(1)));
        tokio::time::advance(Duration::from_secs(14)).await;
        assert_eq!(last.recall(&topics), Some((Arc::new(json!(1)), Duration::from_secs(14))));
        assert_eq!(last.recall(&key(ConsoleRole::Admin, "/topics")), None);
        last.remember(topics.clone(), Arc::new(json!(2)));
        assert_eq!(last.recall(&topics), Some((Arc::new(json!(2)), Duration::ZERO)));
        tokio::time::advance(LAST_FOR).await;
        assert_eq!(last.recall(&topics), None, "it is too old");
        for number in 0..2 * LAST_MAX {
            last.remember(key(ConsoleRole::Read, &number.to_string()), Arc::default());
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(last.answers().len(), LAST_MAX);
        assert!(last.recall(&key(ConsoleRole::Read, "0")).is_none(), "the oldest is forgotten");
    }
}
