//! De-duplication on Redis: one string with expiry per id. `b` is in progress, `d` followed by a value is done.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::RedisBackend;
use super::command::Commands;
use super::error::ReplyError;
use super::keys::Key;
use super::reply::Cursor;
use super::scripts;
use super::streams::millis;
use crate::dedup::{Dedup, DedupStatus};
use crate::error::Result;
use crate::name::DedupScope;
use crate::validate;

#[async_trait]
impl Dedup for RedisBackend {
    async fn dedup_begin(
        &self,
        scope: &DedupScope,
        ids: &[&str],
        hold: Duration,
    ) -> Result<Vec<DedupStatus>> {
        validate::dedup(ids.iter().map(|id| (*id, &b""[..])), Some(hold))?;
        let keys: Vec<Key<'_>> = ids.iter().map(|id| self.keys().dedup(scope, id)).collect();
        let commands = Commands::run(&scripts::DEDUP_BEGIN, &keys, &[millis(hold).to_string()]);
        // Re-sent, the ids would be in progress for this caller itself.
        self.call_once(scope, commands, |reply| reply.list(read_status)).await
    }

    async fn dedup_finish(
        &self,
        scope: &DedupScope,
        done: &[(&str, Bytes)],
        keep: Duration,
    ) -> Result<()> {
        validate::dedup(done.iter().map(|(id, value)| (*id, &value[..])), Some(keep))?;
        let keys: Vec<Key<'_>> = done.iter().map(|(id, _)| self.keys().dedup(scope, id)).collect();
        let mut commands = Commands::new();
        commands.script(&scripts::DEDUP_FINISH, &keys, 1 + done.len());
        commands.arg_number(millis(keep));
        done.iter().for_each(|(_, value)| commands.arg(value));
        self.call_idempotent(scope, commands, |reply| reply.number().map(drop)).await
    }

    async fn dedup_abandon(&self, scope: &DedupScope, ids: &[&str]) -> Result<()> {
        validate::dedup(ids.iter().map(|id| (*id, &b""[..])), None)?;
        let keys: Vec<Key<'_>> = ids.iter().map(|id| self.keys().dedup(scope, id)).collect();
        let commands = Commands::run(&scripts::DEDUP_ABANDON, &keys, &[""; 0]);
        self.call_idempotent(scope, commands, |reply| reply.number().map(drop)).await
    }
}

fn read_status(cursor: &mut Cursor<'_>) -> Result<DedupStatus, ReplyError> {
    match cursor.text()? {
        b"f" => Ok(DedupStatus::New),
        b"b" => Ok(DedupStatus::InProgress),
        [b'd', value @ ..] => Ok(DedupStatus::Done(Bytes::copy_from_slice(value))),
        _ => Err(ReplyError::unexpected("invalid de-duplication value")),
    }
}
