//! Changes by verbs that open the streams themselves, in the audit log of the database.
//!
//! Upstream: `local`. Downstream: `audit`. Promises: looking opens no database; where one is given, or the default one is
//! there, no change without an entry: what cannot be written down is refused, as over HTTP. Where there is none, nothing
//! is written.

use std::sync::{Arc, OnceLock};

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use headwater_issue::Store;
use tokio::sync::OnceCell;

use crate::cli::in_process::database_file;
use crate::config::{Role, Settings};
use crate::http::ApiError;
use crate::http::audit::{self, Audit};
use crate::http::auth::{self, Caller};
use crate::server::shutdown::Stopping;
use crate::server::startup;

/// Users and their numbers.
const USERS: &str = "/etc/passwd";

/// The audit log, opened when something is to be written down.
pub(super) struct Log {
    settings: Settings,
    opened: OnceCell<(Arc<dyn Store>, Arc<Audit>)>,
}

impl Log {
    /// Of the database of these settings, which also say how long to wait for it.
    pub(super) fn new(settings: &Settings) -> Self {
        Self { settings: settings.clone(), opened: OnceCell::new() }
    }

    async fn open(&self) -> Result<&Arc<Audit>, ApiError> {
        let opening = async || {
            let refused = |problem: String| {
                ApiError::unavailable(format!("the audit log cannot be written: {problem}"))
            };
            let store = startup::store(&self.settings, &Stopping::default()).await;
            let store = store.map_err(|failure| refused(failure.to_string()))?;
            let audit = Audit::open_to_add(Arc::clone(&store)).await;
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

/// A layer: an entry before every change, where there is a database.
pub(super) async fn record(
    State(log): State<Arc<Log>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if auth::is_look(request.method()) || !has_database(&log.settings) {
        return Ok(next.run(request).await);
    }
    let audit = Arc::clone(log.open().await?);
    audit::record(State(audit), request, next).await
}

/// Whether somebody named a database, or the default one is there: none is made to write into it who used Redis.
fn has_database(settings: &Settings) -> bool {
    settings.database_is_given || database_file(settings).is_some_and(|file| file.exists())
}

/// Whoever can open the streams can do everything with them; who that is, is known to the operating system.
pub(super) fn caller() -> Caller {
    static CALLER: OnceLock<Caller> = OnceLock::new();
    let look = || {
        let number = rustix::process::getuid().as_raw().to_string();
        let users = std::fs::read_to_string(USERS).unwrap_or_default();
        let name = name_of(&users, &number).unwrap_or(&number);
        Caller { name: format!("cli:{name}"), role: Role::Admin }
    };
    CALLER.get_or_init(look).clone()
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
    fn a_user_is_known_by_the_name_of_its_number() {
        let users = "root:x:0:0:root:/:/bin/sh\nodd\n:x:7:\nada:x:1000:1000::/nowhere:/bin/sh\n";
        assert_eq!(name_of(users, "0"), Some("root"));
        assert_eq!(name_of(users, "1000"), Some("ada"));
        assert_eq!((name_of(users, "7"), name_of(users, "8")), (None, None));
    }
}
