//! The bytes of effects, in the log and in snapshots.
//!
//! An effect is a tag and its parts in order; numbers are LEB128, texts and bytes carry their length. The end of the
//! frame around them is the end of the last effect.
//! Promises: decoding never panics and never reserves more memory than the input is long, whatever the bytes are.
//! Not here: checksums and files (see `segment`).

mod parts;
#[cfg(test)]
pub(super) mod tests;

use std::borrow::Cow;

use bytes::Bytes;

use self::parts::{Decoder, Encoder};
use super::effect::Effect;
use crate::clock::Timestamp;

/// What is wrong with bytes that are not an effect.
pub(super) type Problem = &'static str;
type Decoded<T> = Result<T, Problem>;

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
const PUT_ASIDE: u8 = 13;
const CANCEL: u8 = 14;
const RETURN: u8 = 15;
const HOLD: u8 = 16;
const ADD_MEMBERS: u8 = 17;
const REMOVE_MEMBERS: u8 = 18;
const PUT_FIELDS: u8 = 19;
const MARK: u8 = 20;
const UNMARK: u8 = 21;
const REMOVE: u8 = 22;
const RESTORE_COUNTERS: u8 = 23;
const RESTORE_STREAM: u8 = 24;
const RESTORE_ENTRIES: u8 = 25;
const RESTORE_PENDING: u8 = 26;
const RESTORE_LEASE: u8 = 27;
const RESTORE_EPOCH: u8 = 28;
const RESTORE_TIME: u8 = 29;

/// Appends the bytes of an effect.
pub(super) fn encode(effect: &Effect<'_>, to: &mut Vec<u8>) {
    let out = &mut Encoder { to };
    match effect {
        Effect::Append { stream, first, entries } => {
            out.tag(APPEND).text(stream).id(*first).number(entries.len() as u64);
            entries.iter().for_each(|fields| out.fields(fields));
        }
        Effect::CreateGroup { stream, group, after } => {
            out.tag(CREATE_GROUP).text(stream).text(group).id(*after);
        }
        Effect::RemoveGroup { stream, group } => {
            out.tag(REMOVE_GROUP).text(stream).text(group);
        }
        Effect::RestoreConsumer { stream, group, consumer, at } => {
            out.tag(RESTORE_CONSUMER).text(stream).text(group).text(consumer).time(*at);
        }
        Effect::Deliver { stream, group, consumer, through, at } => {
            out.tag(DELIVER).text(stream).text(group).text(consumer).id(*through).time(*at);
        }
        Effect::Acknowledge { stream, group, ids } => {
            out.tag(ACKNOWLEDGE).text(stream).text(group).ids(ids);
        }
        Effect::Claim { stream, group, consumer, ids, at } => {
            out.tag(CLAIM).text(stream).text(group).text(consumer).ids(ids).time(*at);
        }
        Effect::Release { stream, group, ids, at } => {
            out.tag(RELEASE).text(stream).text(group).ids(ids).time(*at);
        }
        Effect::KeepAlive { stream, group, ids, at } => {
            out.tag(KEEP_ALIVE).text(stream).text(group).ids(ids).time(*at);
        }
        Effect::RemoveConsumer { stream, group, consumer } => {
            out.tag(REMOVE_CONSUMER).text(stream).text(group).text(consumer);
        }
        Effect::Trim { stream, before } => {
            out.tag(TRIM).text(stream).id(*before);
        }
        Effect::DeleteEntries { stream, ids } => {
            out.tag(DELETE_ENTRIES).text(stream).ids(ids);
        }
        Effect::PutAside { delays, id, due, to, fields } => {
            out.tag(PUT_ASIDE).text(delays).number(*id).time(*due).text(to).fields(fields);
        }
        Effect::Cancel { delays, id } => {
            out.tag(CANCEL).text(delays).number(*id);
        }
        Effect::Return { delays, id, entry } => {
            out.tag(RETURN).text(delays).number(*id).id(*entry);
        }
        Effect::Hold { lease, holder, epoch, until, at } => {
            out.tag(HOLD).text(lease).text(holder).number(*epoch).time(*until).time(*at);
        }
        Effect::AddMembers { set, members, until, at } => {
            out.tag(ADD_MEMBERS).text(set).texts(members);
            // No set ends at the beginning of time, so zero is free to say "no end".
            out.time(until.unwrap_or_default()).time(*at);
        }
        Effect::RemoveMembers { set, members } => {
            out.tag(REMOVE_MEMBERS).text(set).texts(members);
        }
        Effect::PutFields { map, fields } => {
            out.tag(PUT_FIELDS).text(map).number(fields.len() as u64);
            for (name, value) in fields {
                out.text(name).bytes(value);
            }
        }
        Effect::Mark { scope, id, done, until, at } => {
            out.tag(MARK).text(scope).text(id).tag(u8::from(done.is_some()));
            out.bytes(done.as_deref().unwrap_or_default()).time(*until).time(*at);
        }
        Effect::Unmark { scope, id } => {
            out.tag(UNMARK).text(scope).text(id);
        }
        Effect::Remove { name } => {
            out.tag(REMOVE).text(name);
        }
        Effect::RestoreCounters { next_delay } => {
            out.tag(RESTORE_COUNTERS).number(*next_delay);
        }
        Effect::RestoreTime { at } => {
            out.tag(RESTORE_TIME).time(*at);
        }
        Effect::RestoreStream { stream, last_id } => {
            out.tag(RESTORE_STREAM).text(stream).id(*last_id);
        }
        Effect::RestoreEntries { stream, entries } => {
            out.tag(RESTORE_ENTRIES).text(stream).number(entries.len() as u64);
            for (id, fields) in entries {
                out.id(*id).fields(fields);
            }
        }
        Effect::RestorePending { stream, group, consumer, pending } => {
            out.tag(RESTORE_PENDING).text(stream).text(group).text(consumer);
            out.number(pending.len() as u64);
            for (id, at, deliveries) in pending {
                out.id(*id).time(*at).number(*deliveries);
            }
        }
        Effect::RestoreLease { lease, holder, epoch, until } => {
            out.tag(RESTORE_LEASE).text(lease).text(holder).number(*epoch).time(*until);
        }
        Effect::RestoreEpoch { lease, epoch, until } => {
            out.tag(RESTORE_EPOCH).text(lease).number(*epoch).time(*until);
        }
    }
}

/// Takes the next effect from the front of `from`; `None` at its end.
pub(super) fn decode<'a>(from: &mut &'a [u8]) -> Decoded<Option<Effect<'a>>> {
    if from.is_empty() {
        return Ok(None);
    }
    let mut input = Decoder { rest: from };
    let effect = effect(&mut input)?;
    *from = input.rest;
    Ok(Some(effect))
}

fn effect<'a>(input: &mut Decoder<'a>) -> Decoded<Effect<'a>> {
    // Struct fields are evaluated in the order they are written here, which is the order of the bytes.
    Ok(match input.tag()? {
        APPEND => Effect::Append {
            stream: input.text()?,
            first: input.id()?,
            entries: Cow::Owned(input.list(Decoder::fields)?),
        },
        CREATE_GROUP => {
            Effect::CreateGroup { stream: input.text()?, group: input.text()?, after: input.id()? }
        }
        REMOVE_GROUP => Effect::RemoveGroup { stream: input.text()?, group: input.text()? },
        RESTORE_CONSUMER => Effect::RestoreConsumer {
            stream: input.text()?,
            group: input.text()?,
            consumer: input.text()?,
            at: input.time()?,
        },
        DELIVER => Effect::Deliver {
            stream: input.text()?,
            group: input.text()?,
            consumer: input.text()?,
            through: input.id()?,
            at: input.time()?,
        },
        ACKNOWLEDGE => {
            Effect::Acknowledge { stream: input.text()?, group: input.text()?, ids: input.ids()? }
        }
        CLAIM => Effect::Claim {
            stream: input.text()?,
            group: input.text()?,
            consumer: input.text()?,
            ids: input.ids()?,
            at: input.time()?,
        },
        RELEASE => Effect::Release {
            stream: input.text()?,
            group: input.text()?,
            ids: input.ids()?,
            at: input.time()?,
        },
        KEEP_ALIVE => Effect::KeepAlive {
            stream: input.text()?,
            group: input.text()?,
            ids: input.ids()?,
            at: input.time()?,
        },
        REMOVE_CONSUMER => Effect::RemoveConsumer {
            stream: input.text()?,
            group: input.text()?,
            consumer: input.text()?,
        },
        TRIM => Effect::Trim { stream: input.text()?, before: input.id()? },
        DELETE_ENTRIES => Effect::DeleteEntries { stream: input.text()?, ids: input.ids()? },
        PUT_ASIDE => Effect::PutAside {
            delays: input.text()?,
            id: input.number()?,
            due: input.time()?,
            to: input.text()?,
            fields: input.fields()?,
        },
        CANCEL => Effect::Cancel { delays: input.text()?, id: input.number()? },
        RETURN => Effect::Return { delays: input.text()?, id: input.number()?, entry: input.id()? },
        HOLD => Effect::Hold {
            lease: input.text()?,
            holder: input.text()?,
            epoch: input.number()?,
            until: input.time()?,
            at: input.time()?,
        },
        ADD_MEMBERS => Effect::AddMembers {
            set: input.text()?,
            members: input.list(Decoder::text)?,
            until: Some(input.time()?).filter(|until| *until != Timestamp::default()),
            at: input.time()?,
        },
        REMOVE_MEMBERS => {
            Effect::RemoveMembers { set: input.text()?, members: input.list(Decoder::text)? }
        }
        PUT_FIELDS => Effect::PutFields {
            map: input.text()?,
            fields: input
                .list(|input| Ok((input.text()?, Bytes::copy_from_slice(input.bytes()?))))?,
        },
        MARK => {
            let (scope, id) = (input.text()?, input.text()?);
            let is_done = input.tag()? != 0;
            let value = Bytes::copy_from_slice(input.bytes()?);
            let done = is_done.then_some(value);
            Effect::Mark { scope, id, done, until: input.time()?, at: input.time()? }
        }
        UNMARK => Effect::Unmark { scope: input.text()?, id: input.text()? },
        REMOVE => Effect::Remove { name: input.text()? },
        RESTORE_COUNTERS => Effect::RestoreCounters { next_delay: input.number()? },
        RESTORE_TIME => Effect::RestoreTime { at: input.time()? },
        RESTORE_STREAM => Effect::RestoreStream { stream: input.text()?, last_id: input.id()? },
        RESTORE_ENTRIES => Effect::RestoreEntries {
            stream: input.text()?,
            entries: input.list(|input| Ok((input.id()?, input.fields()?)))?,
        },
        RESTORE_PENDING => Effect::RestorePending {
            stream: input.text()?,
            group: input.text()?,
            consumer: input.text()?,
            pending: input.list(|input| Ok((input.id()?, input.time()?, input.number()?)))?,
        },
        RESTORE_LEASE => Effect::RestoreLease {
            lease: input.text()?,
            holder: input.text()?,
            epoch: input.number()?,
            until: input.time()?,
        },
        RESTORE_EPOCH => Effect::RestoreEpoch {
            lease: input.text()?,
            epoch: input.number()?,
            until: input.time()?,
        },
        _ => return Err("it holds an effect of an unknown kind"),
    })
}
