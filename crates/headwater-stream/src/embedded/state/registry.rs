//! Registry sets and maps.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;

use super::{EmbeddedState, NamedValue};
use crate::clock::Timestamp;
use crate::embedded::codec::RecordError;

#[derive(Clone, Debug, Default)]
pub(in crate::embedded) struct Set {
    pub(in crate::embedded) members: BTreeSet<Arc<str>>,
    pub(in crate::embedded) until: Option<Timestamp>,
}

/// Expired sets removed per insert.
const EXPIRED_PER_INSERT: usize = 2;

/// Approximate memory use of a set member in bytes.
pub(in crate::embedded) fn member_bytes(member: &str) -> u64 {
    member.len() as u64 + PER_ITEM_BYTES
}

/// Approximate memory use of a map field in bytes.
pub(in crate::embedded) fn field_bytes(field: &str, value: &Bytes) -> u64 {
    field.len() as u64 + value.len() as u64 + PER_ITEM_BYTES
}

const PER_ITEM_BYTES: u64 = 64;

impl EmbeddedState {
    pub(super) fn add_members(
        &mut self,
        name: &str,
        members: &[&str],
        until: Option<Timestamp>,
    ) -> Result<(), RecordError> {
        let key: Arc<str> = name.into();
        let value =
            self.names.entry(key.clone()).or_insert_with(|| NamedValue::Set(Arc::default()));
        let NamedValue::Set(set) = value else { return Err("the name does not hold a set") };
        let set = Arc::make_mut(set);
        for member in members {
            if !set.members.contains(*member) {
                set.members.insert((*member).into());
                self.bytes += member_bytes(member);
            }
        }
        if until.is_some() {
            if let Some(old) = set.until {
                self.set_expirations.remove(&(old, key.clone()));
            }
            set.until = until;
            self.set_expirations.extend(until.map(|until| (until, key)));
        }
        Ok(())
    }

    pub(super) fn remove_members(
        &mut self,
        name: &str,
        members: &[&str],
    ) -> Result<(), RecordError> {
        let Some(NamedValue::Set(set)) = self.names.get_mut(name) else {
            return Err("unknown set");
        };
        let set = Arc::make_mut(set);
        for member in members {
            if set.members.remove(*member) {
                self.bytes -= member_bytes(member);
            }
        }
        if set.members.is_empty() {
            self.remove(name)?;
        }
        Ok(())
    }

    pub(super) fn put_fields(
        &mut self,
        name: &str,
        fields: &[(&str, Bytes)],
    ) -> Result<(), RecordError> {
        let value =
            self.names.entry(name.into()).or_insert_with(|| NamedValue::Map(Arc::default()));
        let NamedValue::Map(map) = value else { return Err("the name does not hold a map") };
        let map = Arc::make_mut(map);
        for (field, value) in fields {
            self.bytes += field_bytes(field, value);
            if let Some(old) = map.insert((*field).to_owned(), value.clone()) {
                self.bytes -= field_bytes(field, &old);
            }
        }
        Ok(())
    }

    pub(super) fn remove_expired_sets(&mut self, now: Timestamp) {
        for _ in 0..EXPIRED_PER_INSERT {
            let Some((_, name)) =
                self.set_expirations.first().filter(|(end, _)| *end <= now).cloned()
            else {
                break;
            };
            if self.remove(&name).is_err() {
                self.set_expirations.pop_first();
            }
        }
    }
}
