//! The name of this process in its groups.
//!
//! Guarantees: session names are unique across hosts, processes and restarts, also with a configured process name.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fs, process};

use headwater_stream::HolderName;

use crate::config::QueueConfig;

/// Bytes of the host name that are used; the start id makes names unique.
const HOST_BYTES_MAX: usize = 60;

/// A holder name for one session: `NAME:START`.
pub(super) fn session_holder(config: &QueueConfig) -> HolderName {
    holder(config.name.as_deref().unwrap_or_else(|| default_name()))
}

/// A holder name for a single acquire and release.
pub(super) fn transient_holder() -> HolderName {
    holder(default_name())
}

fn holder(name: &str) -> HolderName {
    HolderName::new(format!("{name}:{}", start_id())).expect("the name was checked and is short")
}

fn default_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| format!("worker:{}:{}", host(), process::id()))
}

fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname")
        .or_else(|_| env::var("HOSTNAME"))
        .unwrap_or_default();
    // Part of a key: only characters without a meaning in keys.
    let plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let name: String = name.chars().filter(plain).take(HOST_BYTES_MAX).collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

/// A hash of the time, the process id, a counter and random keys of the operating system.
fn start_id() -> String {
    static STARTS: AtomicU64 = AtomicU64::new(0);
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let start = STARTS.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}", RandomState::new().hash_one((since_1970, process::id(), start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_session_has_a_unique_name() {
        let config = QueueConfig::default();
        let (first, second) = (session_holder(&config), session_holder(&config));
        assert_ne!(first, second);
        assert!(first.as_str().starts_with("worker:"), "{first}");
        assert!(first.as_str().contains(&format!(":{}:", process::id())), "{first}");
        let named = QueueConfig { name: Some("ada".into()), ..config };
        assert!(session_holder(&named).as_str().starts_with("ada:"));
    }
}
