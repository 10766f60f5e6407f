//! Lua scripts; each is one atomic step on the server.
//!
//! A script checks everything before it writes, because Lua has no rollback. It declares every key it accesses. It fails with
//! `HWTYPE key` if a key holds a value of another type, and with `HWFENCED` if a lease is stale.
//!
//! Memory: a server at its memory limit rejects the first write of a script and allows later ones. So a script whose first
//! write can be rejected executes completely or not at all. Scripts that a full server needs to be drained (leases, members,
//! groups, data epochs, moving due entries to their streams) are then sent again with the flag `allow-oom`, which servers before Redis 7 do not know.

use std::sync::OnceLock;

/// A script. The server identifies it by its SHA-1 digest.
#[derive(Debug)]
pub(super) struct Script {
    text: &'static str,
    digest: OnceLock<String>,
    /// Whether it may run on a server that is full.
    allows_oom: bool,
}

impl Script {
    const fn new(text: &'static str) -> Self {
        Self { text, digest: OnceLock::new(), allows_oom: false }
    }

    const fn allowing_oom(text: &'static str) -> Self {
        Self { text, digest: OnceLock::new(), allows_oom: true }
    }

    /// The text for a server that is full, if the script may run there.
    pub(super) fn text_for_full_server(&self) -> Option<String> {
        self.allows_oom.then(|| format!("#!lua flags=allow-oom\n{}", self.text))
    }

    pub(super) fn text(&self) -> &'static str {
        self.text
    }

    pub(super) fn digest(&self) -> &str {
        self.digest.get_or_init(|| sha1_smol::Sha1::from(self.text).digest().to_string())
    }
}

macro_rules! scripts {
    ($($name:ident = $new:ident $file:literal;)*) => {
        $(pub(super) static $name: Script = Script::$new(concat!(
            include_str!("scripts/prelude.lua"),
            include_str!(concat!("scripts/", $file, ".lua")),
        ));)*

        #[cfg(test)]
        const ALL: &[&Script] = &[$(&$name),*];
    };
}

scripts! {
    APPEND_ONCE = new "append_once";
    TRIM = new "trim";
    SETTLE = new "settle";
    ACK_FENCED = new "ack_fenced";
    OWNED_PENDING = new "owned_pending";
    KEEP_ALIVE = new "keep_alive";
    RECLAIM = new "reclaim";
    STATS = new "stats";
    RESET_GROUP = new "reset_group";
    REMOVE_IDLE = new "remove_idle";
    DELETE = new "delete";
    DELETE_UNUSED = new "delete_unused";
    RENAME = new "rename";
    SCHEDULE = new "schedule";
    LIST_DUE = new "list_due";
    PROMOTE_DUE = allowing_oom "promote_due";
    NEXT_DUE = new "next_due";
    CANCEL_DELAYED = new "cancel_delayed";
    LIST_DELAYED = new "list_delayed";
    DELETE_DELAY_SET = new "delete_delay_set";
    ACQUIRE = allowing_oom "acquire";
    RENEW = new "renew";
    RELEASE = new "release";
    LEASES = new "leases";
    SET_ADD = allowing_oom "set_add";
    MAP_CREATE = allowing_oom "map_create";
    MAP_UPDATE = allowing_oom "map_update";
    DEDUP_BEGIN = new "dedup_begin";
    DEDUP_FINISH = new "dedup_finish";
    DEDUP_ABANDON = new "dedup_abandon";
    CREATE_GROUP = allowing_oom "create_group";
    SET_TOMBSTONE = allowing_oom "set_tombstone";
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_script_has_a_unique_digest() {
        let digests: HashSet<&str> = ALL.iter().map(|script| script.digest()).collect();
        assert_eq!(digests.len(), ALL.len());
        assert!(digests.iter().all(|digest| digest.len() == 40));
    }
}
