//! De-duplication in two phases, so that a crash in the middle never loses a message.
//!
//! `begin` marks an id for a short time, `finish` for a long one. A process that dies in between leaves a mark that
//! soon lapses, and the message is handled again.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::Result;
use crate::name::DedupScope;

/// Remembers which ids were handled.
#[async_trait]
pub trait Dedup: Send + Sync {
    /// Marks ids as begun for `hold`; one answer each, in order.
    async fn dedup_begin(
        &self,
        scope: &DedupScope,
        ids: &[&str],
        hold: Duration,
    ) -> Result<Vec<Begin>>;

    /// Marks ids as done for `keep`, each with a value for those who ask again.
    async fn dedup_finish(
        &self,
        scope: &DedupScope,
        done: &[(&str, Bytes)],
        keep: Duration,
    ) -> Result<()>;

    /// Takes begun marks back, so that the ids are fresh at once. Done ones stay.
    async fn dedup_abandon(&self, scope: &DedupScope, ids: &[&str]) -> Result<()>;
}

/// What is known of an id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begin {
    /// Nothing: it is the caller's to handle.
    Fresh,
    /// Somebody began and has not finished; the mark lapses if they died.
    Busy,
    /// It was handled, with this value.
    Done(Bytes),
}
