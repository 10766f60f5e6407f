//! Copies dead letters into the analytics store for reports.
//!
//! Upstream: the dead letters of topics, which are only read. Downstream: `store`.
//! Guarantees: each dead letter is copied once, also one that is later replayed or purged, if it existed during one pass.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use headwater_queue::{DeadLetter, DeadLetterFilter, DeadLetterQuery, Queue, QueueError};
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;
use tracing::warn;

use crate::error::{AnalyticsError, Result};
use crate::limits::DEAD_LETTERS_PAGE;
use crate::store::{AnalyticsStore, DeadLetterRow};

/// Settings of the dead-letter mirror.
#[derive(Clone, Debug)]
pub struct DeadLetterMirrorConfig {
    /// Plain topics to copy in addition to all created topics. Default: `ticket_events` and `issue_work`.
    pub plain_topics: Vec<String>,
    /// Time between two passes. Default: 10 s.
    pub every: Duration,
}

impl Default for DeadLetterMirrorConfig {
    fn default() -> Self {
        Self {
            plain_topics: vec!["ticket_events".to_owned(), "issue_work".to_owned()],
            every: Duration::from_secs(10),
        }
    }
}

/// Copies dead letters into the analytics store.
#[derive(Debug)]
pub struct DeadLetterMirror {
    queue: Queue,
    store: Arc<AnalyticsStore>,
    config: DeadLetterMirrorConfig,
}

impl DeadLetterMirror {
    /// Creates a mirror for the topics of `queue`.
    pub fn new(queue: Queue, store: Arc<AnalyticsStore>, config: DeadLetterMirrorConfig) -> Self {
        Self { queue, store, config }
    }

    /// Copies all new dead letters; returns how many.
    pub async fn run_once(&self) -> Result<usize> {
        let mut topics: BTreeSet<String> = self.config.plain_topics.iter().cloned().collect();
        topics.extend(self.queue.topics().list().await?);
        let mut copied = 0;
        for topic in &topics {
            copied += self.copy(topic).await?;
        }
        Ok(copied)
    }

    /// Copies periodically until `shutdown` completes.
    pub async fn run(&self, shutdown: impl Future<Output = ()>) {
        let mut shutdown = pin!(shutdown);
        loop {
            let pass = async {
                if let Err(error) = self.run_once().await {
                    warn!(%error, "copying dead letters failed, retrying");
                }
                tokio::time::sleep(self.config.every).await;
            };
            tokio::select! {
                () = &mut shutdown => return,
                () = pass => {}
            }
        }
    }

    async fn copy(&self, topic: &str) -> Result<usize> {
        let letters = match self.queue.dead_letters(topic).await {
            Ok(letters) => letters,
            Err(QueueError::NoTopic { .. }) => return Ok(0),
            Err(error) => return Err(error.into()),
        };
        let name = topic.to_owned();
        let last = self.blocking(move |store| store.last_dead_letter(&name)).await?;
        let from = last.map(|last| Timestamp::from_millis(last.ms));
        let mut query = DeadLetterQuery {
            filter: DeadLetterFilter { from, ..DeadLetterFilter::default() },
            limit: DEAD_LETTERS_PAGE,
            ..DeadLetterQuery::default()
        };
        let mut copied = 0;
        loop {
            let page = letters.browse(&query).await?;
            let is_new = |letter: &DeadLetter| last.is_none_or(|last| letter.id > last);
            let rows: Vec<DeadLetterRow> = page
                .items
                .iter()
                .filter(|letter| is_new(letter))
                .map(|letter| row(topic, letter))
                .collect();
            let name = topic.to_owned();
            copied += self.blocking(move |store| store.store_dead_letters(&name, &rows)).await?;
            match page.next {
                Some(next) => query.cursor = Some(next),
                None => return Ok(copied),
            }
        }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(&AnalyticsStore) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let store = Arc::clone(&self.store);
        let called = tokio::task::spawn_blocking(move || call(&store)).await;
        called.unwrap_or_else(|ended| {
            Err(AnalyticsError::Store { what: "copy dead letters", problem: ended.to_string() })
        })
    }
}

fn row(topic: &str, letter: &DeadLetter) -> DeadLetterRow {
    let EntryId { ms, .. } = letter.id;
    DeadLetterRow {
        topic: topic.to_owned(),
        entry: letter.id,
        identity: letter.identity(),
        original_id: letter.original_id,
        failures: letter.failures,
        reason: letter.reason.clone(),
        failed_at: letter.failed_at.unwrap_or(Timestamp::from_millis(ms)),
    }
}
