//! De-duplication on Redis: a string per id that expires. `b` is begun, `d` and a value is done.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::RedisBackend;
use super::command::Commands;
use super::error::Failure;
use super::reply::Cursor;
use super::servers::Effect;
use super::streams::{list, millis};
use super::{keys, scripts};
use crate::check;
use crate::dedup::{Begin, Dedup};
use crate::error::Result;
use crate::name::DedupScope;

#[async_trait]
impl Dedup for RedisBackend {
    async fn dedup_begin(
        &self,
        scope: &DedupScope,
        ids: &[&str],
        hold: Duration,
    ) -> Result<Vec<Begin>> {
        check::dedup(ids.iter().map(|id| (*id, &b""[..])), Some(hold))?;
        let keys: Vec<String> = ids.iter().map(|id| keys::dedup(scope, id)).collect();
        let commands = Commands::run(&scripts::BEGIN, &keys, &[millis(hold).to_string()]);
        // Begun twice, an id would be busy for ourselves.
        let replies = self.call(scope, commands, Effect::Once).await?;
        list(&replies, read_mark).map_err(|failure| failure.about(scope))
    }

    async fn dedup_finish(
        &self,
        scope: &DedupScope,
        done: &[(&str, Bytes)],
        keep: Duration,
    ) -> Result<()> {
        check::dedup(done.iter().map(|(id, value)| (*id, &value[..])), Some(keep))?;
        let keys: Vec<String> = done.iter().map(|(id, _)| keys::dedup(scope, id)).collect();
        let mut commands = Commands::new();
        commands.script(&scripts::FINISH, &keys, 1 + done.len());
        commands.arg_number(millis(keep));
        done.iter().for_each(|(_, value)| commands.arg(value));
        let replies = self.call(scope, commands, Effect::Repeatable).await?;
        replies.cursor().number().map(|_| ()).map_err(|failure| failure.about(scope))
    }

    async fn dedup_abandon(&self, scope: &DedupScope, ids: &[&str]) -> Result<()> {
        check::dedup(ids.iter().map(|id| (*id, &b""[..])), None)?;
        let keys: Vec<String> = ids.iter().map(|id| keys::dedup(scope, id)).collect();
        let commands = Commands::run(&scripts::ABANDON, &keys, &[""; 0]);
        let replies = self.call(scope, commands, Effect::Repeatable).await?;
        replies.cursor().number().map(|_| ()).map_err(|failure| failure.about(scope))
    }
}

fn read_mark(cursor: &mut Cursor<'_>) -> Result<Begin, Failure> {
    match cursor.text()? {
        b"f" => Ok(Begin::Fresh),
        b"b" => Ok(Begin::Busy),
        [b'd', value @ ..] => Ok(Begin::Done(Bytes::copy_from_slice(value))),
        _ => Err(Failure::shape("a mark that is not one of ours")),
    }
}
