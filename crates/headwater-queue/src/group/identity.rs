//! What this process is called in its groups.
//!
//! Promises: no two sessions have the same name, whatever the process is called, wherever it runs and how often it starts.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fs, process};

use headwater_stream::HolderName;

use crate::config::QueueConfig;

/// Bytes of a host name that show; the start id makes the difference.
const HOST_BYTES_MAX: usize = 60;

/// A name for one session: `NAME:START`.
pub(super) fn new_holder(config: &QueueConfig) -> HolderName {
    holder(config.name.as_deref().unwrap_or_else(|| default_name()))
}

/// A name for one moment.
pub(super) fn passing_holder() -> HolderName {
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
    // It becomes part of keys: nothing that separates or marks there.
    let plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let name: String = name.chars().filter(plain).take(HOST_BYTES_MAX).collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

/// The time, a count, and chance from the operating system.
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
    fn every_session_has_a_name_of_its_own() {
        let config = QueueConfig::default();
        let (first, second) = (new_holder(&config), new_holder(&config));
        assert_ne!(first, second);
        assert!(first.as_str().starts_with("worker:"), "{first}");
        assert!(first.as_str().contains(&format!(":{}:", process::id())), "{first}");
        let named = QueueConfig { name: Some("ada".into()), ..config };
        assert!(new_holder(&named).as_str().starts_with("ada:"));
    }
}
