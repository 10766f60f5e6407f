//! De-duplication in two phases, so that a crash in the middle never loses a message.
//!
//! `dedup_begin` marks an id as in progress for a short time, `dedup_finish` as done for a long time. If the process dies in
//! between, the first mark expires soon and the message is processed again.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::Result;
use crate::name::DedupScope;

/// Remembers which ids were processed.
#[async_trait]
pub trait Dedup: Send + Sync {
    /// Marks new ids as in progress for `hold`. Returns the status of each before the call, in order.
    async fn dedup_begin(
        &self,
        scope: &DedupScope,
        ids: &[&str],
        hold: Duration,
    ) -> Result<Vec<DedupStatus>>;

    /// Marks ids as done for `keep`, each with a value that later calls of `dedup_begin` return.
    async fn dedup_finish(
        &self,
        scope: &DedupScope,
        done: &[(&str, Bytes)],
        keep: Duration,
    ) -> Result<()>;

    /// Removes in-progress marks, so that the ids are new again. Done ids are not changed.
    async fn dedup_abandon(&self, scope: &DedupScope, ids: &[&str]) -> Result<()>;
}

/// Status of a de-duplication id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DedupStatus {
    /// Not known: the caller processes it.
    New,
    /// Another caller began and has not finished. The mark expires if that caller died.
    InProgress,
    /// Processed, with this value.
    Done(Bytes),
}
