//! Purging: deletes dead letters permanently.

use headwater_stream::{Direction, EntryId};
use tracing::info;

use super::scan::{BATCH, DeadLetterScan};
use super::{DeadLetterSelection, DeadLetters};
use crate::error::Result;

/// Options of a purge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PurgeConfig {
    /// Report what would happen without changing anything.
    pub dry_run: bool,
}

/// The result of a purge or its dry run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PurgeReport {
    /// Dead letters deleted, including copies.
    pub purged: u64,
    /// Whether it was done; `false` after a dry run.
    pub is_done: bool,
}

impl DeadLetters {
    /// Deletes dead letters. With ids, fails without effect if one of them does not exist.
    pub async fn purge(
        &self,
        letters: DeadLetterSelection,
        config: &PurgeConfig,
    ) -> Result<PurgeReport> {
        self.purge_with_progress(letters, config, &|_| ()).await
    }

    /// Like [`Self::purge`]; calls `on_progress` after each batch.
    pub async fn purge_with_progress(
        &self,
        letters: DeadLetterSelection,
        config: &PurgeConfig,
        on_progress: &(dyn Fn(&PurgeReport) + Send + Sync),
    ) -> Result<PurgeReport> {
        let mut report = PurgeReport { purged: 0, is_done: !config.dry_run };
        match letters {
            DeadLetterSelection::Ids(ids) => {
                let ids: Vec<EntryId> =
                    self.named(&ids).await?.into_iter().map(|letter| letter.id).collect();
                report.purged = self.remove(&ids, config).await?;
            }
            DeadLetterSelection::Matching(filter) => {
                let range = self.range_until_now(&filter).await?;
                let mut scan = DeadLetterScan::new(self, &filter, range, Direction::Forward);
                let mut batch = Vec::new();
                while let Some(found) = scan.next().await? {
                    batch.extend(found.matching.map(|letter| letter.id));
                    if batch.len() >= BATCH {
                        report.purged += self.remove(&batch, config).await?;
                        batch.clear();
                        on_progress(&report);
                    }
                }
                report.purged += self.remove(&batch, config).await?;
            }
        }
        let PurgeReport { purged, is_done } = report;
        info!(topic = %self.topic.name, purged, is_done, "dead letters purged");
        Ok(report)
    }

    async fn remove(&self, ids: &[EntryId], config: &PurgeConfig) -> Result<u64> {
        if config.dry_run || ids.is_empty() {
            return Ok(ids.len() as u64);
        }
        Ok(self.queue.inner.backend.delete_entries(&self.stream, ids).await? as u64)
    }
}
