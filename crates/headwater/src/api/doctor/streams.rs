//! Checks of the stream backend: version, memory, persistence, eviction, notifications, commands and clock.
//!
//! Upstream: `mod.rs`. Downstream: `Backend::probe`. Guarantees: reports the current state; an unreachable server is reported once.

use std::sync::Arc;
use std::time::SystemTime;

use headwater_queue::Queue;
use headwater_stream::{Backend, BackendDescription};
use tokio::time::timeout;

use crate::api::doctor::{Finding, Severity, check_timeout, clock, topics};
use crate::config::Settings;

/// Name of the fact that names a server other than Redis.
const SERVER: &str = "server";

/// What is used of servers newer than Redis 6.2, and the version of Redis that has it.
const NEWER_COMMANDS: [((u32, u32), &str); 3] = [
    ((7, 0), "the lag of groups and the number of entries ever added (XINFO)"),
    ((7, 0), "scripts that run on a full server (allow-oom)"),
    ((7, 2), "the library of a connection (CLIENT SETINFO)"),
];

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
    let checked = timeout(check_timeout, topics::check(&queue)).await;
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
        findings.push(commands(description));
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
            // Part of the finding about commands.
            (SERVER, _) => continue,
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

/// Says which server it is, which newer commands are used because it has them, and what it lacks.
fn commands(description: &BackendDescription) -> Finding {
    let in_use = "the commands of Redis 6.2 are used";
    let Some(version) = &description.version else {
        return Finding::warning(
            "commands",
            format!(
                "{in_use}, and newer ones where the server has them; it does not report its version"
            ),
            "allow INFO for this user",
        );
    };
    // Valkey reports the version of Redis that it is compatible with, and its own one.
    let valkey = description.facts.iter().find(|(name, _)| *name == SERVER);
    let server = valkey.map_or_else(|| format!("Redis {version}"), |(_, server)| server.clone());
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    let has = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (used, missing): (Vec<_>, Vec<_>) =
        NEWER_COMMANDS.iter().partition(|(since, _)| *since <= has);
    let list = |found: Vec<&((u32, u32), &str)>| -> String {
        let names = found
            .into_iter()
            .map(|((major, minor), what)| format!("{what} (Redis {major}.{minor})"));
        names.collect::<Vec<_>>().join(", ")
    };
    let used =
        if used.is_empty() { String::new() } else { format!(", and newer ones: {}", list(used)) };
    let lacks = if missing.is_empty() { "nothing that is used".to_owned() } else { list(missing) };
    let found = format!("{server}: {in_use}{used}; it lacks {lacks}");
    if has >= (7, 0) {
        return Finding::ok("commands", found);
    }
    let advice = "upgrade to Redis 7.2 or Valkey 8 or later; until then keep a reserve of memory (docs/operations.md)";
    Finding::warning("commands", found, advice)
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
    fn the_commands_follow_from_the_version_of_redis_or_of_a_server_compatible_with_it() {
        let of = |version: Option<&str>, valkey: Option<&str>| {
            let version = version.map(str::to_owned);
            let facts = valkey.map(|valkey| (SERVER, valkey.to_owned())).into_iter().collect();
            commands(&BackendDescription { version, ..redis(facts) })
        };
        let parts = |finding: &Finding| {
            let (used, lacks) = finding.found.split_once("; it lacks ").unwrap();
            let count = |text: &str| text.matches("(Redis 7.").count();
            (finding.severity, count(used), count(lacks))
        };
        let old = of(Some("6.2.14"), None);
        assert!(old.found.starts_with("Redis 6.2.14: "), "{old:?}");
        assert_eq!(parts(&old), (Severity::Warning, 0, 3));
        assert_eq!(parts(&of(Some("7.0.15"), None)), (Severity::Ok, 2, 1));
        assert_eq!(parts(&of(Some("7.2.0"), None)), (Severity::Ok, 3, 0));
        assert_eq!(parts(&of(Some("10.1.0"), None)), (Severity::Ok, 3, 0));
        let valkey = of(Some("7.2.4"), Some("Valkey 9.1.2, compatible with Redis 7.2.4"));
        assert!(valkey.found.starts_with("Valkey 9.1.2, compatible"), "{valkey:?}");
        assert_eq!(parts(&valkey), (Severity::Ok, 3, 0));
        assert_eq!(of(None, None).severity, Severity::Warning);
    }
}
