//! The registry on Redis: sets and hashes.

use std::time::Duration;

use async_trait::async_trait;

use super::RedisBackend;
use super::command::Commands;
use super::reply::Cursor;
use super::scripts;
use super::streams::millis;
use crate::error::Result;
use crate::name::{MapName, SetName};
use crate::registry::{Registry, RegistryMap};
use crate::validate;

#[async_trait]
impl Registry for RedisBackend {
    async fn set_add(
        &self,
        set: &SetName,
        members: &[&str],
        ttl: Option<Duration>,
    ) -> Result<usize> {
        validate::members(members, ttl)?;
        let mut commands = Commands::new();
        commands.script(&scripts::SET_ADD, &[self.key(set)], 1 + members.len());
        commands.arg(ttl.map_or(String::new(), |ttl| millis(ttl).to_string()));
        members.iter().for_each(|member| commands.arg(member));
        self.call_once(set, commands, |reply| Ok(reply.count()? as usize)).await
    }

    async fn set_remove(&self, set: &SetName, members: &[&str]) -> Result<usize> {
        validate::members(members, None)?;
        if members.is_empty() {
            return self.client.check_open().map(|()| 0);
        }
        let commands = Commands::on_key(&["SREM"], &self.key(set), members);
        self.call_once(set, commands, |reply| Ok(reply.count()? as usize)).await
    }

    async fn set_members(&self, set: &SetName) -> Result<Vec<String>> {
        let commands = Commands::on_key(&["SMEMBERS"], &self.key(set), &[""; 0]);
        let mut members =
            self.call_idempotent(set, commands, |reply| reply.list(Cursor::string)).await?;
        members.sort_unstable();
        Ok(members)
    }

    async fn set_contains(&self, set: &SetName, members: &[&str]) -> Result<Vec<bool>> {
        validate::members(members, None)?;
        if members.is_empty() {
            return self.client.check_open().map(|()| Vec::new());
        }
        let commands = Commands::on_key(&["SMISMEMBER"], &self.key(set), members);
        let read = |reply: &mut Cursor<'_>| reply.list(|is_member| Ok(is_member.number()? == 1));
        self.call_idempotent(set, commands, read).await
    }

    async fn map_create(&self, map: &MapName, fields: &RegistryMap) -> Result<bool> {
        validate::map(fields)?;
        let mut commands = Commands::new();
        commands.script(&scripts::MAP_CREATE, &[self.key(map)], fields.len() * 2);
        add_fields(&mut commands, fields);
        self.call_once(map, commands, |reply| Ok(reply.number()? == 1)).await
    }

    async fn map_update(
        &self,
        map: &MapName,
        expect: Option<(&str, &[u8])>,
        fields: &RegistryMap,
    ) -> Result<bool> {
        validate::map(fields)?;
        let mut commands = Commands::new();
        let expected = if expect.is_some() { 2 } else { 0 };
        let args = 1 + expected + fields.len() * 2;
        commands.script(&scripts::MAP_UPDATE, &[self.key(map)], args);
        match expect {
            None => commands.arg("0"),
            Some((name, value)) => {
                commands.arg("1");
                commands.arg(name);
                commands.arg(value);
            }
        }
        add_fields(&mut commands, fields);
        self.call_once(map, commands, |reply| Ok(reply.number()? == 1)).await
    }

    async fn map_get(&self, map: &MapName) -> Result<Option<RegistryMap>> {
        let commands = Commands::on_key(&["HGETALL"], &self.key(map), &[""; 0]);
        let read = |reply: &mut Cursor<'_>| {
            let mut fields = RegistryMap::new();
            for _ in 0..reply.array()? / 2 {
                fields.insert(reply.string()?, reply.bytes()?);
            }
            // Redis deletes empty hashes.
            Ok((!fields.is_empty()).then_some(fields))
        };
        self.call_idempotent(map, commands, read).await
    }

    async fn map_delete(&self, map: &MapName) -> Result<bool> {
        self.delete(map, "hash").await
    }
}

fn add_fields(commands: &mut Commands, fields: &RegistryMap) {
    for (name, value) in fields {
        commands.arg(name);
        commands.arg(value);
    }
}
