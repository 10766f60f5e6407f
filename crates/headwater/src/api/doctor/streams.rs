//! Checks of the stream backend: version, memory, persistence, eviction, notifications, commands and clock.
//!
//! Upstream: `mod.rs`. Downstream: a new connection to Redis for each check, because a backend describes itself as of
//! its connect. Guarantees: reports the current state; an unreachable server is reported once.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use headwater_queue::Queue;
use headwater_stream::{Backend, BackendDescription, Options};
use secrecy::ExposeSecret;
use tokio::time::timeout;

use crate::api::doctor::groups;
use crate::api::doctor::{Finding, Severity, check_timeout, clock};
use crate::config::Settings;

/// Checks the stream backend.
pub(crate) async fn streams(settings: &Settings, streams: &Arc<dyn Backend>) -> Vec<Finding> {
    let check_timeout = check_timeout(settings);
    let unreachable = |problem: String| {
        let found = format!("{} is unreachable: {problem}", settings.stream_shown());
        let advice = "start it; until then processing continues from SQL, with higher latency";
        vec![Finding::new(Severity::Unreachable, "streams", found, advice)]
    };
    let mut findings =
        match timeout(check_timeout, describe_now(settings, streams, check_timeout)).await {
            Ok(Ok(description)) => findings_of(&description),
            Ok(Err(problem)) => return unreachable(problem),
            Err(_) => return unreachable(format!("no answer within {check_timeout:?}")),
        };
    let before = SystemTime::now();
    findings.push(match timeout(check_timeout, streams.now()).await {
        Ok(Ok(theirs)) => clock("streams", before, theirs.as_millis()),
        Ok(Err(error)) => Finding::new(Severity::Unreachable, "clock", error.to_string(), ""),
        Err(_) => {
            Finding::new(Severity::Unreachable, "clock", "the stream backend is too slow", "")
        }
    });
    let queue = Queue::new(Arc::clone(streams));
    let checked = timeout(check_timeout, groups::check(&queue)).await;
    let too_slow =
        |_| vec![Finding::warning("groups", "skipped: the stream backend is too slow", "")];
    findings.extend(checked.unwrap_or_else(too_slow));
    findings
}

/// Describes the current state of the stream backend.
async fn describe_now(
    settings: &Settings,
    streams: &Arc<dyn Backend>,
    call_deadline: Duration,
) -> Result<BackendDescription, String> {
    let known = streams.describe();
    if known.kind != "redis" {
        return Ok(known);
    }
    let options = Options { call_deadline, ..Options::default() };
    let opened = headwater_stream::connect(settings.stream_url.expose_secret(), &options).await;
    let opened = opened.map_err(|error| error.to_string())?;
    let description = opened.describe();
    // The connection was only used for reading.
    let _ = opened.close().await;
    Ok(description)
}

fn findings_of(description: &BackendDescription) -> Vec<Finding> {
    let version = description.version.as_deref().unwrap_or("(built in)");
    let mut findings = vec![Finding::ok(
        "streams",
        format!("{} {version} at {}", description.kind, description.address),
    )];
    if description.kind == "redis" {
        findings.push(commands(description.version.as_deref()));
    }
    for (name, value) in &description.facts {
        findings.push(match (*name, value.as_str()) {
            ("append only file", "off") => Finding::warning(
                "persistence",
                "the append-only file is off",
                "set `appendonly yes`: events are safe in SQL, but topics and sessions exist only in Redis",
            ),
            ("append only file", state) => {
                Finding::ok("persistence", format!("the append-only file is {state}"))
            }
            ("memory", found) if found.starts_with("full") => Finding::error(
                "memory",
                format!("{found}: Redis rejects writes"),
                "raise `maxmemory` of Redis, or trim topics with `headwater topic trim`",
            ),
            ("memory", found) => Finding::ok("memory", found),
            ("eviction", policy) if policy != "noeviction" => Finding::error(
                "eviction",
                format!("maxmemory-policy is {policy}: Redis may evict streams"),
                "set `maxmemory-policy noeviction`",
            ),
            ("eviction", policy) => Finding::ok("eviction", format!("maxmemory-policy is {policy}")),
            ("notify-keyspace-events", flags) if !notifies_expiry(flags) => Finding::warning(
                "notify-keyspace-events",
                format!("{flags}: expired leases are found by polling, some seconds later"),
                "set `notify-keyspace-events Ex`, or allow CONFIG SET",
            ),
            ("notify-keyspace-events", flags) => {
                Finding::ok("notify-keyspace-events", format!("{flags}: expired leases are notified"))
            }
            // Counters are metrics, not findings.
            ("writes" | "syncs" | "compactions", _) | ("cut_bytes" | "outages", "0") => continue,
            ("cut_bytes", bytes) => Finding::ok(
                "streams",
                format!("{bytes} bytes of a torn write were truncated at startup"),
            ),
            _ => Finding::ok("streams", format!("{name}: {value}")),
        });
    }
    findings
}

/// Checks which optional commands the server supports.
fn commands(version: Option<&str>) -> Finding {
    let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    let in_use = "only commands of Redis 6.2 are used";
    match major {
        Some(major) if major < 7 => Finding::warning(
            "commands",
            format!("{in_use}; this server does not report the lag of groups"),
            "upgrade to Redis 7.0 or later to see the lag of groups",
        ),
        Some(_) => Finding::ok("commands", format!("{in_use}, plus the group lag of Redis 7.0")),
        None => Finding::warning(
            "commands",
            format!("{in_use}; this server does not report its version"),
            "allow INFO for this user",
        ),
    }
}

/// Whether the flags, as printed by the server, enable keyevents for expiry or for all events.
fn notifies_expiry(flags: &str) -> bool {
    flags.contains('E') && flags.contains(['x', 'A'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redis(facts: Vec<(&'static str, String)>) -> BackendDescription {
        BackendDescription {
            kind: "redis",
            address: "redis://here".to_owned(),
            version: Some("7.0.15".to_owned()),
            facts,
        }
    }

    #[test]
    fn an_eviction_policy_is_an_error() {
        let findings = findings_of(&redis(vec![("eviction", "allkeys-lru".to_owned())]));
        assert_eq!(findings[2].severity, Severity::Error);
        assert_eq!(findings[2].advice, "set `maxmemory-policy noeviction`");
    }

    #[test]
    fn missing_persistence_and_notifications_are_warnings() {
        let findings = findings_of(&redis(vec![
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
    fn full_memory_is_an_error() {
        let of =
            |memory: &str| findings_of(&redis(vec![("memory", memory.to_owned())]))[2].severity;
        assert_eq!(of("full, 2 of 1 bytes"), Severity::Error);
        assert_eq!(of("1 of 2 bytes"), Severity::Ok);
    }

    #[test]
    fn an_old_redis_version_is_a_warning() {
        assert_eq!(commands(Some("6.2.14")).severity, Severity::Warning);
        assert_eq!(commands(Some("7.0.15")).severity, Severity::Ok);
        assert_eq!(commands(None).severity, Severity::Warning);
    }
}
