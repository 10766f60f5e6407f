//! Audit log of commands that open the streams themselves.
//!
//! Upstream: `in_process.rs`. Downstream: `http/audit`. Guarantees: reads open no database. If a database is
//! configured, or the default one exists, a change is rejected unless its entry is written, as over HTTP. Otherwise,
//! and if the database has no tables of this program yet, nothing is recorded.

use std::sync::{Arc, OnceLock};

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use headwater_issue::Store;
use tokio::sync::OnceCell;

use crate::cli::in_process::{self, database_file};
use crate::config::{Role, Settings};
use crate::exit::CliError;
use crate::http::ApiError;
use crate::http::audit::{self, AuditLog};
use crate::http::auth::Principal;

/// The audit log, opened when the first change is recorded.
pub(super) struct LocalAuditLog {
    settings: Settings,
    /// `None` if the database has no tables of this program.
    opened: OnceCell<Option<OpenedLog>>,
}

/// The log and its database.
type OpenedLog = (Arc<dyn Store>, Arc<AuditLog>);

impl LocalAuditLog {
    /// Uses the database of these settings.
    pub(super) fn new(settings: &Settings) -> Self {
        Self { settings: settings.clone(), opened: OnceCell::new() }
    }

    async fn open(&self) -> Result<Option<&Arc<AuditLog>>, ApiError> {
        let opening = async || {
            let refused = |problem: String| {
                ApiError::unavailable(format!("cannot write the audit log: {problem}"))
            };
            let store = match in_process::store(&self.settings).await {
                Err(CliError::OutdatedSchema { is_empty: true, .. }) => return Ok(None),
                store => store.map_err(|failure| refused(failure.to_string()))?,
            };
            let audit = AuditLog::open_append_only(Arc::clone(&store)).await;
            let audit = audit.map_err(|error| refused(error.to_string()))?;
            Ok::<_, ApiError>(Some((store, Arc::new(audit))))
        };
        Ok(self.opened.get_or_try_init(opening).await?.as_ref().map(|(_, audit)| audit))
    }

    pub(super) async fn close(&self) {
        if let Some(Some((store, _))) = self.opened.get() {
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
    if !audit::is_recorded(&request) || !has_database(&log.settings) {
        return Ok(next.run(request).await);
    }
    match log.open().await? {
        Some(audit) => Ok(audit::record(State(Arc::clone(audit)), request, next).await),
        None => Ok(next.run(request).await),
    }
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
        // A user id without an entry, as in some containers, is its own name.
        let id = || rustix::process::geteuid().as_raw().to_string();
        let name = whoami::username().unwrap_or_else(|_| id());
        Principal::unlimited(format!("cli:{name}"), Role::Admin)
    };
    PRINCIPAL.get_or_init(look).clone()
}
