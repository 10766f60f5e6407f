//! The registry: small sets and maps that say what exists, so that nobody scans for it.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::Result;
use crate::name::{MapName, SetName};

/// A registry map: field names and their values.
pub type RegistryMap = BTreeMap<String, Bytes>;

/// Small sets and maps.
#[async_trait]
pub trait Registry: Send + Sync {
    /// Adds members; with `ttl`, the whole set lives that long from now. Returns how many are new.
    async fn set_add(
        &self,
        set: &SetName,
        members: &[&str],
        ttl: Option<Duration>,
    ) -> Result<usize>;

    /// Removes members. Returns how many there were.
    async fn set_remove(&self, set: &SetName, members: &[&str]) -> Result<usize>;

    /// All members, sorted.
    async fn set_members(&self, set: &SetName) -> Result<Vec<String>>;

    /// Whether these are members, in order.
    async fn set_contains(&self, set: &SetName, members: &[&str]) -> Result<Vec<bool>>;

    /// Creates the map with these fields. Returns `false` and changes nothing if it exists.
    async fn map_create(&self, map: &MapName, fields: &RegistryMap) -> Result<bool>;

    /// Writes fields into an existing map, others stay. With `expect`, only while that field has that value. Returns
    /// whether it did.
    async fn map_update(
        &self,
        map: &MapName,
        expect: Option<(&str, &[u8])>,
        fields: &RegistryMap,
    ) -> Result<bool>;

    /// All fields; `None` if there is no such map.
    async fn map_get(&self, map: &MapName) -> Result<Option<RegistryMap>>;

    /// Removes the map. Returns whether there was one.
    async fn map_delete(&self, map: &MapName) -> Result<bool>;
}
