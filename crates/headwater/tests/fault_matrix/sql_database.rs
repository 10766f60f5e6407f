//! The database of the fault matrix.

use headwater_testkit::{Database, Postgres, Proxy};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, SqliteConnection};

use crate::Fault;
use crate::support::disk::SmallDisk;
use crate::support::{LIMIT, ServerDir, directory};

/// The database that has the issues.
pub(super) enum SqlDatabase {
    Postgres { server: Box<Postgres>, database: Database, proxy: Proxy, url: String },
    Sqlite { disk: Option<SmallDisk>, url: String },
}

impl SqlDatabase {
    /// `None` if this process may not mount the disk that the fault needs.
    pub(super) fn start(fault: Fault, dir: &ServerDir) -> Option<Self> {
        if matches!(fault, Fault::SqliteLocked | Fault::SqliteFull | Fault::EmbeddedFull) {
            let data = directory(dir, "data").unwrap();
            let disk = match fault {
                Fault::SqliteFull => Some(SmallDisk::mount(&data).unwrap()?),
                _ => None,
            };
            let url = format!("sqlite:{}", data.join("issues.db").display());
            return Some(Self::Sqlite { disk, url });
        }
        // Passwords are a matter of the whole server.
        let has_passwords = fault == Fault::PostgresWrongPassword;
        let server = if has_passwords { Postgres::start() } else { Postgres::shared() }.unwrap();
        let database = server.database().unwrap();
        let proxy = Proxy::start(server.addr()).unwrap();
        let mut url = database.url_at(proxy.addr());
        if has_passwords {
            url = require_password(&database, &url);
        }
        Some(Self::Postgres { server: Box::new(server), database, proxy, url })
    }

    pub(super) fn url(&self) -> &str {
        match self {
            Self::Postgres { url, .. } | Self::Sqlite { url, .. } => url,
        }
    }

    pub(super) fn proxy(&self) -> &Proxy {
        let Self::Postgres { proxy, .. } = self else { panic!("a fault of PostgreSQL") };
        proxy
    }

    pub(super) fn disk(&self) -> &SmallDisk {
        let Self::Sqlite { disk: Some(disk), .. } = self else { panic!("a fault of a small disk") };
        disk
    }

    /// Runs a statement in the database.
    pub(super) fn query(&self, statement: &str) {
        let Self::Postgres { database, .. } = self else { panic!("a fault of PostgreSQL") };
        database.query(statement).unwrap();
    }

    /// Changes the password of the database user, and ends its sessions.
    pub(super) fn set_password(&self, password: &str) {
        self.change(&format!("ALTER ROLE app PASSWORD '{password}'"));
    }

    /// Changes the database and ends its sessions.
    pub(super) fn set_database(&self, change: &str) {
        let Self::Postgres { database, .. } = self else { panic!("a fault of PostgreSQL") };
        self.change(&format!("ALTER DATABASE \"{}\" {change}", database.name()));
    }

    /// Executes a statement and ends the sessions of the database, from another database.
    pub(super) fn change(&self, statement: &str) {
        let Self::Postgres { server, database, .. } = self else { panic!("a fault of PostgreSQL") };
        let admin = server.database().unwrap();
        admin.query(statement).unwrap();
        let end = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{}'",
            database.name()
        );
        admin.query(&end).unwrap();
    }

    /// Another program that uses the file.
    pub(super) async fn other_program(&self) -> SqliteConnection {
        let options: SqliteConnectOptions = self.url().parse().unwrap();
        options.busy_timeout(LIMIT).connect().await.unwrap()
    }
}

/// Adds a trigger, which does nothing yet, to every table. A transaction per table: with the locks of several tables it and a
/// transaction of the worker could wait for each other, and PostgreSQL would cancel one.
pub(super) const ADD_TRIGGERS: &str = "
    DO $$ DECLARE one regclass; BEGIN
        FOR one IN SELECT oid FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace LOOP
            EXECUTE format('CREATE TRIGGER disk_full BEFORE INSERT OR UPDATE ON %s EXECUTE FUNCTION disk_full()', one);
            COMMIT;
        END LOOP;
    END $$";

/// Makes writes succeed.
pub(super) const DISK_HAS_SPACE: &str = "
    CREATE OR REPLACE FUNCTION disk_full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$";

/// Makes every write fail as PostgreSQL does when a table cannot be extended.
pub(super) const DISK_FULL: &str = "
    CREATE OR REPLACE FUNCTION disk_full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION 'could not extend file \"base/1/1\": No space left on device' USING ERRCODE = 'disk_full';
    END $$";

/// Creates the user `app`, who needs a password, and returns the URL for this user.
fn require_password(database: &Database, url: &str) -> String {
    for statement in [
        "CREATE ROLE app LOGIN SUPERUSER PASSWORD 'secret'",
        "COPY (SELECT unnest(ARRAY['host all app all scram-sha-256', 'host all all all trust'])) TO PROGRAM 'cat > pg_hba.conf'",
        "SELECT pg_reload_conf()",
    ] {
        database.query(statement).unwrap();
    }
    let (_, address) = url.split_once('@').unwrap();
    format!("postgres://app:secret@{address}")
}
