//! What is looked at to say whether all is well: servers, versions, persistence, clocks, tables, books; and what to change.
//!
//! Upstream: the verb `doctor`, and `GET /api/v1/doctor` for whoever asks a server. Downstream: `streams`, and `database` for
//! what a store does not tell.
//! Promises: it only looks, now and not at what was so at the start. Each finding says what was found, how bad it is, and in
//! words what to change. Each look has a deadline of its own: with one server away, the rest is told all the same, within
//! `http.request_timeout`.

mod database;
mod groups;
mod streams;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use futures_util::future::BoxFuture;
use headwater_issue::Store;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::config::{Role, Settings};
use crate::http::audit;
use crate::http::auth::Caller;
use crate::http::body::Answer;
use crate::server::app_state::App;
use crate::text;

pub(crate) use crate::api::doctor::streams::streams;

/// How long one look may take, where `http.request_timeout` leaves time for it.
const LOOK_MAX: Duration = Duration::from_secs(4);
/// A difference between two clocks that is worth a word, and one that does harm.
const SKEW_ODD: Duration = Duration::from_secs(2);
const SKEW_HARMFUL: Duration = Duration::from_secs(60);

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(doctor))
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// All is well.
    Ok,
    /// Nothing is broken, but something should be changed.
    Warning,
    /// Something must be changed.
    Error,
    /// A server cannot be reached.
    Unreachable,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    /// What was looked at.
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

    fn fine(subject: &str, found: impl Into<String>) -> Self {
        Self::new(Severity::Ok, subject, found, "")
    }

    fn warning(subject: &str, found: impl Into<String>, advice: &str) -> Self {
        Self::new(Severity::Warning, subject, found, advice)
    }

    fn error(subject: &str, found: impl Into<String>, advice: &str) -> Self {
        Self::new(Severity::Error, subject, found, advice)
    }
}

/// What was found.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Findings {
    findings: Vec<Finding>,
}

/// Looks at everything this server stands on, and says what to change.
#[utoipa::path(get, path = "/doctor", tag = "health", responses((status = 200, body = Findings)))]
async fn doctor(State(app): State<App>, caller: Caller) -> Answer<Findings> {
    caller.must_be(Role::Admin)?;
    let counting = Box::pin(async {
        let counted = audit::count(&app).await;
        counted.map_err(|error| error.message().to_owned())
    });
    let (mut findings, of_database) = tokio::join!(
        streams(&app.settings, &app.streams),
        database(&app.settings, app.store.as_ref(), counting)
    );
    findings.extend(of_database);
    findings.extend(settings(&app.settings));
    Ok(Json(Findings { findings }))
}

/// How long one look may take: three of them, one after the other, are done before the request has taken too long.
pub(crate) fn look_max(settings: &Settings) -> Duration {
    LOOK_MAX.min(settings.http.request_timeout / 4)
}

/// The counting of the books; what went wrong is a sentence.
pub(crate) type Counting<'a> = BoxFuture<'a, Result<headwater_issue::Audit, String>>;

/// The database: server, version, persistence, connections, tables, clock; and what is in it.
pub(crate) async fn database(
    settings: &Settings,
    store: &dyn Store,
    counting: Counting<'_>,
) -> Vec<Finding> {
    let look_max = look_max(settings);
    let mut findings = match timeout(look_max, database::server(settings, store)).await {
        Ok(Ok(findings)) => findings,
        Ok(Err(problem)) => return vec![database_away(settings, &problem)],
        Err(_) => {
            let problem = format!("no answer within {look_max:?}");
            return vec![database_away(settings, &problem)];
        }
    };
    let counting = timeout(settings.http.request_timeout / 2, counting);
    let (books, workers, waiting) = tokio::join!(
        async { counting.await.map_or_else(|_| too_slow("audit"), books) },
        async { timeout(look_max, workers(store)).await.unwrap_or_else(|_| too_slow("workers")) },
        async {
            timeout(look_max, waiting(store)).await.unwrap_or_else(|_| vec![too_slow("outbox")])
        },
    );
    findings.extend([books, workers]);
    findings.extend(waiting);
    findings
}

fn database_away(settings: &Settings, problem: &str) -> Finding {
    let found = format!("{} cannot be reached: {problem}", settings.database_shown());
    let advice = "start it; nothing is taken in and nothing is worked on meanwhile";
    Finding::new(Severity::Unreachable, "database", found, advice)
}

fn too_slow(subject: &str) -> Finding {
    Finding::warning(subject, "not looked at: the database is too slow", "")
}

/// Who may ask.
pub(crate) fn settings(settings: &Settings) -> Vec<Finding> {
    let listen = settings.http.listen;
    let found = match settings.tokens.len() {
        0 => format!("no token; only this machine can reach {listen}"),
        tokens => format!("{tokens} tokens"),
    };
    vec![Finding::fine("access", found)]
}

/// Our clock beside another, which was read since `before`.
fn clock(of: &str, before: SystemTime, theirs_ms: u64) -> Finding {
    let took = before.elapsed().unwrap_or_default();
    let ours = before.duration_since(UNIX_EPOCH).unwrap_or_default() + took / 2;
    let ours_ms = u64::try_from(ours.as_millis()).unwrap_or(u64::MAX);
    let skew = Duration::from_millis(theirs_ms.abs_diff(ours_ms)).saturating_sub(took);
    let advice = "let both machines keep time by NTP: ids and due times follow the server's clock";
    let differs = format!("it differs by {skew:?} from that of the {of}");
    match skew {
        skew if skew >= SKEW_HARMFUL => Finding::error("clock", differs, advice),
        skew if skew >= SKEW_ODD => Finding::warning("clock", differs, advice),
        skew => Finding::fine("clock", format!("within {skew:?} of that of the {of}")),
    }
}

/// Whether the books balance.
fn books(counted: Result<headwater_issue::Audit, String>) -> Finding {
    match counted {
        Ok(audit) if audit.balances() => Finding::fine("audit", "every event is accounted for"),
        Ok(_) => Finding::error(
            "audit",
            "recorded events are not all processed, pending or quarantined",
            "`headwater audit` names the issues that do not add up",
        ),
        Err(problem) => Finding::warning("audit", problem, ""),
    }
}

/// Who works.
async fn workers(store: &dyn Store) -> Finding {
    match store.workers().await {
        Ok(workers) if workers.is_empty() => Finding::warning(
            "workers",
            "none is alive",
            "start `headwater serve` or `headwater worker`; if one runs, its log says what keeps it",
        ),
        Ok(workers) => Finding::fine("workers", format!("{} alive", workers.len())),
        Err(error) => Finding::warning("workers", error.to_string(), ""),
    }
}

/// What was given up.
async fn waiting(store: &dyn Store) -> Vec<Finding> {
    let backlog = match store.backlog().await {
        Ok(backlog) => backlog,
        Err(error) => return vec![Finding::warning("outbox", error.to_string(), "")],
    };
    let quarantine = match backlog.quarantined {
        0 => Finding::fine("quarantine", "no issue waits for an operator"),
        count => Finding::warning(
            "quarantine",
            format!("{} for an operator", text::counted(count, "issue waits", "issues wait")),
            "`headwater issue list --quarantined` shows them, `headwater issue release --all` lets them go on",
        ),
    };
    let outbox = match backlog.outbox_dead {
        0 => Finding::fine("outbox", "nothing was given up"),
        count => Finding::warning(
            "outbox",
            format!(
                "{} given up after the last try",
                text::counted(count, "reply or event was", "replies or events were")
            ),
            "`headwater outbox list` shows them, `headwater outbox retry --all` sends them again",
        ),
    };
    vec![quarantine, outbox]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_off_is_told_by_how_much_it_matters() {
        let now = SystemTime::now();
        let ms = u64::try_from(now.duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
        assert_eq!(clock("streams", now, ms).severity, Severity::Ok);
        assert_eq!(clock("streams", now, ms + 600_000).severity, Severity::Error);
        assert_eq!(clock("streams", now, ms - 30_000).severity, Severity::Warning);
    }
}
