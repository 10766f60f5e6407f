//! Copies of dead letters in the warehouse, so that reports can count them.
//!
//! Upstream: the dead letters of topics, which are only looked at. Downstream: `warehouse`.
//! Promises: each dead letter is copied once, replayed and purged ones included if they lay there for one look.

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
use crate::limits::LETTERS_PAGE;
use crate::warehouse::{DeadLetterRow, Warehouse};

/// Settings of the copying.
#[derive(Clone, Debug)]
pub struct LetterMirrorConfig {
    /// Plain topics, which nobody has created, whose dead letters are copied beside those of all others. Default:
    /// `ticket_events` and `issue_work`.
    pub plain_topics: Vec<String>,
    /// How often they are looked at. Default: 10 s.
    pub every: Duration,
}

impl Default for LetterMirrorConfig {
    fn default() -> Self {
        Self {
            plain_topics: vec!["ticket_events".to_owned(), "issue_work".to_owned()],
            every: Duration::from_secs(10),
        }
    }
}

/// Copies dead letters into the warehouse.
#[derive(Debug)]
pub struct LetterMirror {
    queue: Queue,
    warehouse: Arc<Warehouse>,
    config: LetterMirrorConfig,
}

impl LetterMirror {
    /// Copies those of `queue`.
    pub fn new(queue: Queue, warehouse: Arc<Warehouse>, config: LetterMirrorConfig) -> Self {
        Self { queue, warehouse, config }
    }

    /// Copies all that are new, and says how many.
    pub async fn run_once(&self) -> Result<usize> {
        let mut topics: BTreeSet<String> = self.config.plain_topics.iter().cloned().collect();
        topics.extend(self.queue.topics().list().await?);
        let mut copied = 0;
        for topic in &topics {
            copied += self.copy(topic).await?;
        }
        Ok(copied)
    }

    /// Copies until `shutdown`.
    pub async fn run(&self, shutdown: impl Future<Output = ()>) {
        let mut shutdown = pin!(shutdown);
        loop {
            let look = async {
                if let Err(error) = self.run_once().await {
                    warn!(%error, "dead letters could not be copied, will try again");
                }
                tokio::time::sleep(self.config.every).await;
            };
            tokio::select! {
                () = &mut shutdown => return,
                () = look => {}
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
        let last = self.blocking(move |warehouse| warehouse.last_letter(&name)).await?;
        let from = last.map(|last| Timestamp::from_millis(last.ms));
        let mut query = DeadLetterQuery {
            filter: DeadLetterFilter { from, ..DeadLetterFilter::default() },
            limit: LETTERS_PAGE,
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
            copied += self.blocking(move |warehouse| warehouse.store_letters(&name, &rows)).await?;
            match page.next {
                Some(next) => query.cursor = Some(next),
                None => return Ok(copied),
            }
        }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Warehouse) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let warehouse = Arc::clone(&self.warehouse);
        let called = tokio::task::spawn_blocking(move || call(&warehouse)).await;
        called.unwrap_or_else(|ended| {
            Err(AnalyticsError::Warehouse { what: "copy dead letters", problem: ended.to_string() })
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
