//! Schema of the tables that the server adds to those of `headwater-issue`: tickets, token budgets, audit log.

use headwater_issue::{IssueError, Migration, Store};

/// In order. Versions from 1001; 1 to 999 belong to `headwater-issue`.
const MIGRATIONS: &[Migration] = &[
    Migration {
        version: 1001,
        description: "tickets",
        postgres: include_str!("postgres/1001_tickets.sql"),
        sqlite: include_str!("sqlite/1001_tickets.sql"),
    },
    Migration {
        version: 1002,
        description: "audit log",
        postgres: include_str!("postgres/1002_audit_log.sql"),
        sqlite: include_str!("sqlite/1002_audit_log.sql"),
    },
];

/// Applies what is missing. Idempotent; several processes may call it at once.
pub(crate) async fn apply(store: &dyn Store) -> Result<(), IssueError> {
    store.migrate(MIGRATIONS).await
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn the_text_of_an_applied_migration_has_not_changed() {
        let checksum = |sql: &str| hex::encode(Sha256::digest(sql));
        let checksums: Vec<_> =
            MIGRATIONS.iter().map(|one| checksum(one.postgres) + &checksum(one.sqlite)).collect();
        let pinned = [
            "06fd91355e821c79f598a27cda9c70f4fcdac3471827d80880e5a92bf09048b8ccd30f8ece25ef1d652dd11b53b718722b133db71184a858abc0b4235df0ce89",
            "d8e751d49c8ef72502915e5b25c01b395d87453c028135d50e8e802c00940c59aba1c0e5203636f0b5645a8436b27809b4e71390993e20d3d58c423a3d62a6da",
        ];
        assert_eq!(checksums, pinned, "do not change a migration: add one, and its checksum here");
    }
}
