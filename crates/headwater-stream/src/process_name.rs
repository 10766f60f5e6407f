//! Names that no other start of a process has had.
//!
//! Upstream: whoever holds leases or reads in a group under a name of its own. Guarantees: a start id differs from those of all
//! other starts, on this host and others; the name of a process is short and valid in every key.

use std::process;
use std::sync::OnceLock;

use uuid::Uuid;

use crate::error::Result;
use crate::name::HolderName;

/// Bytes of the host name that are used; the start id makes names unique.
const HOST_BYTES_MAX: usize = 60;

/// Sixteen hexadecimal digits, random from the operating system.
pub fn start_id() -> String {
    let (high, low) = Uuid::new_v4().as_u64_pair();
    format!("{:016x}", high ^ low)
}

/// `NAME:START`, the name of one start of this process as a holder of leases.
pub fn unique_holder(name: &str) -> Result<HolderName> {
    HolderName::new(format!("{name}:{}", start_id()))
}

/// `worker:HOST:PID`, the default name of this process. Append a start id to make it unique.
pub fn process_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| format!("worker:{}:{}", host(), process::id()))
}

/// The part of a unique name that stays the same from start to start, for metrics: the configured name, or `worker:HOST`.
pub fn stable_name(unique: &str) -> String {
    let name = unique.rsplit_once(':').map_or(unique, |(name, _)| name);
    if name == process_name() { format!("worker:{}", host()) } else { name.to_owned() }
}

fn host() -> String {
    let name = whoami::hostname().unwrap_or_default();
    // Part of a key: only characters without a meaning in keys.
    let plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let name: String = name.chars().filter(plain).take(HOST_BYTES_MAX).collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_start_has_its_own_id() {
        let (first, second) = (start_id(), start_id());
        assert_ne!(first, second);
        assert_eq!(first.len(), 16);
        let unique = unique_holder(process_name()).unwrap();
        assert_eq!(stable_name(unique.as_str()), format!("worker:{}", host()));
        assert_eq!(stable_name(unique_holder("billing:1").unwrap().as_str()), "billing:1");
        assert!(process_name().ends_with(&format!(":{}", process::id())), "{}", process_name());
    }
}
