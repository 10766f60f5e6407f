//! Implementation of [`Dedup`].

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::Embedded;
use super::redo_record::RedoRecord;
use super::state::dedup_table::dedup_footprint;
use super::transaction::Durability;
use crate::dedup::{Dedup, DedupStatus};
use crate::error::Result;
use crate::name::DedupScope;
use crate::validate;

#[async_trait]
impl Dedup for Embedded {
    async fn dedup_begin(
        &self,
        scope: &DedupScope,
        ids: &[&str],
        hold: Duration,
    ) -> Result<Vec<DedupStatus>> {
        validate::dedup(ids.iter().map(|id| (*id, &[][..])), Some(hold))?;
        let begin = self.shared().transact(Durability::Durable, |tx| {
            let scope = scope.as_str();
            let bytes = |id: &&str| match tx.state().dedup.get(scope, id, tx.now) {
                Some(_) => 0,
                None => dedup_footprint(scope, id, None),
            };
            tx.ensure_capacity(ids.iter().map(bytes).sum())?;
            let mut results = Vec::with_capacity(ids.len());
            for id in ids {
                // One by one, so that an id given twice is fresh once.
                let known = tx.state().dedup.get(scope, id, tx.now);
                results.push(match known.map(|record| record.done.clone()) {
                    Some(Some(value)) => DedupStatus::Done(value),
                    Some(None) => DedupStatus::InProgress,
                    None => {
                        let (at, until) = (tx.now, tx.now.after(hold));
                        tx.apply(&RedoRecord::SetDedup { scope, id, done: None, until, at });
                        DedupStatus::New
                    }
                });
            }
            Ok(results)
        });
        begin.await
    }

    async fn dedup_finish(
        &self,
        scope: &DedupScope,
        done: &[(&str, Bytes)],
        keep: Duration,
    ) -> Result<()> {
        validate::dedup(done.iter().map(|(id, value)| (*id, &value[..])), Some(keep))?;
        let finish = self.shared().transact(Durability::Durable, |tx| {
            let scope = scope.as_str();
            let bytes = |(id, value): &(&str, Bytes)| {
                let old = tx.state().dedup.get(scope, id, tx.now);
                let old = old.map_or(0, |old| dedup_footprint(scope, id, old.done.as_ref()));
                dedup_footprint(scope, id, Some(value)).saturating_sub(old)
            };
            tx.ensure_capacity(done.iter().map(bytes).sum())?;
            for (id, value) in done {
                let (at, until) = (tx.now, tx.now.after(keep));
                let done = Some(value.clone());
                tx.apply(&RedoRecord::SetDedup { scope, id, done, until, at });
            }
            Ok(())
        });
        finish.await
    }

    async fn dedup_abandon(&self, scope: &DedupScope, ids: &[&str]) -> Result<()> {
        validate::dedup(ids.iter().map(|id| (*id, &[][..])), None)?;
        let abandon = self.shared().transact(Durability::Durable, |tx| {
            let scope = scope.as_str();
            for id in ids {
                let record = tx.state().dedup.get(scope, id, tx.now);
                if record.is_some_and(|record| record.done.is_none()) {
                    tx.apply(&RedoRecord::RemoveDedup { scope, id });
                }
            }
            Ok(())
        });
        abandon.await
    }
}
