//! The name of this process in its groups.
//!
//! Guarantees: session names are unique across hosts, processes and restarts, also with a configured process name.

use headwater_stream::{HolderName, process_name, start_id};

use crate::config::QueueConfig;

/// A holder name for one session: `NAME:START`.
pub(super) fn session_holder(config: &QueueConfig) -> HolderName {
    holder(config.name.as_deref().unwrap_or_else(|| process_name()))
}

/// A holder name for a single acquire and release.
pub(super) fn transient_holder() -> HolderName {
    holder(process_name())
}

fn holder(name: &str) -> HolderName {
    HolderName::new(format!("{name}:{}", start_id())).expect("the name was checked and is short")
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
        assert!(first.as_str().contains(&format!(":{}:", std::process::id())), "{first}");
        let named = QueueConfig { name: Some("ada".into()), ..config };
        assert!(session_holder(&named).as_str().starts_with("ada:"));
    }
}
