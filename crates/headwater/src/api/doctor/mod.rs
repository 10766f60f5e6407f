//! Diagnostics of the servers Headwater depends on, with advice.
//!
//! Upstream: `cli/verbs/doctor.rs` and `GET /api/v1/doctor`. Downstream: `streams.rs`, `topics.rs`, `database.rs`, `tables.rs`,
//! `analytics_file.rs` and `models.rs`.
//! Guarantees: read-only; checks the current state, not that at startup. Each finding has a severity and says what to
//! change. Each check has a timeout: if one server is unreachable, the others are still checked within
//! `http.request_timeout`.

mod analytics_file;
mod database;
mod groups;
mod models;
mod streams;
pub(crate) mod tables;
mod topics;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use headwater_issue::Store;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::config::{Role, Settings};
use crate::http::auth::Principal;
use crate::http::body::JsonResult;
use crate::server::app_state::App;
use crate::text;

pub(crate) use crate::api::doctor::models::models;
pub(crate) use crate::api::doctor::streams::streams;

/// Maximum timeout of one check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(4);
/// Clock differences that are a warning and an error.
const SKEW_WARNING: Duration = Duration::from_secs(2);
const SKEW_ERROR: Duration = Duration::from_secs(60);
const MIB: u64 = 1024 * 1024;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(doctor))
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// No problem.
    Ok,
    /// Works, but should be changed.
    Warning,
    /// Must be fixed.
    Error,
    /// A server is unreachable.
    Unreachable,
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    /// What was checked.
    pub(crate) subject: String,
    pub(crate) found: String,
    /// What to change; empty if nothing.
    pub(crate) advice: String,
}

impl Finding {
    pub(crate) fn new(
        severity: Severity,
        subject: &str,
        found: impl Into<String>,
        advice: &str,
    ) -> Self {
        let (subject, advice) = (subject.to_owned(), advice.to_owned());
        Self { severity, subject, found: found.into(), advice }
    }

    fn ok(subject: &str, found: impl Into<String>) -> Self {
        Self::new(Severity::Ok, subject, found, "")
    }

    fn warning(subject: &str, found: impl Into<String>, advice: &str) -> Self {
        Self::new(Severity::Warning, subject, found, advice)
    }

    fn error(subject: &str, found: impl Into<String>, advice: &str) -> Self {
        Self::new(Severity::Error, subject, found, advice)
    }
}

/// All findings.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DoctorResponse {
    findings: Vec<Finding>,
}

/// Check everything this server depends on.
#[utoipa::path(get, path = "/doctor", tag = "health", responses((status = 200, body = DoctorResponse)))]
async fn doctor(State(app): State<App>, principal: Principal) -> JsonResult<DoctorResponse> {
    principal.require_role(Role::Admin)?;
    let (mut findings, of_database, of_models) = tokio::join!(
        streams(&app.settings, &app.streams),
        database(&app.settings, app.store.as_ref()),
        models(&app.settings)
    );
    findings.extend(of_database);
    findings.extend(of_models);
    findings.extend(settings(&app.settings));
    Ok(Json(DoctorResponse { findings }))
}

/// Timeout of one check: three in sequence finish before the request times out.
pub(crate) fn check_timeout(settings: &Settings) -> Duration {
    CHECK_TIMEOUT.min(settings.http.request_timeout / 4)
}

/// Checks the database server and its contents, except for the consistency of all issues (see [`consistency`]), and the file of
/// analytics, which is a copy of them.
pub(crate) async fn database(settings: &Settings, store: &dyn Store) -> Vec<Finding> {
    let (mut findings, file) =
        tokio::join!(server_and_contents(settings, store), analytics_file::check(settings));
    findings.extend(file);
    findings
}

async fn server_and_contents(settings: &Settings, store: &dyn Store) -> Vec<Finding> {
    let check_timeout = check_timeout(settings);
    let mut findings = match timeout(check_timeout, database::server(settings, store)).await {
        Ok(Ok(findings)) => findings,
        Ok(Err(problem)) => return vec![database_unreachable(settings, &problem)],
        Err(_) => {
            let problem = format!("no answer within {check_timeout:?}");
            return vec![database_unreachable(settings, &problem)];
        }
    };
    let (workers, backlog_findings, open_tickets) = tokio::join!(
        async {
            timeout(check_timeout, workers(store)).await.unwrap_or_else(|_| too_slow("workers"))
        },
        async {
            timeout(check_timeout, backlog_findings(store))
                .await
                .unwrap_or_else(|_| vec![too_slow("outbox")])
        },
        async {
            timeout(check_timeout, tables::open_tickets(settings, store))
                .await
                .unwrap_or_else(|_| Some(too_slow("tickets")))
        },
    );
    findings.extend([workers, tables::retention(settings)]);
    findings.extend(backlog_findings);
    findings.extend(open_tickets);
    findings
}

fn database_unreachable(settings: &Settings, problem: &str) -> Finding {
    let found = format!("{} is unreachable: {problem}", settings.database_shown());
    let advice = "start it; until then no events are accepted or processed";
    Finding::new(Severity::Unreachable, "database", found, advice)
}

fn too_slow(subject: &str) -> Finding {
    Finding::warning(subject, "skipped: the database is too slow", "")
}

/// Checks the access settings.
pub(crate) fn settings(settings: &Settings) -> Vec<Finding> {
    let listen = settings.http.listen;
    let found = match settings.tokens.len() {
        0 => format!("no token configured; {listen} accepts local requests only"),
        tokens => format!("{tokens} tokens configured"),
    };
    vec![Finding::ok("access", found)]
}

/// Compares our clock with another, which was read after `before`.
fn clock(of: &str, before: SystemTime, theirs_ms: u64) -> Finding {
    let took = before.elapsed().unwrap_or_default();
    let ours = before.duration_since(UNIX_EPOCH).unwrap_or_default() + took / 2;
    let ours_ms = u64::try_from(ours.as_millis()).unwrap_or(u64::MAX);
    let skew = Duration::from_millis(theirs_ms.abs_diff(ours_ms)).saturating_sub(took);
    let advice =
        "synchronize both machines with NTP: entry ids and due times use the server's clock";
    let differs = format!("differs from the {of} clock by {skew:?}");
    match skew {
        skew if skew >= SKEW_ERROR => Finding::error("clock", differs, advice),
        skew if skew >= SKEW_WARNING => Finding::warning("clock", differs, advice),
        skew => Finding::ok("clock", format!("within {skew:?} of the {of} clock")),
    }
}

/// The finding of a consistency check, which is part of `headwater doctor --consistency` only: it reads all event logs. An
/// error is a message.
pub(crate) fn consistency(is_consistent: Result<bool, String>) -> Finding {
    match is_consistent {
        Ok(true) => Finding::ok("audit", "every event is accounted for"),
        Ok(false) => Finding::error(
            "audit",
            "some recorded events are neither processed, pending nor quarantined",
            "run `headwater audit` to list the inconsistent issues",
        ),
        Err(problem) => Finding::warning("audit", problem, ""),
    }
}

/// Checks that workers are active.
async fn workers(store: &dyn Store) -> Finding {
    match store.workers().await {
        Ok(workers) if workers.is_empty() => Finding::warning(
            "workers",
            "no active worker",
            "start `headwater serve` or `headwater worker`; if one is running, check its log",
        ),
        Ok(workers) => Finding::ok("workers", format!("{} active", workers.len())),
        Err(error) => Finding::warning("workers", error.to_string(), ""),
    }
}

/// Checks for quarantined issues and dead outbox rows.
async fn backlog_findings(store: &dyn Store) -> Vec<Finding> {
    let backlog = match store.backlog().await {
        Ok(backlog) => backlog,
        Err(error) => return vec![Finding::warning("outbox", error.to_string(), "")],
    };
    let quarantine = match backlog.quarantined {
        0 => Finding::ok("quarantine", "no quarantined issues"),
        count => Finding::warning(
            "quarantine",
            text::counted(count, "issue is quarantined", "issues are quarantined"),
            "list them with `headwater issue list --quarantined`, release them with `headwater issue release --all`",
        ),
    };
    let outbox = match backlog.outbox_dead {
        0 => Finding::ok("outbox", "no dead replies or events"),
        count => Finding::warning(
            "outbox",
            text::counted(count, "reply or event is dead", "replies or events are dead"),
            "list them with `headwater outbox list`, retry them with `headwater outbox retry --all`",
        ),
    };
    vec![quarantine, outbox]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_skew_determines_the_severity() {
        let now = SystemTime::now();
        let ms = u64::try_from(now.duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
        assert_eq!(clock("streams", now, ms).severity, Severity::Ok);
        assert_eq!(clock("streams", now, ms + 600_000).severity, Severity::Error);
        assert_eq!(clock("streams", now, ms - 30_000).severity, Severity::Warning);
    }
}
