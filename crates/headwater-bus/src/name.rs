//! Names on a bus: sessions, namespaces, events, requests. Validated when they are created.
//!
//! Downstream: `keys`, which puts them into keys without further checks.
//! Guarantees: names contain no colons or braces, so two different names never produce the same key.

use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

use crate::error::{BusError, Result};
use crate::limits::{EVENT_ID_BYTES_MAX, REQUEST_ID_BYTES_MAX, SESSION_BYTES_MAX};

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $check:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(Arc<str>);

        impl $type {
            /// Validates the name. Clones share the text.
            pub fn new(name: impl AsRef<str>) -> Result<Self> {
                $check($what, name.as_ref())?;
                Ok(Self(name.as_ref().into()))
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }
    };
}

name!(
    /// Session id: 1 to 64 bytes without whitespace, control characters, braces and colons. `unknown` is reserved.
    SessionId,
    check_part,
    "session id"
);
name!(
    /// Namespace of a control stream: 1 to 64 bytes without whitespace, control characters, braces and colons.
    Namespace,
    check_part,
    "namespace"
);
name!(
    /// Event id: 1 to 256 bytes without control characters.
    EventId,
    check_event_id,
    "event id"
);

name!(
    /// Sender of requests to main loops and receiver of their replies: 1 to 64 bytes without whitespace, control
    /// characters, braces and colons. Processes with the same name share their replies.
    Requester,
    check_part,
    "requester"
);
name!(
    /// Request id: 1 to 128 bytes without control characters.
    RequestId,
    check_request_id,
    "request id"
);

impl RequestId {
    /// A random UUID.
    pub fn random() -> Self {
        Self(random_uuid().into())
    }
}

impl Requester {
    /// Requester of requests without `reply_to`.
    pub(crate) fn anonymous() -> Self {
        Self("nobody".into())
    }
}

impl SessionId {
    /// A random UUID.
    pub fn random() -> Self {
        Self(random_uuid().into())
    }
}

impl EventId {
    /// A random UUID.
    pub fn random() -> Self {
        Self(random_uuid().into())
    }
}

/// The number of a subscription, unique within its bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriptionId(pub u64);

impl fmt::Display for SubscriptionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Reserved in place of a session id: the stream of parked entries.
pub(crate) const UNKNOWN: &str = "unknown";

fn check_part(what: &str, name: &str) -> Result<()> {
    let invalid = |c: &char| c.is_control() || c.is_whitespace() || matches!(c, '{' | '}' | ':');
    let problem = if name.is_empty() {
        "it is empty".to_owned()
    } else if name.len() > SESSION_BYTES_MAX {
        format!("{} bytes; the limit is {SESSION_BYTES_MAX}", name.len())
    } else if let Some(invalid) = name.chars().find(invalid) {
        format!(
            "it contains {invalid:?}; whitespace, control characters, braces and colons are not allowed"
        )
    } else if name == UNKNOWN {
        format!("`{UNKNOWN}` is reserved for parked entries")
    } else {
        return Ok(());
    };
    Err(BusError::invalid(what, problem))
}

fn check_event_id(what: &str, name: &str) -> Result<()> {
    check_text(what, name, EVENT_ID_BYTES_MAX)
}

fn check_request_id(what: &str, name: &str) -> Result<()> {
    check_text(what, name, REQUEST_ID_BYTES_MAX)
}

fn check_text(what: &str, name: &str, limit: usize) -> Result<()> {
    let problem = if name.is_empty() {
        "it is empty".to_owned()
    } else if name.len() > limit {
        format!("{} bytes; the limit is {limit}", name.len())
    } else if let Some(control) = name.chars().find(|c| c.is_control()) {
        format!("it contains the control character {control:?}")
    } else {
        return Ok(());
    };
    Err(BusError::invalid(what, problem))
}

/// 122 random bits of the operating system, in a u128.
pub(crate) fn random_bits() -> u128 {
    Uuid::new_v4().as_u128()
}

/// A random UUID (version 4).
fn random_uuid() -> String {
    Uuid::new_v4().to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn invalid_names_are_rejected() {
        for bad in ["", "a b", "a\nb", "a\0", "a{b", "a}b", "a:b", "unknown", &"x".repeat(65)] {
            assert!(matches!(SessionId::new(bad), Err(BusError::Invalid { .. })), "{bad:?}");
            assert!(matches!(Namespace::new(bad), Err(BusError::Invalid { .. })), "{bad:?}");
        }
        for good in ["a", "3f2a-11", "a/b*?", "键", "a@b.example", &"x".repeat(64)] {
            assert_eq!(SessionId::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "a\nb", &"x".repeat(257)] {
            assert!(matches!(EventId::new(bad), Err(BusError::Invalid { .. })), "{bad:?}");
            assert!(matches!(RequestId::new(bad), Err(BusError::Invalid { .. })), "{bad:?}");
        }
        assert!(RequestId::new("x".repeat(129)).is_err());
        assert!(RequestId::new("a:{b} 键").is_ok());
    }

    #[test]
    fn random_ids_are_unique_uuids() {
        let ids: HashSet<String> = (0..10_000).map(|_| random_uuid()).collect();
        assert_eq!(ids.len(), 10_000);
        for id in ids {
            assert_eq!(id.len(), 36);
            assert_eq!((&id[14..15], id.matches('-').count()), ("4", 4), "{id}");
            assert!(matches!(&id[19..20], "8" | "9" | "a" | "b"), "{id}");
        }
    }
}
