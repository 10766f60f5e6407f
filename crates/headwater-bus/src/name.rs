//! Names on a bus: sessions, namespaces and events, checked once, when they are made.
//!
//! Upstream: everybody. Downstream: `keys`, which puts them into keys without further thought.
//! Promises: two different names never make the same key, so none holds a colon or a brace.

use std::cell::Cell;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use crate::error::{BusError, Result};
use crate::limits::{EVENT_ID_BYTES_MAX, REQUEST_ID_BYTES_MAX, SESSION_BYTES_MAX};

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $check:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(Arc<str>);

        impl $type {
            /// Checks the name and keeps it; clones share the text.
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
    /// The id of a session: 1 to 64 bytes of text without spaces, control characters, braces and colons. `unknown` is
    /// taken.
    SessionId,
    check_part,
    "a session id"
);
name!(
    /// What shares a control stream: 1 to 64 bytes of text without spaces, control characters, braces and colons.
    Namespace,
    check_part,
    "a namespace"
);
name!(
    /// The id of an event: 1 to 256 bytes of text without control characters.
    EventId,
    check_event_id,
    "an event id"
);

name!(
    /// Who asks main loops and gets their replies: 1 to 64 bytes of text without spaces, control characters, braces and
    /// colons. Processes of one name share their replies.
    Requester,
    check_part,
    "a requester"
);
name!(
    /// The id of a request to a main loop: 1 to 128 bytes of text without control characters.
    RequestId,
    check_request_id,
    "a request id"
);

impl RequestId {
    /// An id that nobody else has.
    pub fn random() -> Self {
        Self(random_uuid().into())
    }
}

impl Requester {
    /// Where replies go that nobody waits for.
    pub(crate) fn anonymous() -> Self {
        Self("anonymous".into())
    }
}

impl SessionId {
    /// An id that nobody else has.
    pub fn random() -> Self {
        Self(random_uuid().into())
    }
}

impl EventId {
    /// An id that nobody else has.
    pub fn random() -> Self {
        Self(random_uuid().into())
    }
}

/// The number of a subscription, unique within its bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriptionId(pub(crate) u64);

impl fmt::Display for SubscriptionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The stream of entries that nobody can read has this place among the sessions.
pub(crate) const UNKNOWN: &str = "unknown";

fn check_part(what: &str, name: &str) -> Result<()> {
    let odd = |c: &char| c.is_control() || c.is_whitespace() || matches!(c, '{' | '}' | ':');
    let problem = if name.is_empty() {
        "it is empty".to_owned()
    } else if name.len() > SESSION_BYTES_MAX {
        format!("{} bytes; the limit is {SESSION_BYTES_MAX}", name.len())
    } else if let Some(odd) = name.chars().find(odd) {
        format!("it holds {odd:?}; spaces, control characters, braces and colons are not allowed")
    } else if name == UNKNOWN {
        format!("`{UNKNOWN}` is where entries of unknown types are kept")
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
        format!("it holds the control character {control:?}")
    } else {
        return Ok(());
    };
    Err(BusError::invalid(what, problem))
}

/// 128 random bits.
pub(crate) fn random_bits() -> u128 {
    thread_local! {
        // The standard library draws these keys from the operating system, once for each thread.
        static KEYS: (RandomState, RandomState) = (RandomState::new(), RandomState::new());
        static COUNT: Cell<u64> = const { Cell::new(0) };
    }
    let count = COUNT.with(|count| count.replace(count.get().wrapping_add(1)));
    KEYS.with(|(high, low)| {
        (u128::from(high.hash_one(count)) << 64) | u128::from(low.hash_one(count))
    })
}

/// A random UUID (version 4).
fn random_uuid() -> String {
    let bits = random_bits() & !(0xf << 76) & !(0x3 << 62) | (0x4 << 76) | (0x2 << 62);
    let hex = format!("{bits:032x}");
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn odd_names_are_refused_and_others_are_not() {
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
    fn random_ids_are_uuids_and_differ() {
        let ids: HashSet<String> = (0..10_000).map(|_| random_uuid()).collect();
        assert_eq!(ids.len(), 10_000);
        for id in ids {
            assert_eq!(id.len(), 36);
            assert_eq!((&id[14..15], id.matches('-').count()), ("4", 4), "{id}");
            assert!(matches!(&id[19..20], "8" | "9" | "a" | "b"), "{id}");
        }
    }
}
