//! What is looked at to say whether all is well: servers, versions, persistence, clocks, tables, books; and what to change.
//!
//! Upstream: the verb `doctor`, and `GET /api/v1/doctor` for whoever asks a server. Downstream: the backend's description of
//! itself, and SQL for what a store does not tell.
//! Promises: it only looks. Each finding says what was found, how bad it is, and in words what to change.

mod database;
mod groups;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use headwater_issue::Store;
use headwater_queue::Queue;
use headwater_stream::{Backend, Description};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::App;
use crate::http::access::Caller;
use crate::http::body::Answer;
use crate::settings::{Role, Settings};

/// A difference between two clocks that is worth a word, and one that does harm.
/// How long looking at groups may take.
const GROUPS_LOOK_MAX: Duration = Duration::from_secs(5);
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
    let mut findings = streams(&app.streams).await;
    findings.extend(database(&app.settings, app.store.as_ref()).await);
    findings.extend(settings(&app.settings));
    Ok(Json(Findings { findings }))
}

/// The streams: server, version, persistence, eviction, notifications, commands, clock; and groups that hold back trims.
pub(crate) async fn streams(streams: &Arc<dyn Backend>) -> Vec<Finding> {
    let mut findings = described(&streams.describe());
    let before = SystemTime::now();
    findings.push(match streams.now().await {
        Ok(theirs) => clock("streams", before, theirs.as_millis()),
        Err(error) => Finding::new(Severity::Unreachable, "clock", error.to_string(), ""),
    });
    let queue = Queue::new(Arc::clone(streams));
    let looked = timeout(GROUPS_LOOK_MAX, groups::look(&queue)).await;
    let too_slow =
        |_| vec![Finding::warning("groups", "not looked at: the streams are too slow", "")];
    findings.extend(looked.unwrap_or_else(too_slow));
    findings
}

/// The database: server, version, persistence, connections, tables, clock; and what is in it.
pub(crate) async fn database(settings: &Settings, store: &dyn Store) -> Vec<Finding> {
    let mut findings = database::server(settings, store).await;
    findings.extend(work(store).await);
    findings
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

fn described(described: &Description) -> Vec<Finding> {
    let version = described.version.as_deref().unwrap_or("of this program");
    let mut findings = vec![Finding::fine(
        "streams",
        format!("{} {version} at {}", described.kind, described.address),
    )];
    if described.kind == "redis" {
        findings.push(commands(described.version.as_deref()));
    }
    for (name, value) in &described.facts {
        findings.push(match (*name, value.as_str()) {
            ("append only file", "off") => Finding::warning(
                "persistence",
                "the append only file is off",
                "events in SQL are safe, but topics and sessions live in Redis alone: set `appendonly yes`",
            ),
            ("append only file", state) => {
                Finding::fine("persistence", format!("the append only file is {state}"))
            }
            ("eviction", policy) if policy != "noeviction" => Finding::error(
                "eviction",
                format!("maxmemory-policy is {policy}: Redis may throw streams away"),
                "set `maxmemory-policy noeviction`",
            ),
            ("eviction", policy) => Finding::fine("eviction", format!("maxmemory-policy is {policy}")),
            ("notify-keyspace-events", flags) if !hears_of_expiry(flags) => Finding::warning(
                "notify-keyspace-events",
                format!("{flags}: expired leases are found by looking, some seconds later"),
                "set `notify-keyspace-events Ex`, or allow CONFIG SET",
            ),
            ("notify-keyspace-events", flags) => {
                Finding::fine("notify-keyspace-events", format!("{flags}: expired leases are told"))
            }
            _ => Finding::fine("streams", format!("{name}: {value}")),
        });
    }
    findings
}

/// Which commands are in use that not every server has.
fn commands(version: Option<&str>) -> Finding {
    let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    let in_use = "only commands that Redis 6.2 has are in use";
    match major {
        Some(major) if major < 7 => Finding::warning(
            "commands",
            format!("{in_use}; this server does not tell the lag of a group"),
            "upgrade Redis to 7.0 or later to see how far groups are behind",
        ),
        Some(_) => {
            Finding::fine("commands", format!("{in_use}, and the lag that 7.0 tells of groups"))
        }
        None => Finding::warning(
            "commands",
            format!("{in_use}; this server does not tell its version"),
            "allow INFO for this user",
        ),
    }
}

/// Flags as the server prints them, in quotation marks: keyevents of expiry, or of everything.
fn hears_of_expiry(flags: &str) -> bool {
    flags.contains('E') && flags.contains(['x', 'A'])
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

/// What is in the database: whether the books balance, who works, and what was given up.
async fn work(store: &dyn Store) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.push(match headwater_issue::audit(store).await {
        Ok(audit) if audit.balances() => Finding::fine("audit", "every event is accounted for"),
        Ok(_) => Finding::error(
            "audit",
            "recorded events are not all processed, pending or quarantined",
            "`headwater audit` names the issues that do not add up",
        ),
        Err(error) => Finding::warning("audit", error.to_string(), ""),
    });
    findings.push(match store.workers().await {
        Ok(workers) if workers.is_empty() => Finding::warning(
            "workers",
            "none is alive",
            "start `headwater serve` or `headwater worker`",
        ),
        Ok(workers) => Finding::fine("workers", format!("{} alive", workers.len())),
        Err(error) => Finding::warning("workers", error.to_string(), ""),
    });
    match store.backlog().await {
        Ok(backlog) => {
            findings.push(match backlog.quarantined {
                0 => Finding::fine("quarantine", "no issue waits for an operator"),
                count => Finding::warning(
                    "quarantine",
                    format!("{count} issues wait for an operator"),
                    "`headwater issue list --quarantined` shows them, `headwater issue release` lets one go on",
                ),
            });
            findings.push(match backlog.outbox_dead {
                0 => Finding::fine("outbox", "nothing was given up"),
                count => Finding::warning(
                    "outbox",
                    format!("{count} replies or events were given up after their last try"),
                    "`headwater outbox list` shows them, `headwater outbox retry` sends one again",
                ),
            });
        }
        Err(error) => findings.push(Finding::warning("outbox", error.to_string(), "")),
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redis(facts: Vec<(&'static str, String)>) -> Description {
        Description {
            kind: "redis",
            address: "redis://here".to_owned(),
            version: Some("7.0.15".to_owned()),
            facts,
        }
    }

    #[test]
    fn a_server_that_may_throw_streams_away_is_an_error() {
        let findings = described(&redis(vec![("eviction", "allkeys-lru".to_owned())]));
        assert_eq!(findings[2].severity, Severity::Error);
        assert_eq!(findings[2].advice, "set `maxmemory-policy noeviction`");
    }

    #[test]
    fn a_server_without_persistence_and_one_that_tells_nothing_are_warnings() {
        let findings = described(&redis(vec![
            ("append only file", "off".to_owned()),
            ("notify-keyspace-events", "\"\"".to_owned()),
            ("notify-keyspace-events", "\"xE\"".to_owned()),
            ("append only file", "on".to_owned()),
            ("eviction", "noeviction".to_owned()),
        ]));
        let severities: Vec<_> = findings[2..].iter().map(|finding| finding.severity).collect();
        use Severity::{Ok, Warning};
        assert_eq!(severities, [Warning, Warning, Ok, Ok, Ok]);
    }

    #[test]
    fn an_old_server_does_not_tell_lag() {
        assert_eq!(commands(Some("6.2.14")).severity, Severity::Warning);
        assert_eq!(commands(Some("7.0.15")).severity, Severity::Ok);
        assert_eq!(commands(None).severity, Severity::Warning);
    }

    #[test]
    fn a_clock_that_is_off_is_told_by_how_much_it_matters() {
        let now = SystemTime::now();
        let ms = u64::try_from(now.duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
        assert_eq!(clock("streams", now, ms).severity, Severity::Ok);
        assert_eq!(clock("streams", now, ms + 600_000).severity, Severity::Error);
        assert_eq!(clock("streams", now, ms - 30_000).severity, Severity::Warning);
    }
}
