//! The registry: small sets and maps that list what exists, so that no key scan is needed.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::Result;
use crate::name::{MapName, SetName};

/// Fields of a registry map.
pub type RegistryMap = BTreeMap<String, Bytes>;

/// Small sets and maps.
#[async_trait]
pub trait Registry: Send + Sync {
    /// Adds members; `ttl` sets the expiry of the whole set. Returns how many are new.
    async fn set_add(
        &self,
        set: &SetName,
        members: &[&str],
        ttl: Option<Duration>,
    ) -> Result<usize>;

    /// Removes members. Returns how many existed.
    async fn set_remove(&self, set: &SetName, members: &[&str]) -> Result<usize>;

    /// All members, sorted.
    async fn set_members(&self, set: &SetName) -> Result<Vec<String>>;

    /// Whether each of these is a member, in order.
    async fn set_contains(&self, set: &SetName, members: &[&str]) -> Result<Vec<bool>>;

    /// Creates the map with these fields. Returns `false` and changes nothing if it exists.
    async fn map_create(&self, map: &MapName, fields: &RegistryMap) -> Result<bool>;

    /// Sets fields of an existing map; other fields are kept. With `expect`, only if that field has that value. Returns
    /// whether the map was updated.
    async fn map_update(
        &self,
        map: &MapName,
        expect: Option<(&str, &[u8])>,
        fields: &RegistryMap,
    ) -> Result<bool>;

    /// All fields; `None` if the map does not exist.
    async fn map_get(&self, map: &MapName) -> Result<Option<RegistryMap>>;

    /// Deletes the map. Returns whether it existed.
    async fn map_delete(&self, map: &MapName) -> Result<bool>;
}
