//! The calls of [`Dedup`].

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::Embedded;
use super::change::Until;
use super::effect::Effect;
use super::state::marks::footprint_mark;
use crate::check;
use crate::dedup::{Begin, Dedup};
use crate::error::Result;
use crate::name::DedupScope;

#[async_trait]
impl Dedup for Embedded {
    async fn dedup_begin(
        &self,
        scope: &DedupScope,
        ids: &[&str],
        hold: Duration,
    ) -> Result<Vec<Begin>> {
        check::dedup(ids.iter().map(|id| (*id, &[][..])), Some(hold))?;
        let begin = self.shared().change(Until::Durable, |change| {
            let scope = scope.as_str();
            let bytes = |id: &&str| match change.state().marks.get(scope, id, change.now) {
                Some(_) => 0,
                None => footprint_mark(scope, id, None),
            };
            change.room_for(ids.iter().map(bytes).sum())?;
            let mut answers = Vec::with_capacity(ids.len());
            for id in ids {
                // One by one: an id that is given twice is fresh once.
                let known = change.state().marks.get(scope, id, change.now);
                answers.push(match known.map(|mark| mark.done.clone()) {
                    Some(Some(value)) => Begin::Done(value),
                    Some(None) => Begin::Busy,
                    None => {
                        let (at, until) = (change.now, change.now.after(hold));
                        change.apply(&Effect::Mark { scope, id, done: None, until, at });
                        Begin::Fresh
                    }
                });
            }
            Ok(answers)
        });
        begin.await
    }

    async fn dedup_finish(
        &self,
        scope: &DedupScope,
        done: &[(&str, Bytes)],
        keep: Duration,
    ) -> Result<()> {
        check::dedup(done.iter().map(|(id, value)| (*id, &value[..])), Some(keep))?;
        let finish = self.shared().change(Until::Durable, |change| {
            let scope = scope.as_str();
            let bytes = |(id, value): &(&str, Bytes)| {
                let old = change.state().marks.get(scope, id, change.now);
                let old = old.map_or(0, |old| footprint_mark(scope, id, old.done.as_ref()));
                footprint_mark(scope, id, Some(value)).saturating_sub(old)
            };
            change.room_for(done.iter().map(bytes).sum())?;
            for (id, value) in done {
                let (at, until) = (change.now, change.now.after(keep));
                let done = Some(value.clone());
                change.apply(&Effect::Mark { scope, id, done, until, at });
            }
            Ok(())
        });
        finish.await
    }

    async fn dedup_abandon(&self, scope: &DedupScope, ids: &[&str]) -> Result<()> {
        check::dedup(ids.iter().map(|id| (*id, &[][..])), None)?;
        let abandon = self.shared().change(Until::Durable, |change| {
            let scope = scope.as_str();
            for id in ids {
                let mark = change.state().marks.get(scope, id, change.now);
                if mark.is_some_and(|mark| mark.done.is_none()) {
                    change.apply(&Effect::Unmark { scope, id });
                }
            }
            Ok(())
        });
        abandon.await
    }
}
