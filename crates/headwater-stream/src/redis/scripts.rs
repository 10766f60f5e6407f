//! Lua scripts; each is one atomic step on the server.
//!
//! A script checks everything before it writes, because Lua has no rollback. It declares every key it accesses. It fails with
//! `HWTYPE key` if a key holds a value of another type, and with `HWFENCED` if a lease is stale.
//!
//! Memory: a server at its memory limit rejects the first write of a script and allows later ones. So a script whose first
//! write can be rejected executes completely or not at all.

use std::sync::OnceLock;

/// A script. The server identifies it by its SHA-1 digest.
#[derive(Debug)]
pub(super) struct Script {
    text: &'static str,
    digest: OnceLock<String>,
}

impl Script {
    const fn new(text: &'static str) -> Self {
        Self { text, digest: OnceLock::new() }
    }

    pub(super) fn text(&self) -> &'static str {
        self.text
    }

    pub(super) fn digest(&self) -> &str {
        self.digest.get_or_init(|| sha1_smol::Sha1::from(self.text).digest().to_string())
    }
}

macro_rules! scripts {
    ($($name:ident = $file:literal;)*) => {
        $(pub(super) static $name: Script = Script::new(concat!(
            include_str!("scripts/prelude.lua"),
            include_str!(concat!("scripts/", $file, ".lua")),
        ));)*

        #[cfg(test)]
        const ALL: &[&Script] = &[$(&$name),*];
    };
}

scripts! {
    APPEND_ONCE = "append_once";
    TRIM = "trim";
    SETTLE = "settle";
    ACK_FENCED = "ack_fenced";
    OWNED_PENDING = "owned_pending";
    KEEP_ALIVE = "keep_alive";
    RECLAIM = "reclaim";
    STATS = "stats";
    RESET_GROUP = "reset_group";
    REMOVE_IDLE = "remove_idle";
    DELETE = "delete";
    RENAME = "rename";
    SCHEDULE = "schedule";
    LIST_DUE = "list_due";
    PROMOTE_DUE = "promote_due";
    NEXT_DUE = "next_due";
    CANCEL_DELAYED = "cancel_delayed";
    LIST_DELAYED = "list_delayed";
    DELETE_DELAY_SET = "delete_delay_set";
    ACQUIRE = "acquire";
    RENEW = "renew";
    RELEASE = "release";
    LEASES = "leases";
    SET_ADD = "set_add";
    MAP_CREATE = "map_create";
    MAP_UPDATE = "map_update";
    DEDUP_BEGIN = "dedup_begin";
    DEDUP_FINISH = "dedup_finish";
    DEDUP_ABANDON = "dedup_abandon";
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
