//! Implementation of [`Registry`].

use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;

use super::Embedded;
use super::redo_record::RedoRecord;
use super::state::registry::{field_bytes, member_bytes};
use super::transaction::{Durability, Tx};
use crate::error::Result;
use crate::name::{MapName, SetName};
use crate::registry::{Registry, RegistryMap};
use crate::validate;

#[async_trait]
impl Registry for Embedded {
    async fn set_add(
        &self,
        set: &SetName,
        members: &[&str],
        ttl: Option<Duration>,
    ) -> Result<usize> {
        validate::members(members, ttl)?;
        let add = self.shared().transact(Durability::Durable, |tx| {
            let found = tx.state().set(set.as_str(), tx.now)?;
            if members.is_empty() && found.is_none() {
                return Ok(0);
            }
            let is_new = |member: &&str| found.is_none_or(|set| !set.members.contains(*member));
            let new: HashSet<&str> = members.iter().copied().filter(is_new).collect();
            let count = new.len();
            tx.ensure_capacity(new.iter().map(|new| member_bytes(new)).sum())?;
            if count > 0 || ttl.is_some() {
                tx.remove_expired(set.as_str());
                let until = ttl.map(|ttl| tx.now.after(ttl));
                let (set, members, at) = (set.as_str(), new.into_iter().collect(), tx.now);
                tx.apply(&RedoRecord::AddMembers { set, members, until, at });
            }
            Ok(count)
        });
        add.await
    }

    async fn set_remove(&self, set: &SetName, members: &[&str]) -> Result<usize> {
        validate::members(members, None)?;
        if members.is_empty() {
            return self.shared().ensure_open().map(|()| 0);
        }
        let remove = self.shared().transact(Durability::Durable, |tx| {
            let Some(found) = tx.state().set(set.as_str(), tx.now)? else { return Ok(0) };
            let is_member = |member: &&str| found.members.contains(*member);
            let present: HashSet<&str> = members.iter().copied().filter(is_member).collect();
            let count = present.len();
            if count > 0 {
                let (set, members) = (set.as_str(), present.into_iter().collect());
                tx.apply(&RedoRecord::RemoveMembers { set, members });
            }
            Ok(count)
        });
        remove.await
    }

    async fn set_members(&self, set: &SetName) -> Result<Vec<String>> {
        let read = self.shared().read(|tx| {
            let found = tx.state.set(set.as_str(), tx.now)?;
            let members = found.into_iter().flat_map(|set| &set.members);
            Ok(members.map(|member| member.to_string()).collect())
        });
        read.await
    }

    async fn set_contains(&self, set: &SetName, members: &[&str]) -> Result<Vec<bool>> {
        validate::members(members, None)?;
        if members.is_empty() {
            return self.shared().ensure_open().map(|()| Vec::new());
        }
        let read = self.shared().read(|tx| {
            let found = tx.state.set(set.as_str(), tx.now)?;
            let is_member = |member: &&str| found.is_some_and(|set| set.members.contains(*member));
            Ok(members.iter().map(is_member).collect())
        });
        read.await
    }

    async fn map_create(&self, map: &MapName, fields: &RegistryMap) -> Result<bool> {
        validate::map(fields)?;
        let create = self.shared().transact(Durability::Durable, |tx| {
            if tx.state().map(map.as_str(), tx.now)?.is_some() {
                return Ok(false);
            }
            put_fields(tx, map, fields)?;
            Ok(true)
        });
        create.await
    }

    async fn map_update(
        &self,
        map: &MapName,
        expect: Option<(&str, &[u8])>,
        fields: &RegistryMap,
    ) -> Result<bool> {
        validate::map(fields)?;
        let update = self.shared().transact(Durability::Durable, |tx| {
            let Some(found) = tx.state().map(map.as_str(), tx.now)? else {
                return Ok(false);
            };
            let as_expected = expect
                .is_none_or(|(field, value)| found.get(field).is_some_and(|found| found == value));
            if as_expected {
                put_fields(tx, map, fields)?;
            }
            Ok(as_expected)
        });
        update.await
    }

    async fn map_get(&self, map: &MapName) -> Result<Option<RegistryMap>> {
        let read = self.shared().read(|tx| Ok(tx.state.map(map.as_str(), tx.now)?.cloned()));
        read.await
    }

    async fn map_delete(&self, map: &MapName) -> Result<bool> {
        let name = map.as_str();
        self.remove(name, |tx| Ok(tx.state().map(name, tx.now)?.is_some())).await
    }
}

fn put_fields(tx: &mut Tx<'_>, map: &MapName, fields: &RegistryMap) -> Result<()> {
    let found = tx.state().map(map.as_str(), tx.now)?;
    let more = |(name, value): (&String, &bytes::Bytes)| {
        let old = found.and_then(|map| map.get(name)).map_or(0, |old| field_bytes(name, old));
        field_bytes(name, value).saturating_sub(old)
    };
    tx.ensure_capacity(fields.iter().map(more).sum())?;
    tx.remove_expired(map.as_str());
    let fields = fields.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    tx.apply(&RedoRecord::PutFields { map: map.as_str(), fields });
    Ok(())
}
