//! The scripts that the server runs for us, each one atomic step.
//!
//! A script checks everything before it changes anything, for Lua undoes nothing. It declares every key it touches. It
//! answers `HWTYPE key` when a key holds a foreign value and `HWFENCED` when a lease is not current.
//!
//! Memory: a server that is full refuses the first write of a script, and no later one. So a script whose first
//! write can be refused happens wholly or not at all.

use std::sync::OnceLock;

/// A script, known to the server by its digest.
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
    DONE = "done";
    HELD = "held";
    KEEP_ALIVE = "keep_alive";
    RECLAIM = "reclaim";
    STATS = "stats";
    RESET_GROUP = "reset_group";
    REMOVE_IDLE = "remove_idle";
    DELETE = "delete";
    PUT_ASIDE = "put_aside";
    DUE = "due";
    TAKE_DUE = "take_due";
    NEXT_DUE = "next_due";
    CANCEL = "cancel";
    DELAYED = "delayed";
    DELETE_DELAYS = "delete_delays";
    ACQUIRE = "acquire";
    RENEW = "renew";
    RELEASE = "release";
    LEASES = "leases";
    SET_ADD = "set_add";
    MAP_CREATE = "map_create";
    MAP_UPDATE = "map_update";
    BEGIN = "begin";
    FINISH = "finish";
    ABANDON = "abandon";
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_script_has_a_digest_of_its_own() {
        let digests: HashSet<&str> = ALL.iter().map(|script| script.digest()).collect();
        assert_eq!(digests.len(), ALL.len());
        assert!(digests.iter().all(|digest| digest.len() == 40));
    }
}
