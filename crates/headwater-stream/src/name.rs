//! Validated names of streams, groups, consumers, leases and so on.
//!
//! Guarantees: a name is 1 to [`NAME_BYTES_MAX`](crate::limits::NAME_BYTES_MAX) bytes of UTF-8 without control characters. On Redis a
//! name *is* the key (after the prefix of the URL, if it has one), so a name with `}` must contain a hash tag (`{…}`): other keys of the same slot are derived from it.

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
            /// Validates the name. Clones share the text.
            pub fn new(name: impl AsRef<str>) -> Result<Self> {
                validate($what, name.as_ref())?;
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
    /// The name of a lease holder. Must be unique per process start.
    HolderName,
    "a holder name"
);
name!(
    /// The name of a delay set.
    DelayName,
    "a delay set name"
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
    /// The scope within which de-duplication ids are unique.
    DedupScope,
    "a de-duplication scope"
);

fn validate(what: &str, name: &str) -> Result<()> {
    let problem = if name.is_empty() {
        "it is empty".to_owned()
    } else if name.len() > NAME_BYTES_MAX {
        format!("{} bytes; the limit is {NAME_BYTES_MAX}", name.len())
    } else if let Some(control) = name.chars().find(|c| c.is_control()) {
        format!("it contains the control character {control:?}")
    } else if name.contains('}') && hash_tag(name).is_none() {
        "it contains `}` without a hash tag `{…}`".to_owned()
    } else {
        return Ok(());
    };
    Err(StreamError::invalid(what, problem))
}

/// The hash tag of a key, which determines its slot in a Redis Cluster.
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
    fn a_name_that_is_empty_too_long_or_has_control_characters_is_rejected() {
        for bad in ["", "a\nb", "a\0b", "\u{7f}", "a}b", "{}x}", &"x".repeat(NAME_BYTES_MAX + 1)] {
            assert!(matches!(StreamName::new(bad), Err(StreamError::Invalid { .. })), "{bad:?}");
        }
        for good in ["a", "a b", "键", "stream:topic:{t:0}", "a{b", &"x".repeat(NAME_BYTES_MAX)] {
            assert_eq!(StreamName::new(good).unwrap().as_str(), good);
        }
    }

    #[test]
    fn the_hash_tag_is_the_one_that_redis_uses() {
        assert_eq!(hash_tag("{user}.a"), Some("user"));
        assert_eq!(hash_tag("a{b}c{d}"), Some("b"));
        assert_eq!(hash_tag("a{{b}}"), Some("{b"));
        assert_eq!(hash_tag("{}a"), None);
        assert_eq!(hash_tag("a{b"), None);
    }
}
