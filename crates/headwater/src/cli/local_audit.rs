//! Audit log of commands that open the streams themselves.
//!
//! Upstream: `in_process.rs`. Downstream: `http/audit`. Guarantees: reads open no database. If a database is
//! configured, or the default one exists, a change is rejected unless its entry is written, as over HTTP. Otherwise
//! nothing is recorded.

use std::sync::{Arc, OnceLock};

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use headwater_issue::Store;
use tokio::sync::OnceCell;

use crate::cli::in_process::database_file;
use crate::config::{Role, Settings};
use crate::http::ApiError;
use crate::http::audit::{self, AuditLog};
use crate::http::auth::{self, Principal};
use crate::server::shutdown_signal::ShutdownSignal;
use crate::server::startup;

/// User names by id.
const USERS: &str = "/etc/passwd";

/// The audit log, opened when the first change is recorded.
pub(super) struct LocalAuditLog {
    settings: Settings,
    opened: OnceCell<(Arc<dyn Store>, Arc<AuditLog>)>,
}

impl LocalAuditLog {
    /// Uses the database of these settings.
    pub(super) fn new(settings: &Settings) -> Self {
        Self { settings: settings.clone(), opened: OnceCell::new() }
    }

    async fn open(&self) -> Result<&Arc<AuditLog>, ApiError> {
        let opening = async || {
            let refused = |problem: String| {
                ApiError::unavailable(format!("cannot write the audit log: {problem}"))
            };
            let store = startup::store(&self.settings, &ShutdownSignal::default()).await;
            let store = store.map_err(|failure| refused(failure.to_string()))?;
            let audit = AuditLog::open_append_only(Arc::clone(&store)).await;
            let audit = audit.map_err(|error| refused(error.to_string()))?;
            Ok::<_, ApiError>((store, Arc::new(audit)))
        };
        Ok(&self.opened.get_or_try_init(opening).await?.1)
    }

    pub(super) async fn close(&self) {
        if let Some((store, _)) = self.opened.get() {
            store.close().await;
        }
    }
}

/// Middleware: records changes if there is a database.
pub(super) async fn record(
    State(log): State<Arc<LocalAuditLog>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if auth::is_read_only(request.method()) || !has_database(&log.settings) {
        return Ok(next.run(request).await);
    }
    let audit = Arc::clone(log.open().await?);
    audit::record(State(audit), request, next).await
}

/// Whether a database is configured or the default one exists. A missing default database is not created for a user
/// of Redis.
fn has_database(settings: &Settings) -> bool {
    settings.database_is_given || database_file(settings).is_some_and(|file| file.exists())
}

/// The principal of local commands: the operating system user, with all rights.
pub(super) fn principal() -> Principal {
    static PRINCIPAL: OnceLock<Principal> = OnceLock::new();
    let look = || {
        let number = rustix::process::getuid().as_raw().to_string();
        let users = std::fs::read_to_string(USERS).unwrap_or_default();
        let name = name_of(&users, &number).unwrap_or(&number);
        Principal { name: format!("cli:{name}"), role: Role::Admin }
    };
    PRINCIPAL.get_or_init(look).clone()
}

fn name_of<'a>(users: &'a str, number: &str) -> Option<&'a str> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, found) = (fields.next()?, fields.nth(1)?);
        (found == number && !name.is_empty()).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_id_is_resolved_to_its_name() {
        let users = "root:x:0:0:root:/:/bin/sh\nodd\n:x:7:\nada:x:1000:1000::/nowhere:/bin/sh\n";
        assert_eq!(name_of(users, "0"), Some("root"));
        assert_eq!(name_of(users, "1000"), Some("ada"));
        assert_eq!((name_of(users, "7"), name_of(users, "8")), (None, None));
    }
}
