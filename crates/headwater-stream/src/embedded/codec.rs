//! Binary encoding of redo records in logs and snapshots.
//!
//! A record is a tag and its fields in order. Numbers are LEB128; texts and bytes are length-prefixed. The
//! last record ends with its frame.
//! Guarantees: decoding never panics and never allocates more than the input length, for any input.
//! Not here: checksums and files (see `segment`).

mod parts;
#[cfg(test)]
pub(super) mod tests;

use std::borrow::Cow;

use bytes::Bytes;

use self::parts::{Decoder, Encoder};
use super::redo_record::RedoRecord;
use crate::clock::Timestamp;

/// Why bytes could not be decoded or applied.
pub(super) type RecordError = &'static str;
type Decoded<T> = Result<T, RecordError>;

// The tags are part of the format: never reuse or renumber one.
const APPEND: u8 = 1;
const CREATE_GROUP: u8 = 2;
const REMOVE_GROUP: u8 = 3;
const RESTORE_CONSUMER: u8 = 4;
const DELIVER: u8 = 5;
const ACKNOWLEDGE: u8 = 6;
const CLAIM: u8 = 7;
const RELEASE: u8 = 8;
const KEEP_ALIVE: u8 = 9;
const REMOVE_CONSUMER: u8 = 10;
const TRIM: u8 = 11;
const DELETE_ENTRIES: u8 = 12;
const SCHEDULE: u8 = 13;
const CANCEL: u8 = 14;
const PROMOTE: u8 = 15;
const HOLD_LEASE: u8 = 16;
const ADD_MEMBERS: u8 = 17;
const REMOVE_MEMBERS: u8 = 18;
const PUT_FIELDS: u8 = 19;
const SET_DEDUP: u8 = 20;
const REMOVE_DEDUP: u8 = 21;
const REMOVE: u8 = 22;
const RESTORE_COUNTERS: u8 = 23;
const RESTORE_STREAM: u8 = 24;
const RESTORE_ENTRIES: u8 = 25;
const RESTORE_PENDING: u8 = 26;
const RESTORE_LEASE: u8 = 27;
const RESTORE_EPOCH: u8 = 28;
const RESTORE_TIME: u8 = 29;
const RENAME: u8 = 30;

/// Appends the encoded record to `to`.
pub(super) fn encode(record: &RedoRecord<'_>, to: &mut Vec<u8>) {
    let out = &mut Encoder { to };
    match record {
        RedoRecord::Append { stream, first, entries } => {
            out.tag(APPEND).text(stream).id(*first).number(entries.len() as u64);
            entries.iter().for_each(|fields| out.fields(fields));
        }
        RedoRecord::CreateGroup { stream, group, after } => {
            out.tag(CREATE_GROUP).text(stream).text(group).id(*after);
        }
        RedoRecord::RemoveGroup { stream, group } => {
            out.tag(REMOVE_GROUP).text(stream).text(group);
        }
        RedoRecord::RestoreConsumer { stream, group, consumer, at } => {
            out.tag(RESTORE_CONSUMER).text(stream).text(group).text(consumer).time(*at);
        }
        RedoRecord::Deliver { stream, group, consumer, through, at } => {
            out.tag(DELIVER).text(stream).text(group).text(consumer).id(*through).time(*at);
        }
        RedoRecord::Acknowledge { stream, group, ids } => {
            out.tag(ACKNOWLEDGE).text(stream).text(group).ids(ids);
        }
        RedoRecord::Claim { stream, group, consumer, ids, at } => {
            out.tag(CLAIM).text(stream).text(group).text(consumer).ids(ids).time(*at);
        }
        RedoRecord::Release { stream, group, ids, at } => {
            out.tag(RELEASE).text(stream).text(group).ids(ids).time(*at);
        }
        RedoRecord::KeepAlive { stream, group, ids, at } => {
            out.tag(KEEP_ALIVE).text(stream).text(group).ids(ids).time(*at);
        }
        RedoRecord::RemoveConsumer { stream, group, consumer } => {
            out.tag(REMOVE_CONSUMER).text(stream).text(group).text(consumer);
        }
        RedoRecord::Trim { stream, before } => {
            out.tag(TRIM).text(stream).id(*before);
        }
        RedoRecord::DeleteEntries { stream, ids } => {
            out.tag(DELETE_ENTRIES).text(stream).ids(ids);
        }
        RedoRecord::Schedule { delays, id, due, to, fields } => {
            out.tag(SCHEDULE).text(delays).number(*id).time(*due).text(to).fields(fields);
        }
        RedoRecord::Cancel { delays, id } => {
            out.tag(CANCEL).text(delays).number(*id);
        }
        RedoRecord::Promote { delays, id, entry } => {
            out.tag(PROMOTE).text(delays).number(*id).id(*entry);
        }
        RedoRecord::HoldLease { lease, holder, epoch, until, at } => {
            out.tag(HOLD_LEASE).text(lease).text(holder).number(*epoch).time(*until).time(*at);
        }
        RedoRecord::AddMembers { set, members, until, at } => {
            out.tag(ADD_MEMBERS).text(set).texts(members);
            // No set expires at the Unix epoch, so zero encodes "no expiration".
            out.time(until.unwrap_or_default()).time(*at);
        }
        RedoRecord::RemoveMembers { set, members } => {
            out.tag(REMOVE_MEMBERS).text(set).texts(members);
        }
        RedoRecord::PutFields { map, fields } => {
            out.tag(PUT_FIELDS).text(map).number(fields.len() as u64);
            for (name, value) in fields {
                out.text(name).bytes(value);
            }
        }
        RedoRecord::SetDedup { scope, id, done, until, at } => {
            out.tag(SET_DEDUP).text(scope).text(id).tag(u8::from(done.is_some()));
            out.bytes(done.as_deref().unwrap_or_default()).time(*until).time(*at);
        }
        RedoRecord::RemoveDedup { scope, id } => {
            out.tag(REMOVE_DEDUP).text(scope).text(id);
        }
        RedoRecord::Rename { from, to } => {
            out.tag(RENAME).text(from).text(to);
        }
        RedoRecord::Remove { name } => {
            out.tag(REMOVE).text(name);
        }
        RedoRecord::RestoreCounters { next_delay } => {
            out.tag(RESTORE_COUNTERS).number(*next_delay);
        }
        RedoRecord::RestoreTime { at } => {
            out.tag(RESTORE_TIME).time(*at);
        }
        RedoRecord::RestoreStream { stream, last_id } => {
            out.tag(RESTORE_STREAM).text(stream).id(*last_id);
        }
        RedoRecord::RestoreEntries { stream, entries } => {
            out.tag(RESTORE_ENTRIES).text(stream).number(entries.len() as u64);
            for (id, fields) in entries {
                out.id(*id).fields(fields);
            }
        }
        RedoRecord::RestorePending { stream, group, consumer, pending } => {
            out.tag(RESTORE_PENDING).text(stream).text(group).text(consumer);
            out.number(pending.len() as u64);
            for (id, at, deliveries) in pending {
                out.id(*id).time(*at).number(*deliveries);
            }
        }
        RedoRecord::RestoreLease { lease, holder, epoch, until } => {
            out.tag(RESTORE_LEASE).text(lease).text(holder).number(*epoch).time(*until);
        }
        RedoRecord::RestoreEpoch { lease, epoch, until } => {
            out.tag(RESTORE_EPOCH).text(lease).number(*epoch).time(*until);
        }
    }
}

/// Decodes the next record from the front of `from`; `None` at the end.
pub(super) fn decode<'a>(from: &mut &'a [u8]) -> Decoded<Option<RedoRecord<'a>>> {
    if from.is_empty() {
        return Ok(None);
    }
    let mut input = Decoder { rest: from };
    let record = record(&mut input)?;
    *from = input.rest;
    Ok(Some(record))
}

fn record<'a>(input: &mut Decoder<'a>) -> Decoded<RedoRecord<'a>> {
    // Rust evaluates struct fields in the order written here, which is the order of the bytes.
    Ok(match input.tag()? {
        APPEND => RedoRecord::Append {
            stream: input.text()?,
            first: input.id()?,
            entries: Cow::Owned(input.list(Decoder::fields)?),
        },
        CREATE_GROUP => RedoRecord::CreateGroup {
            stream: input.text()?,
            group: input.text()?,
            after: input.id()?,
        },
        REMOVE_GROUP => RedoRecord::RemoveGroup { stream: input.text()?, group: input.text()? },
        RESTORE_CONSUMER => RedoRecord::RestoreConsumer {
            stream: input.text()?,
            group: input.text()?,
            consumer: input.text()?,
            at: input.time()?,
        },
        DELIVER => RedoRecord::Deliver {
            stream: input.text()?,
            group: input.text()?,
            consumer: input.text()?,
            through: input.id()?,
            at: input.time()?,
        },
        ACKNOWLEDGE => RedoRecord::Acknowledge {
            stream: input.text()?,
            group: input.text()?,
            ids: input.ids()?,
        },
        CLAIM => RedoRecord::Claim {
            stream: input.text()?,
            group: input.text()?,
            consumer: input.text()?,
            ids: input.ids()?,
            at: input.time()?,
        },
        RELEASE => RedoRecord::Release {
            stream: input.text()?,
            group: input.text()?,
            ids: input.ids()?,
            at: input.time()?,
        },
        KEEP_ALIVE => RedoRecord::KeepAlive {
            stream: input.text()?,
            group: input.text()?,
            ids: input.ids()?,
            at: input.time()?,
        },
        REMOVE_CONSUMER => RedoRecord::RemoveConsumer {
            stream: input.text()?,
            group: input.text()?,
            consumer: input.text()?,
        },
        TRIM => RedoRecord::Trim { stream: input.text()?, before: input.id()? },
        DELETE_ENTRIES => RedoRecord::DeleteEntries { stream: input.text()?, ids: input.ids()? },
        SCHEDULE => RedoRecord::Schedule {
            delays: input.text()?,
            id: input.number()?,
            due: input.time()?,
            to: input.text()?,
            fields: input.fields()?,
        },
        CANCEL => RedoRecord::Cancel { delays: input.text()?, id: input.number()? },
        PROMOTE => {
            RedoRecord::Promote { delays: input.text()?, id: input.number()?, entry: input.id()? }
        }
        HOLD_LEASE => RedoRecord::HoldLease {
            lease: input.text()?,
            holder: input.text()?,
            epoch: input.number()?,
            until: input.time()?,
            at: input.time()?,
        },
        ADD_MEMBERS => RedoRecord::AddMembers {
            set: input.text()?,
            members: input.list(Decoder::text)?,
            until: Some(input.time()?).filter(|until| *until != Timestamp::default()),
            at: input.time()?,
        },
        REMOVE_MEMBERS => {
            RedoRecord::RemoveMembers { set: input.text()?, members: input.list(Decoder::text)? }
        }
        PUT_FIELDS => RedoRecord::PutFields {
            map: input.text()?,
            fields: input
                .list(|input| Ok((input.text()?, Bytes::copy_from_slice(input.bytes()?))))?,
        },
        SET_DEDUP => {
            let (scope, id) = (input.text()?, input.text()?);
            let is_done = input.tag()? != 0;
            let value = Bytes::copy_from_slice(input.bytes()?);
            let done = is_done.then_some(value);
            RedoRecord::SetDedup { scope, id, done, until: input.time()?, at: input.time()? }
        }
        REMOVE_DEDUP => RedoRecord::RemoveDedup { scope: input.text()?, id: input.text()? },
        RENAME => RedoRecord::Rename { from: input.text()?, to: input.text()? },
        REMOVE => RedoRecord::Remove { name: input.text()? },
        RESTORE_COUNTERS => RedoRecord::RestoreCounters { next_delay: input.number()? },
        RESTORE_TIME => RedoRecord::RestoreTime { at: input.time()? },
        RESTORE_STREAM => RedoRecord::RestoreStream { stream: input.text()?, last_id: input.id()? },
        RESTORE_ENTRIES => RedoRecord::RestoreEntries {
            stream: input.text()?,
            entries: input.list(|input| Ok((input.id()?, input.fields()?)))?,
        },
        RESTORE_PENDING => RedoRecord::RestorePending {
            stream: input.text()?,
            group: input.text()?,
            consumer: input.text()?,
            pending: input.list(|input| Ok((input.id()?, input.time()?, input.number()?)))?,
        },
        RESTORE_LEASE => RedoRecord::RestoreLease {
            lease: input.text()?,
            holder: input.text()?,
            epoch: input.number()?,
            until: input.time()?,
        },
        RESTORE_EPOCH => RedoRecord::RestoreEpoch {
            lease: input.text()?,
            epoch: input.number()?,
            until: input.time()?,
        },
        _ => return Err("unknown record tag"),
    })
}
