//! All keys of the bus. No other module builds key names.
//!
//! Guarantees: the names of the wire format, behind a prefix; two different names never produce the same key. On a Redis
//! Cluster each stream has its own slot; the layers below derive related keys of an atomic step from its name.

use headwater_queue::limits::{GROUP_BYTES_MAX, TOPIC_BYTES_MAX};
use headwater_stream::{DedupScope, GroupName, LeaseName, MapName, SetName, StreamName};

use crate::error::{BusError, Result};
use crate::limits::{PREFIX_BYTES_MAX, SESSION_BYTES_MAX};
use crate::name::{Namespace, Requester, SessionId, UNKNOWN};

/// Default prefix, shared with other programs.
pub(crate) const PREFIX: &str = "wink";

/// Builds keys with one prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    prefix: String,
}

fn valid_key<T>(name: headwater_stream::Result<T>) -> T {
    name.expect("prefix, session and namespace are checked, so the key is within its limit")
}

impl Keys {
    /// Checks the prefix.
    pub(crate) fn new(prefix: &str) -> Result<Self> {
        let invalid = |c: char| c.is_control() || c.is_whitespace() || matches!(c, '{' | '}');
        if prefix.is_empty() || prefix.len() > PREFIX_BYTES_MAX || prefix.contains(invalid) {
            let problem = format!(
                "`{prefix}`; 1 to {PREFIX_BYTES_MAX} bytes without spaces, braces and control \
                 characters"
            );
            return Err(BusError::invalid("key prefix", problem));
        }
        Ok(Self { prefix: prefix.to_owned() })
    }

    /// The prefix.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Stream of a session's events.
    pub(crate) fn session(&self, session: &SessionId) -> StreamName {
        valid_key(StreamName::new(format!("{}:events:{session}", self.prefix)))
    }

    /// Temporary stream of a copy that will become the stream of a session. The hash tag puts it into its slot.
    pub(crate) fn session_copy(&self, session: &SessionId, copy: &str) -> StreamName {
        valid_key(StreamName::new(format!("{{{}}}:copy:{copy}", self.session(session))))
    }

    /// Control stream of a namespace.
    pub(crate) fn control(&self, namespace: &Namespace) -> StreamName {
        valid_key(StreamName::new(format!("{}:control:{namespace}", self.prefix)))
    }

    /// Stream of the replies to a requester.
    pub(crate) fn replies(&self, namespace: &Namespace, requester: &Requester) -> StreamName {
        valid_key(StreamName::new(format!("{}:reply:{requester}", self.control(namespace))))
    }

    /// Set of the requesters that have replies.
    pub(crate) fn requesters(&self, namespace: &Namespace) -> SetName {
        valid_key(SetName::new(format!("{}:requesters", self.control(namespace))))
    }

    /// Dedup scope that maps a request to the requester that has its reply.
    pub(crate) fn replied(&self, namespace: &Namespace) -> DedupScope {
        valid_key(DedupScope::new(format!("{}:replied", self.control(namespace))))
    }

    /// Lease on the execution of a request, named by the request's session.
    pub(crate) fn request_lock(&self, session: &SessionId) -> LeaseName {
        valid_key(LeaseName::new(format!("{}:lock:{session}", self.prefix)))
    }

    /// Stream of parked entries.
    pub(crate) fn unknown(&self) -> StreamName {
        valid_key(StreamName::new(format!("{}:events:{UNKNOWN}", self.prefix)))
    }

    /// Metadata of a session.
    pub(crate) fn session_meta(&self, session: &SessionId) -> MapName {
        valid_key(MapName::new(format!("{}:session:{session}:meta", self.prefix)))
    }

    /// Newest snapshot of a session for one set of folds.
    pub(crate) fn session_snapshot(&self, session: &SessionId, set: &str) -> MapName {
        valid_key(MapName::new(format!("{}:session:{session}:snapshot:{set}", self.prefix)))
    }

    /// Snapshot of a copy that is not yet committed.
    pub(crate) fn copied_snapshot(&self, session: &SessionId, set: &str, copy: &str) -> MapName {
        let map = format!("{}:copy:{copy}", self.session_snapshot(session, set));
        valid_key(MapName::new(map))
    }

    /// Group that protects a session's entries from being trimmed before a snapshot includes them. It never reads.
    pub(crate) fn session_guard(&self, session: &SessionId) -> GroupName {
        valid_key(GroupName::new(format!("{}:session:{session}:guard", self.prefix)))
    }

    /// Whether a group is the guard of a session.
    pub(crate) fn is_guard(&self, group: &GroupName) -> bool {
        let rest = group.as_str().strip_prefix(self.prefix.as_str());
        rest.is_some_and(|rest| rest.starts_with(":session:") && rest.ends_with(":guard"))
    }

    /// Stream that lists all sessions in creation order.
    pub(crate) fn sessions(&self) -> StreamName {
        valid_key(StreamName::new(format!("{}:sessions", self.prefix)))
    }

    /// Consumer group on the stream of a session or namespace.
    pub(crate) fn group(&self, place: &str, label: &str) -> Result<GroupName> {
        let name = format!("{}:cg:{place}:{label}", self.prefix);
        if label.is_empty() || label.contains([':', '{', '}']) || name.len() > GROUP_BYTES_MAX {
            let problem = format!(
                "group name `{name}` of label `{label}` is invalid: at most {GROUP_BYTES_MAX} bytes in total, \
                 and no colons or braces in the label"
            );
            return Err(BusError::invalid("group", problem));
        }
        Ok(GroupName::new(name)?)
    }
}

// Every stream is a plain topic of the queue.
const _: () = assert!(PREFIX_BYTES_MAX + ":control:".len() + SESSION_BYTES_MAX <= TOPIC_BYTES_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_the_wire_format() {
        let keys = Keys::new(PREFIX).unwrap();
        let session = SessionId::new("s1").unwrap();
        let namespace = Namespace::new("default").unwrap();
        assert_eq!(keys.session(&session).as_str(), "wink:events:s1");
        assert_eq!(keys.control(&namespace).as_str(), "wink:control:default");
        let requester = Requester::new("desk").unwrap();
        let replies = keys.replies(&namespace, &requester);
        assert_eq!(replies.as_str(), "wink:control:default:reply:desk");
        assert_eq!(keys.requesters(&namespace).as_str(), "wink:control:default:requesters");
        assert_eq!(keys.request_lock(&session).as_str(), "wink:lock:s1");
        assert_eq!(keys.unknown().as_str(), "wink:events:unknown");
        assert_eq!(keys.session_meta(&session).as_str(), "wink:session:s1:meta");
        assert_eq!(keys.session_guard(&session).as_str(), "wink:session:s1:guard");
        assert!(keys.is_guard(&keys.session_guard(&session)));
        assert!(!keys.is_guard(&keys.group("s1", "guard").unwrap()));
        assert_eq!(keys.session_snapshot(&session, "0f").as_str(), "wink:session:s1:snapshot:0f");
        assert_eq!(keys.sessions().as_str(), "wink:sessions");
        assert_eq!(keys.session_copy(&session, "7f").as_str(), "{wink:events:s1}:copy:7f");
        assert_eq!(keys.group("s1", "telemetry").unwrap().as_str(), "wink:cg:s1:telemetry");
    }

    #[test]
    fn invalid_prefixes_and_groups_are_rejected() {
        for bad in ["", "a b", "a{b}", &"x".repeat(33)] {
            assert!(Keys::new(bad).is_err(), "{bad:?}");
        }
        let keys = Keys::new(PREFIX).unwrap();
        for bad in ["", "a:b", "{a}", "a\n", &"x".repeat(100)] {
            assert!(keys.group("s1", bad).is_err(), "{bad:?}");
        }
    }
}
