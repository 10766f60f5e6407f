//! `headwater doctor`: looks at the servers and says in words what to change.
//!
//! Promises: it changes nothing but the tables it brings up to date, as every start does. Exit codes: 0 all is well, 4 there
//! are warnings, 1 something must be changed, 3 a server cannot be reached.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use headwater_issue::Store;
use headwater_stream::{Backend, Description};
use serde_json::json;

use super::{client, print};
use crate::failure::Failure;
use crate::settings::Settings;

/// A difference between two clocks that is worth a word, and one that does harm.
const SKEW_ODD: Duration = Duration::from_secs(2);
const SKEW_HARMFUL: Duration = Duration::from_secs(60);

/// Looks for trouble.
#[derive(Debug, clap::Args)]
pub(crate) struct Doctor {
    /// One JSON value a line.
    #[arg(long)]
    json: bool,
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    Fine,
    Warning,
    Error,
    Unreachable,
}

/// One thing that was looked at.
struct Finding {
    severity: Severity,
    subject: &'static str,
    found: String,
    /// What to change; empty if nothing.
    advice: String,
}

impl Finding {
    fn fine(subject: &'static str, found: impl Into<String>) -> Self {
        Self { severity: Severity::Fine, subject, found: found.into(), advice: String::new() }
    }

    fn warning(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, subject, found: found.into(), advice: advice.into() }
    }

    fn error(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { severity: Severity::Error, subject, found: found.into(), advice: advice.into() }
    }

    fn unreachable(subject: &'static str, failure: &Failure) -> Self {
        let severity = match failure {
            Failure::Unreachable(_) => Severity::Unreachable,
            _ => Severity::Error,
        };
        Self { severity, subject, found: failure.to_string(), advice: String::new() }
    }
}

impl Doctor {
    pub(super) async fn run(&self, settings: &Settings) -> Result<(), Failure> {
        let mut findings = Vec::new();
        match client::streams(settings).await {
            Ok(streams) => {
                findings.extend(streams_findings(&streams.describe()));
                findings.push(clock(streams.as_ref()).await);
                let _ = streams.close().await;
            }
            Err(failure) => findings.push(Finding::unreachable("streams", &failure)),
        }
        match client::store(settings).await {
            Ok(store) => {
                findings.push(Finding::fine(
                    "database",
                    format!("{}, tables up to date", settings.database_shown()),
                ));
                findings.extend(database_findings(store.as_ref()).await);
                store.close().await;
            }
            Err(failure) => findings.push(Finding::unreachable("database", &failure)),
        }
        findings.extend(settings_findings(settings));
        for finding in &findings {
            self.print(finding)?;
        }
        let worst = findings.iter().map(|finding| finding.severity).max();
        match worst.unwrap_or(Severity::Fine) {
            Severity::Fine => Ok(()),
            Severity::Warning => Err(Failure::Warnings),
            Severity::Error => Err(Failure::new("something must be changed, see above")),
            Severity::Unreachable => {
                Err(Failure::Unreachable("a server cannot be reached, see above".to_owned()))
            }
        }
    }

    fn print(&self, finding: &Finding) -> Result<(), Failure> {
        let Finding { severity, subject, found, advice } = finding;
        let severity = match severity {
            Severity::Fine => "ok",
            Severity::Warning => "warning",
            Severity::Error => "error",
            Severity::Unreachable => "unreachable",
        };
        if self.json {
            let line =
                json!({"severity": severity, "subject": subject, "found": found, "advice": advice});
            return print::line(&line.to_string());
        }
        print::line(&format!("{severity:<11}  {subject}: {found}"))?;
        if advice.is_empty() { Ok(()) } else { print::line(&format!("             -> {advice}")) }
    }
}

fn streams_findings(described: &Description) -> Vec<Finding> {
    let version = described.version.as_deref().unwrap_or("of this program");
    let mut findings = vec![Finding::fine(
        "streams",
        format!("{} {version} at {}", described.kind, described.address),
    )];
    for (name, value) in &described.facts {
        findings.push(match (*name, value.as_str()) {
            ("append only file", "off") => Finding::warning(
                "persistence",
                "the append only file is off",
                "events in SQL are safe, but topics and sessions live in Redis alone: set `appendonly yes`",
            ),
            ("eviction", policy) if policy != "noeviction" => Finding::error(
                "eviction",
                format!("maxmemory-policy is {policy}: Redis may throw streams away"),
                "set `maxmemory-policy noeviction`",
            ),
            ("notify-keyspace-events", flags) if !hears_of_expiry(flags) => Finding::warning(
                "notify-keyspace-events",
                format!("{flags}: expired leases are found by looking, some seconds later"),
                "set `notify-keyspace-events Ex`, or allow CONFIG SET",
            ),
            _ => Finding::fine("streams", format!("{name}: {value}")),
        });
    }
    findings
}

/// Flags as the server prints them, in quotation marks: keyevents of expiry, or of everything.
fn hears_of_expiry(flags: &str) -> bool {
    flags.contains('E') && flags.contains(['x', 'A'])
}

async fn clock(streams: &dyn Backend) -> Finding {
    let before = SystemTime::now();
    let theirs = match streams.now().await {
        Ok(theirs) => theirs.as_millis(),
        Err(error) => return Finding::warning("clock", error.to_string(), ""),
    };
    let took = before.elapsed().unwrap_or_default();
    let ours = before.duration_since(UNIX_EPOCH).unwrap_or_default() + took / 2;
    let skew =
        Duration::from_millis(theirs.abs_diff(u64::try_from(ours.as_millis()).unwrap_or(u64::MAX)));
    let skew = skew.saturating_sub(took);
    let advice =
        "let both machines keep time by NTP: entry ids and due times follow the server's clock";
    match skew {
        skew if skew >= SKEW_HARMFUL => Finding::error(
            "clock",
            format!("it differs by {skew:?} from that of the streams"),
            advice,
        ),
        skew if skew >= SKEW_ODD => Finding::warning(
            "clock",
            format!("it differs by {skew:?} from that of the streams"),
            advice,
        ),
        skew => Finding::fine("clock", format!("within {skew:?} of that of the streams")),
    }
}

async fn database_findings(store: &dyn Store) -> Vec<Finding> {
    let mut findings = Vec::new();
    match headwater_issue::audit(store).await {
        Ok(audit) if audit.balances() => {
            findings.push(Finding::fine("audit", "every event is accounted for"));
        }
        Ok(_) => findings.push(Finding::error(
            "audit",
            "recorded events are not all processed, pending or quarantined",
            "`headwater_issue::audit` names the issues that do not add up; there is no verb for it yet",
        )),
        Err(error) => findings.push(Finding::warning("audit", error.to_string(), "")),
    }
    match store.workers().await {
        Ok(workers) if workers.is_empty() => findings.push(Finding::warning(
            "workers",
            "none is alive",
            "start `headwater serve` or `headwater worker`",
        )),
        Ok(workers) => findings.push(Finding::fine("workers", format!("{} alive", workers.len()))),
        Err(error) => findings.push(Finding::warning("workers", error.to_string(), "")),
    }
    match store.dead_outbox(None, 1).await {
        Ok(dead) if dead.is_empty() => {
            findings.push(Finding::fine("outbox", "nothing was given up"));
        }
        Ok(_) => findings.push(Finding::warning(
            "outbox",
            "replies or events were given up after their last try",
            "`Operator::dead_outbox` lists them, `retry_outbox` sends them again; no verb does it yet",
        )),
        Err(error) => findings.push(Finding::warning("outbox", error.to_string(), "")),
    }
    findings
}

fn settings_findings(settings: &Settings) -> Vec<Finding> {
    let listen = settings.http.listen;
    if settings.tokens.is_empty() {
        let found = format!("no token; only this machine can reach {listen}");
        return vec![Finding::fine("access", found)];
    }
    vec![Finding::fine("access", format!("{} tokens", settings.tokens.len()))]
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
        let findings = streams_findings(&redis(vec![("eviction", "allkeys-lru".to_owned())]));
        assert_eq!(findings[1].severity, Severity::Error);
        assert_eq!(findings[1].advice, "set `maxmemory-policy noeviction`");
    }

    #[test]
    fn a_server_without_persistence_and_one_that_tells_nothing_are_warnings() {
        let findings = streams_findings(&redis(vec![
            ("append only file", "off".to_owned()),
            ("notify-keyspace-events", "\"\"".to_owned()),
            ("notify-keyspace-events", "\"xE\"".to_owned()),
            ("append only file", "everysec".to_owned()),
            ("eviction", "noeviction".to_owned()),
        ]));
        let severities: Vec<_> = findings[1..].iter().map(|finding| finding.severity).collect();
        use Severity::{Fine, Warning};
        assert_eq!(severities, [Warning, Warning, Fine, Fine, Fine]);
    }
}
