//! The bytes of effects, in the log and in snapshots.
//!
//! An effect is a tag and its parts in order; numbers are LEB128, texts and bytes carry their length. The end of the
//! frame around them is the end of the last effect.
//! Promises: decoding never panics and never reserves more memory than the input is long, whatever the bytes are.
//! Not here: checksums and files (see `segment`).

use std::borrow::Cow;

use bytes::Bytes;

use super::effect::Effect;
use crate::clock::Timestamp;
use crate::entry::{EntryId, Fields};

/// What is wrong with bytes that are not an effect.
pub(super) type Problem = &'static str;
type Decoded<T> = Result<T, Problem>;

// The tags are part of the format: never reuse or renumber one.
const APPEND: u8 = 1;
const CREATE_GROUP: u8 = 2;
const REMOVE_GROUP: u8 = 3;
const SEE: u8 = 4;
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
        Effect::See { stream, group, consumer, at } => {
            out.tag(SEE).text(stream).text(group).text(consumer).time(*at);
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
        SEE => Effect::See {
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

struct Encoder<'a> {
    to: &'a mut Vec<u8>,
}

impl Encoder<'_> {
    fn tag(&mut self, tag: u8) -> &mut Self {
        self.to.push(tag);
        self
    }

    fn number(&mut self, mut number: u64) -> &mut Self {
        while number >= 0x80 {
            self.to.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.to.push(number as u8);
        self
    }

    fn time(&mut self, time: Timestamp) -> &mut Self {
        self.number(time.as_millis())
    }

    fn id(&mut self, id: EntryId) -> &mut Self {
        self.number(id.ms).number(id.seq)
    }

    /// Ids in any order; near ones take two or three bytes each.
    fn ids(&mut self, ids: &[EntryId]) -> &mut Self {
        self.number(ids.len() as u64);
        let mut ms = 0;
        for id in ids {
            let step = id.ms.wrapping_sub(ms) as i64;
            self.number(((step << 1) ^ (step >> 63)) as u64).number(id.seq);
            ms = id.ms;
        }
        self
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.number(bytes.len() as u64);
        self.to.extend_from_slice(bytes);
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    fn texts(&mut self, texts: &[&str]) -> &mut Self {
        self.number(texts.len() as u64);
        for text in texts {
            self.text(text);
        }
        self
    }

    fn fields(&mut self, fields: &Fields) {
        self.number(fields.len() as u64);
        for (name, value) in fields {
            self.bytes(name).bytes(value);
        }
    }
}

struct Decoder<'a> {
    rest: &'a [u8],
}

const CUT_OFF: Problem = "an effect ends before its last part";

impl<'a> Decoder<'a> {
    fn tag(&mut self) -> Decoded<u8> {
        let (tag, rest) = self.rest.split_first().ok_or(CUT_OFF)?;
        self.rest = rest;
        Ok(*tag)
    }

    fn number(&mut self) -> Decoded<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.tag()?;
            let part = u64::from(byte & 0x7f);
            if shift == 63 && part > 1 {
                break;
            }
            number |= part << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err("a number has more than 64 bits")
    }

    fn time(&mut self) -> Decoded<Timestamp> {
        Ok(Timestamp::from_millis(self.number()?))
    }

    fn id(&mut self) -> Decoded<EntryId> {
        Ok(EntryId::new(self.number()?, self.number()?))
    }

    fn ids(&mut self) -> Decoded<Cow<'a, [EntryId]>> {
        let mut ms: u64 = 0;
        let ids = self.list(|input| {
            let folded = input.number()?;
            let step = (folded >> 1) as i64 ^ -((folded & 1) as i64);
            ms = ms.wrapping_add(step as u64);
            Ok(EntryId::new(ms, input.number()?))
        })?;
        Ok(Cow::Owned(ids))
    }

    fn bytes(&mut self) -> Decoded<&'a [u8]> {
        let length = usize::try_from(self.number()?).map_err(|_| CUT_OFF)?;
        let (bytes, rest) = self.rest.split_at_checked(length).ok_or(CUT_OFF)?;
        self.rest = rest;
        Ok(bytes)
    }

    fn text(&mut self) -> Decoded<&'a str> {
        std::str::from_utf8(self.bytes()?).map_err(|_| "a text is not UTF-8")
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Decoded<T>) -> Decoded<Vec<T>> {
        let length = usize::try_from(self.number()?).map_err(|_| CUT_OFF)?;
        // Every item takes a byte or more, so a longer list cannot be whole; nothing is reserved for it.
        if length > self.rest.len() {
            return Err(CUT_OFF);
        }
        (0..length).map(|_| item(self)).collect()
    }

    fn fields(&mut self) -> Decoded<Fields> {
        let whole = self.rest;
        let part = |input: &mut Self| -> Decoded<std::ops::Range<usize>> {
            let length = input.bytes()?.len();
            let end = whole.len() - input.rest.len();
            Ok(end - length..end)
        };
        let pairs = self.list(|input| Ok((part(input)?, part(input)?)))?;
        // One copy of all bytes that the names and values share, instead of one each.
        let bytes = Bytes::copy_from_slice(&whole[..whole.len() - self.rest.len()]);
        let pairs = pairs.into_iter().map(|(name, value)| (bytes.slice(name), bytes.slice(value)));
        Ok(Fields::new(pairs))
    }
}
