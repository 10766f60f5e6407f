//! The streams: server, version, memory, persistence, eviction, notifications, commands, clock; and groups that hold back trims.
//!
//! Upstream: `checks`. Downstream: a connection of its own to Redis for each look, since what a backend says of itself is what
//! it found when it was opened. Promises: what is told is so at the time of asking; a server that is away is told once.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use headwater_queue::Queue;
use headwater_stream::{Backend, Description, Options};
use secrecy::ExposeSecret;
use tokio::time::timeout;

use crate::api::doctor::groups;
use crate::api::doctor::{Finding, Severity, clock, look_max};
use crate::config::Settings;

/// Looks at the streams.
pub(crate) async fn streams(settings: &Settings, streams: &Arc<dyn Backend>) -> Vec<Finding> {
    let look_max = look_max(settings);
    let away = |problem: String| {
        let found = format!("{} cannot be reached: {problem}", settings.stream_shown());
        let advice = "start it; work goes on from SQL meanwhile, more slowly";
        vec![Finding::new(Severity::Unreachable, "streams", found, advice)]
    };
    let mut findings = match timeout(look_max, look(settings, streams, look_max)).await {
        Ok(Ok(description)) => described(&description),
        Ok(Err(problem)) => return away(problem),
        Err(_) => return away(format!("no answer within {look_max:?}")),
    };
    let before = SystemTime::now();
    findings.push(match timeout(look_max, streams.now()).await {
        Ok(Ok(theirs)) => clock("streams", before, theirs.as_millis()),
        Ok(Err(error)) => Finding::new(Severity::Unreachable, "clock", error.to_string(), ""),
        Err(_) => Finding::new(Severity::Unreachable, "clock", "the streams are too slow", ""),
    });
    let queue = Queue::new(Arc::clone(streams));
    let looked = timeout(look_max, groups::look(&queue)).await;
    let too_slow =
        |_| vec![Finding::warning("groups", "not looked at: the streams are too slow", "")];
    findings.extend(looked.unwrap_or_else(too_slow));
    findings
}

/// What the streams are now.
async fn look(
    settings: &Settings,
    streams: &Arc<dyn Backend>,
    call_deadline: Duration,
) -> Result<Description, String> {
    let known = streams.describe();
    if known.kind != "redis" {
        return Ok(known);
    }
    let options = Options { call_deadline, ..Options::default() };
    let opened = headwater_stream::connect(settings.stream_url.expose_secret(), &options).await;
    let opened = opened.map_err(|error| error.to_string())?;
    let description = opened.describe();
    // It only looked.
    let _ = opened.close().await;
    Ok(description)
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
            ("memory", found) if found.starts_with("full") => Finding::error(
                "memory",
                format!("{found}: Redis takes nothing new"),
                "raise `maxmemory` of Redis, or let topics keep less: `headwater topic trim`",
            ),
            ("memory", found) => Finding::fine("memory", found),
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
            // Counters, for those who measure.
            ("writes" | "syncs" | "compactions", _) | ("cut_bytes" | "outages", "0") => continue,
            ("cut_bytes", bytes) => Finding::fine(
                "streams",
                format!("{bytes} bytes of a torn write were cut off the log at the start"),
            ),
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
    fn a_server_that_is_full_is_an_error_and_one_with_room_is_not() {
        let of = |memory: &str| described(&redis(vec![("memory", memory.to_owned())]))[2].severity;
        assert_eq!(of("full, 2 of 1 bytes"), Severity::Error);
        assert_eq!(of("1 of 2 bytes"), Severity::Ok);
    }

    #[test]
    fn an_old_server_does_not_tell_lag() {
        assert_eq!(commands(Some("6.2.14")).severity, Severity::Warning);
        assert_eq!(commands(Some("7.0.15")).severity, Severity::Ok);
        assert_eq!(commands(None).severity, Severity::Warning);
    }
}
