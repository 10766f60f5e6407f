//! Schema migrations: one ordered list per database, checked and applied by `sqlx`'s migrator.
//!
//! Upstream: opening a store applies the migrations of the issue tables; [`Store::migrate`](crate::Store::migrate) applies
//! those of an application's own tables. Downstream: the table `headwater_migrations`.
//! Guarantees: a database that a newer program migrated, or whose migrations had another text, is refused and left unchanged.

#[cfg(any(feature = "sqlite", feature = "postgres"))]
use std::time::Duration;

/// One step of a schema, in both dialects.
///
/// The text of a released migration never changes: databases that have applied it would be refused. Add another one.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// Its place in the list. The thousands name the owner of the tables: 0 is this crate, other numbers are free for
    /// applications. A database with a higher version of the same owner is refused as newer.
    pub version: i64,
    /// A short description, for people who read `headwater_migrations`.
    pub description: &'static str,
    /// Statements for PostgreSQL.
    pub postgres: &'static str,
    /// Statements for SQLite.
    pub sqlite: &'static str,
}

/// Deadline of the statements of migrations.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) const MIGRATION_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// The tables of this crate.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) const ISSUES: &[Migration] = &[
    Migration {
        version: 1,
        description: "issues",
        postgres: include_str!("postgres/migrations/0001_issues.sql"),
        sqlite: include_str!("sqlite/migrations/0001_issues.sql"),
    },
    Migration {
        version: 2,
        description: "issue runs",
        postgres: include_str!("postgres/migrations/0002_issue_runs.sql"),
        sqlite: include_str!("sqlite/migrations/0002_issue_runs.sql"),
    },
    Migration {
        version: 3,
        description: "lists of issues with an error and of open outbox rows",
        postgres: include_str!("postgres/migrations/0003_lists.sql"),
        sqlite: include_str!("sqlite/migrations/0003_lists.sql"),
    },
];

#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) use self::migrator::{OwnedMigrations, earlier_build, schema_error, validate};

#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod migrator {
    use sqlx::SqlSafeStr;
    use sqlx::migrate::{AppliedMigration, Migrate, MigrateError, MigrationType, Migrator};

    use super::Migration;
    use crate::error::IssueError;
    use crate::row_decoding::database_error;

    /// Not `_sqlx_migrations`, which may belong to an application that shares the database.
    const TABLE: &str = "headwater_migrations";

    /// Versions of one owner.
    const OWNER_RANGE: i64 = 1000;

    /// The migrations of one owner, in one dialect.
    pub(crate) struct OwnedMigrations {
        migrator: Migrator,
        newest: i64,
    }

    impl OwnedMigrations {
        pub(crate) fn new(list: &[Migration], sql: fn(&Migration) -> &'static str) -> Self {
            let step = |one: &Migration| {
                let sql = sql(one).into_sql_str();
                let kind = MigrationType::Simple;
                sqlx::migrate::Migration::new(one.version, one.description.into(), kind, sql, false)
            };
            let mut migrator = Migrator::with_migrations(list.iter().map(step).collect());
            migrator.dangerous_set_table_name(TABLE);
            // The caller's transaction serializes migrations, and other owners have versions in the same table.
            migrator.set_locking(false).set_ignore_missing(true);
            let newest = list.iter().map(|one| one.version).max().unwrap_or_default();
            Self { migrator, newest }
        }

        /// Checks that nothing is missing, without a change. `has_table`: whether any migration was ever applied.
        pub(crate) async fn require<C: Migrate>(
            &self,
            connection: &mut C,
            has_table: bool,
        ) -> Result<(), sqlx::Error> {
            let check = async {
                let applied = match has_table {
                    true => connection.list_applied_migrations(TABLE).await?,
                    false => Vec::new(),
                };
                self.reject_newer(&applied)?;
                for one in self.migrator.iter() {
                    match applied.iter().find(|applied| applied.version == one.version) {
                        Some(applied) if applied.checksum == one.checksum => {}
                        Some(_) => return Err(MigrateError::VersionMismatch(one.version)),
                        None => {
                            let found = self.newest_of(&applied).unwrap_or(self.first());
                            return Err(MigrateError::VersionTooOld(found, self.newest));
                        }
                    }
                }
                Ok(())
            };
            check.await.map_err(|error| sqlx::Error::Migrate(Box::new(error)))
        }

        fn reject_newer(&self, applied: &[AppliedMigration]) -> Result<(), MigrateError> {
            match self.newest_of(applied).filter(|version| *version > self.newest) {
                Some(version) => Err(MigrateError::VersionTooNew(version, self.newest)),
                None => Ok(()),
            }
        }

        /// Before the first version of the owner.
        fn first(&self) -> i64 {
            self.newest / OWNER_RANGE * OWNER_RANGE
        }

        /// The newest applied version of the same owner.
        fn newest_of(&self, applied: &[AppliedMigration]) -> Option<i64> {
            let range = self.first()..self.first() + OWNER_RANGE;
            applied.iter().map(|one| one.version).filter(|version| range.contains(version)).max()
        }

        /// Applies what is missing. The caller has begun a transaction that excludes other migrations, and commits it.
        pub(crate) async fn apply<C: Migrate>(
            &self,
            connection: &mut C,
        ) -> Result<(), sqlx::Error> {
            let applied = async {
                self.migrator.run_direct(None, connection, false).await?;
                self.reject_newer(&connection.list_applied_migrations(TABLE).await?)
            };
            applied.await.map_err(|error| sqlx::Error::Migrate(Box::new(error)))
        }
    }

    /// Rejects a list whose versions are not ascending versions of one owner other than this crate.
    pub(crate) fn validate(list: &[Migration]) -> Result<(), IssueError> {
        let is_ascending = list.windows(2).all(|pair| {
            pair[0].version < pair[1].version
                && pair[0].version / OWNER_RANGE == pair[1].version / OWNER_RANGE
        });
        if is_ascending && list.first().is_some_and(|one| one.version >= OWNER_RANGE) {
            return Ok(());
        }
        let problem = format!(
            "versions must ascend, begin at {OWNER_RANGE} or above, and have the same thousands"
        );
        Err(IssueError::invalid("migrations", problem))
    }

    /// The database has the migrations table of a build before the first release.
    pub(crate) fn earlier_build() -> sqlx::Error {
        let problem = "it was created by a build before the first release; create a new database";
        sqlx::Error::Migrate(Box::new(MigrateError::Source(problem.into())))
    }

    /// Why a migration failed.
    pub(crate) fn schema_error(error: sqlx::Error) -> IssueError {
        let error = match error {
            sqlx::Error::Migrate(error) => *error,
            other => return database_error("migrating the database", other),
        };
        let problem = match error {
            MigrateError::VersionTooOld(found, needed) => {
                let is_empty = found == 0;
                let problem = match found % OWNER_RANGE {
                    0 if is_empty => format!(
                        "it has no tables of this program yet, which needs schema version {needed}"
                    ),
                    0 => format!("it has no tables of schema version {needed}"),
                    _ => {
                        format!(
                            "its schema has version {found}, this program needs version {needed}"
                        )
                    }
                };
                return IssueError::OutdatedSchema { problem, is_empty };
            }
            MigrateError::VersionTooNew(found, known) => format!(
                "its schema has version {found}, this program knows versions up to {known}; upgrade this program"
            ),
            MigrateError::VersionMismatch(version) => format!(
                "its migration {version} was applied with another text than that of this program; run the program that \
                 created the database, or restore a backup into a new database"
            ),
            MigrateError::Source(problem) => problem.to_string(),
            // SQLITE_ERROR: the statement does not fit the schema. A retry does not help.
            MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _)
                if error
                    .as_database_error()
                    .is_some_and(|error| error.code().as_deref() == Some("1")) =>
            {
                format!("a migration failed: {error}")
            }
            MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
                return database_error("migrating the database", error);
            }
            other => other.to_string(),
        };
        IssueError::Schema { problem }
    }
}

#[cfg(all(test, any(feature = "sqlite", feature = "postgres")))]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn the_text_of_an_applied_migration_has_not_changed() {
        let checksum = |sql: &str| hex::encode(Sha256::digest(sql));
        let checksums: Vec<_> =
            ISSUES.iter().map(|one| (checksum(one.postgres), checksum(one.sqlite))).collect();
        let pinned = [
            (
                "ae5f43a5f69c05211464383fc54b1cccf20c9ed26b7c4b4e872881d38931e309",
                "5948e476a35cde970e84636503c1209715dc16822eb29f5320b962fadc2a6807",
            ),
            (
                "fd599f6386225813c5549c2d2a64b5894422f484669a4e9677555a3ca39949ca",
                "0652a248518d82ce2d10aa5252b4d4aea996a280925e55b35e23c22810b3d2df",
            ),
            (
                "b8c032f02ce7691554c3d53888be393eedc454f93507e0e6fcb4c99c118bdbec",
                "15ed95fe9f6ee78aad2e133b7f4d5895a158275c340aea83a79ccc94aaead8b5",
            ),
        ];
        let pinned = pinned.map(|(postgres, sqlite)| (postgres.to_owned(), sqlite.to_owned()));
        assert_eq!(checksums, pinned, "do not change a migration: add one, and its checksum here");
    }
}
