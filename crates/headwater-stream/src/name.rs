//! Names of things in a backend: checked once, when they are made.
//!
//! Promises: a name is 1 to [`NAME_BYTES_MAX`](crate::limits::NAME_BYTES_MAX) bytes of UTF-8 without control characters. On Redis a name *is* the
//! key, so a name with `}` must hold a hash tag (`{…}`): that lets a backend derive keys of the same slot.

use std::fmt;
use std::sync::Arc;

use crate::error::{Result, StreamError};
use crate::limits::NAME_BYTES_MAX;

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(Arc<str>);

        impl $type {
            /// Checks the name and keeps it; clones share the text.
            pub fn new(name: impl AsRef<str>) -> Result<Self> {
                check($what, name.as_ref())?;
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

        impl AsRef<str> for $type {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $type {
            type Err = StreamError;

            fn from_str(name: &str) -> Result<Self> {
                Self::new(name)
            }
        }
    };
}

name!(
    /// The name of a stream.
    StreamName,
    "a stream name"
);
name!(
    /// The name of a consumer group.
    GroupName,
    "a group name"
);
name!(
    /// The name of one consumer in a group.
    ConsumerName,
    "a consumer name"
);
name!(
    /// The name of a lease.
    LeaseName,
    "a lease name"
);
name!(
    /// Who holds a lease: unique per process start, never a reused name.
    HolderName,
    "a holder name"
);
name!(
    /// The name of a set of delayed entries.
    DelayName,
    "a delay name"
);
name!(
    /// The name of a registry map.
    MapName,
    "a map name"
);
name!(
    /// The name of a registry set.
    SetName,
    "a set name"
);
name!(
    /// What de-duplication ids are unique within.
    DedupScope,
    "a de-duplication scope"
);

fn check(what: &str, name: &str) -> Result<()> {
    let problem = if name.is_empty() {
        "it is empty".to_owned()
    } else if name.len() > NAME_BYTES_MAX {
        format!("{} bytes; the limit is {NAME_BYTES_MAX}", name.len())
    } else if let Some(control) = name.chars().find(|c| c.is_control()) {
        format!("it holds the control character {control:?}")
    } else if name.contains('}') && hash_tag(name).is_none() {
        "it holds `}` without a hash tag `{…}` before it".to_owned()
    } else {
        return Ok(());
    };
    Err(StreamError::invalid(what, problem))
}

/// The part of a key that decides its slot in a Redis Cluster, if the key marks one.
pub fn hash_tag(name: &str) -> Option<&str> {
    let open = name.find('{')?;
    let tag = &name[open + 1..];
    let close = tag.find('}')?;
    (close > 0).then(|| &tag[..close])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_refused_when_it_is_empty_too_long_or_holds_control_characters() {
        for bad in ["", "a\nb", "a\0b", "\u{7f}", "a}b", "{}x}", &"x".repeat(NAME_BYTES_MAX + 1)] {
            assert!(matches!(StreamName::new(bad), Err(StreamError::Invalid { .. })), "{bad:?}");
        }
        for good in ["a", "a b", "键", "stream:topic:{t:0}", "a{b", &"x".repeat(NAME_BYTES_MAX)] {
            assert_eq!(StreamName::new(good).unwrap().as_str(), good);
        }
    }

    #[test]
    fn the_hash_tag_is_what_redis_takes_for_it() {
        assert_eq!(hash_tag("{user}.a"), Some("user"));
        assert_eq!(hash_tag("a{b}c{d}"), Some("b"));
        assert_eq!(hash_tag("a{{b}}"), Some("{b"));
        assert_eq!(hash_tag("{}a"), None);
        assert_eq!(hash_tag("a{b"), None);
    }
}
