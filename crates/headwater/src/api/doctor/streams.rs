//! Checks of the stream backend: version, memory, persistence, eviction, notifications, commands and clock.
//!
//! Upstream: `mod.rs`. Downstream: `Backend::probe`. Guarantees: reports the current state; an unreachable server is reported once.

use std::sync::Arc;
use std::time::SystemTime;

use headwater_queue::Queue;
use headwater_stream::{Backend, BackendDescription};
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
    let mut findings = match timeout(check_timeout, streams.probe()).await {
        Ok(Ok(description)) => findings_of(&description),
        Ok(Err(error)) => return unreachable(error.to_string()),
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

/// Says what the server lacks because of its version.
fn commands(version: Option<&str>) -> Finding {
    let in_use = "commands of Redis 6.2 are used, and newer ones where the server has them";
    let Some(version) = version else {
        return Finding::warning(
            "commands",
            format!("{in_use}; this server does not report its version"),
            "allow INFO for this user",
        );
    };
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    match (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) {
        (..=6, _) => Finding::warning(
            "commands",
            format!(
                "{in_use}; this server has no lag of groups, runs no script while it is full, and does not show the \
                 library of a connection"
            ),
            "upgrade to Redis 7.2 or Valkey 8 or later; until then keep a reserve of memory (docs/operations.md)",
        ),
        (7, ..=1) => Finding::ok(
            "commands",
            format!("{in_use}; this server does not show the library of a connection (Redis 7.2)"),
        ),
        _ => Finding::ok("commands", format!("{in_use}; this server lacks none of them")),
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
