//! The table of all settings: one row each, with name, default, type and description.
//!
//! Downstream: `sources.rs` reads flags, environment and file by it, `mod.rs` builds [`crate::config::Settings`] from it,
//! `headwater config` prints it, and `docs/settings.md` is generated from it.
//! Guarantees: a setting has one name everywhere: `http.listen` is `--http-listen`, `HEADWATER_HTTP_LISTEN`, and `listen`
//! below `[http]` in the file. Not here: `[[integration]]` and `[[token]]` (see `integrations.rs`).

use std::time::Duration;

use crate::config::value_type::ValueType;
use crate::desk::redaction::BUILT_IN;

/// One setting.
#[derive(Debug)]
pub(crate) struct Setting {
    /// Section and name, such as `http.listen`.
    pub(crate) name: &'static str,
    /// Default value; empty means no value.
    pub(crate) default: &'static str,
    /// Type and allowed range.
    pub(crate) value_type: ValueType,
    /// Effect of the setting, in full sentences.
    pub(crate) description: &'static str,
}

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

const fn setting(
    name: &'static str,
    default: &'static str,
    value_type: ValueType,
    description: &'static str,
) -> Setting {
    Setting { name, default, value_type, description }
}

/// All settings, in the order in which they are shown.
#[rustfmt::skip]
pub(crate) const TABLE: &[Setting] = &[
    // Storage.
    setting("stream.url", "embedded:headwater-data/streams", ValueType::StreamUrl,
        "URL of the stream backend: embedded in this process, or Redis. `docs/redis.md` has its parameters."),
    setting("stream.configure_notifications", "true", ValueType::Switch,
        "Set missing flags of `notify-keyspace-events` on Redis. Without them, expired leases are found by polling, some seconds later."),
    setting("stream.password_file", "", ValueType::Text,
        "File whose first line is the password or token of the user in `stream.url`. It is read for every new connection. Empty: the password of the URL."),
    setting("stream.password_command", "", ValueType::Text,
        "Shell command that prints the password or token of the user in `stream.url`, for example a token of AWS IAM or Microsoft Entra. It runs when a connection is opened. Empty: the password of the URL."),
    setting("stream.password_lifetime", "10m", ValueType::Time { min: seconds(1), max: seconds(86_400) },
        "How long Redis accepts a password of `stream.password_file` or `stream.password_command`. Connections are replaced after three quarters of it."),
    setting("database.url", "sqlite:headwater-data/headwater.db", ValueType::DatabaseUrl,
        "URL of the database for issues, tickets and the outbox: a SQLite file or PostgreSQL."),
    setting("database.connections", "16", ValueType::Count { min: 1, max: 1000 },
        "Maximum number of database connections of one process for work: claims, heartbeats, runs, deliveries."),
    setting("database.http_connections", "16", ValueType::Count { min: 1, max: 1000 },
        "Maximum number of further connections to PostgreSQL of `serve` for HTTP requests, so that slow requests do not delay work. SQLite shares its connections."),
    setting("analytics.path", "headwater-data/analytics.duckdb", ValueType::Text,
        "DuckDB file that `serve` fills for reports and SQL. Empty disables analytics. Only one process at a time can open the file."),
    setting("analytics.query_timeout", "20s", ValueType::Time { min: seconds(1), max: seconds(3600) },
        "Time limit of a report or an SQL query. Over HTTP, `http.request_timeout` must be longer."),
    setting("start.wait", "30s", ValueType::Time { min: Duration::ZERO, max: seconds(3600) },
        "How long to retry at startup while PostgreSQL is unreachable. `serve` and `worker` do not wait for Redis: they take events and process them from SQL until Redis answers."),

    // HTTP.
    setting("http.listen", "127.0.0.1:8080", ValueType::Listen,
        "Address and port of `serve`. An address other than loopback requires a `[[token]]`."),
    setting("http.body_bytes_max", "1048576", ValueType::Count { min: 1024, max: 1024 * 1024 },
        "Maximum size of a request body in bytes."),
    setting("http.body_memory_bytes_max", "268435456", ValueType::Count { min: 16 * 1024 * 1024, max: 1024 * 1024 * 1024 * 1024 },
        "Memory budget in bytes for the bodies of all requests, while they are read and decoded. One client can use at most half. A request waits up to 2s for memory, then it gets status 503."),
    setting("http.import_bytes_max", "1073741824", ValueType::Count { min: 1024, max: 1024 * 1024 * 1024 * 1024 },
        "Maximum size of a session import in bytes."),
    setting("http.header_bytes_max", "32768", ValueType::Count { min: 8192, max: 1024 * 1024 },
        "Maximum size of all headers of a request in bytes."),
    setting("http.connections_max", "1024", ValueType::Count { min: 1, max: 100_000 },
        "Maximum number of open connections. At the limit, the connection that has been idle longest is closed for a new one. If none is idle, up to 64 more are accepted, and only `/health/` is served on them."),
    setting("http.client_connections_max", "512", ValueType::Count { min: 1, max: 100_000 },
        "Maximum number of open connections of one client address (for IPv6, of its /64 network). Ignored with `http.forwarded`, where all connections come from the proxy."),
    setting("http.read_timeout", "10s", ValueType::Time { min: Duration::from_millis(100), max: seconds(600) },
        "Timeout for receiving the headers of a request, counted from the accept or the previous response, and then for its body."),
    setting("http.request_timeout", "30s", ValueType::Time { min: Duration::from_millis(100), max: seconds(600) },
        "Timeout until a response begins, and for each part of it until the client takes it."),
    setting("http.rate_per_second", "200", ValueType::Count { min: 1, max: 1_000_000 },
        "Average number of requests per second that one client may send."),
    setting("http.rate_burst", "1000", ValueType::Count { min: 1, max: 1_000_000 },
        "Maximum burst of requests of one client."),
    setting("http.public_url", "", ValueType::WebUrl,
        "URL under which people reach `serve`, such as `https://desk.example`, for links in notifications and links to drafts. Empty: `http.listen`, if it is a loopback address."),
    setting("http.forwarded", "false", ValueType::Switch,
        "Take the client address from the last entry of `X-Forwarded-For`. Enable only behind a trusted proxy that sets this header."),

    // Work on issues.
    setting("worker.listen", "127.0.0.1:0", ValueType::Listen,
        "Address and port on which `worker` serves health and metrics. Port 0 selects a free port."),
    setting("worker.concurrency", "64", ValueType::Count { min: 1, max: 10_000 },
        "Maximum number of issues that one process handles concurrently."),
    setting("worker.claim", "60s", ValueType::Time { min: seconds(1), max: seconds(86_400) },
        "Lifetime of a claim. The worker renews it every quarter of this time; when it expires, another worker can take over."),
    setting("worker.deadline", "15m", ValueType::Time { min: seconds(1), max: seconds(86_400) },
        "Timeout of one handler run."),
    setting("worker.attempts", "5", ValueType::Count { min: 1, max: 1000 },
        "Failed runs until an issue is quarantined and needs an operator. A failing model and an unreachable database are retried without counting an attempt."),
    setting("worker.drain", "25s", ValueType::Time { min: Duration::ZERO, max: seconds(3600) },
        "How long shutdown waits for runs in progress. The remaining claims are released."),
    setting("issue.quiet", "800ms", ValueType::Time { min: Duration::ZERO, max: seconds(3600) },
        "Debounce window: a run starts when no event of its issue has arrived for this long."),
    setting("issue.max_wait", "5s", ValueType::Time { min: Duration::ZERO, max: seconds(86_400) },
        "Maximum time an event waits for the debounce window."),
    setting("issue.events_max", "200", ValueType::Count { min: 1, max: 1000 },
        "Maximum number of events in one run. Further events go into the next run."),
    setting("sweep.every", "5s", ValueType::Time { min: Duration::from_millis(100), max: seconds(3600) },
        "Interval of the sweeper, which finds issues whose nudge was lost."),

    setting("outbox.attempts", "50", ValueType::Count { min: 1, max: 10_000 },
        "Failed deliveries until a reply is marked dead and needs an operator. 50 attempts take several hours."),

    // Webhooks.
    setting("webhook.tolerance", "5m", ValueType::Time { min: seconds(1), max: seconds(86_400) },
        "Maximum difference between the timestamp of a signed webhook and the current time."),

    // The desk.
    setting("model.url", "scripted:", ValueType::ModelUrl,
        "URL of the language model: `scripted:` in this process, or an OpenAI-compatible chat endpoint such as `https://HOST/v1`."),
    setting("model.name", "", ValueType::Text,
        "Name of the model at that endpoint."),
    setting("model.key", "", ValueType::Secret,
        "API key for that endpoint."),
    setting("model.timeout", "2m", ValueType::Time { min: seconds(1), max: seconds(3600) },
        "Timeout of one model response, retries included."),
    setting("model.idle_timeout", "30s", ValueType::Time { min: Duration::from_millis(100), max: seconds(3600) },
        "Timeout between two chunks of a streamed model response."),
    setting("model.output_tokens_max", "1024", ValueType::Count { min: 16, max: 1_000_000 },
        "Maximum output tokens of one model response. A response that reaches it is requested again with 4 and 16 times as many."),
    setting("model.price_in", "0", ValueType::Price,
        "Price of a million input tokens. Reports show costs in the same currency."),
    setting("model.price_out", "0", ValueType::Price,
        "Price of a million output tokens."),
    setting("desk.issue_tokens_max", "200000", ValueType::Count { min: 0, max: 1_000_000_000_000 },
        "Token budget of one issue. When it is used up, the issue is handed over to a person."),
    setting("desk.day_tokens_max", "5000000", ValueType::Count { min: 0, max: 1_000_000_000_000 },
        "Token budget of one integration per day (UTC). When it is used up, its runs wait until the next day; other integrations continue. The scripted model uses no tokens."),
    setting("desk.user_tokens_max", "500000", ValueType::Count { min: 0, max: 1_000_000_000_000 },
        "Token budget of the messages of one author per integration and day (UTC). When it is used up, runs for this author wait until the next day; other authors continue."),
    setting("desk.strangers_tokens_max", "2500000", ValueType::Count { min: 0, max: 1_000_000_000_000 },
        "Token budget of the messages of all strangers together per integration and day (UTC): authors who, as GitHub says, have never contributed to the repository. When it is used up, runs for strangers wait until the next day; contributors and members continue."),
    setting("desk.supersede_max", "5", ValueType::Count { min: 0, max: 1000 },
        "How many times in a row newer events may supersede a run of the desk before it must finish."),
    setting("desk.search", "own", ValueType::Choice(&["own", "all"]),
        "Which earlier tickets the model may search: `own` (those of the same user) or `all`."),
    setting("desk.redact", "", ValueType::Words(BUILT_IN),
        "Personal data that is replaced by placeholders before a model sees it, and restored in its reply. `[[redaction]]` sections add patterns. Empty: only those."),
    setting("desk.link_secret", "", ValueType::Secret,
        "Secret that signs links which approve or reject a draft without a token, at least 16 characters. Empty: there are no such links. A new secret ends all links."),
    setting("desk.draft_link_ttl", "1d", ValueType::Time { min: seconds(1), max: seconds(90 * 86_400) },
        "How long a link to a draft is valid."),
    setting("desk.draft_max_wait", "0ms", ValueType::Time { min: Duration::ZERO, max: seconds(365 * 86_400) },
        "How long a draft may wait for a decision; afterwards it is overdue, see `desk.draft_overdue`. 0ms: without a limit."),
    setting("desk.draft_overdue", "notify", ValueType::Choice(&["notify", "hand_over"]),
        "What happens to an overdue draft: `notify` sends `DRAFT_OVERDUE` to the receivers that chose it; `hand_over` also hands its issue over to a person. The draft still waits."),
    setting("desk.reclaim_idle", "5m", ValueType::Time { min: Duration::from_millis(100), max: seconds(86_400) },
        "How long an entry of `ticket_events` stays pending with an inactive consumer before it is reclaimed."),

    // The event bus.
    setting("bus.namespace", "default", ValueType::Text,
        "Namespace of the bus of `serve` and `worker`: events of handlers go to `wink:control:NAMESPACE`. At most 64 bytes. `headwater loop` has its own argument."),
    setting("bus.stream_len_max", "10000", ValueType::Count { min: 100, max: 100_000_000 },
        "Entries that a control stream of the bus keeps after every group has acknowledged them. Sessions are compacted instead; `retention.sessions` deletes them."),
    setting("bus.health_interval", "30s", ValueType::Time { min: Duration::ZERO, max: seconds(86_400) },
        "Interval at which the bus checks its streams, for the metrics `headwater_bus_…`. 0ms disables the checks."),
    setting("bus.breaker_failures", "5", ValueType::Count { min: 1, max: 1000 },
        "Consecutive failures of the streams after which the bus rejects calls at once."),
    setting("bus.breaker_recovery", "5s", ValueType::Time { min: Duration::from_millis(100), max: seconds(3600) },
        "How long the bus rejects calls before it tries the streams again, with one call."),
    setting("bus.request_attempts", "3", ValueType::Count { min: 1, max: 900 },
        "Attempts of `headwater loop worker` until a request fails."),
    setting("bus.retry_backoff", "100ms", ValueType::Time { min: Duration::from_millis(1), max: seconds(60) },
        "Delay of `headwater loop worker` after the first failed attempt of a request. It doubles with each further one, up to 60s; up to half of it is random."),

    // Audit log, logs and traces.
    // Retention.
    setting("retention.events", "90d", ValueType::Time { min: Duration::ZERO, max: seconds(100 * 365 * 86_400) },
        "How long processed events, and runs of issues, are kept; afterwards the same event, sent again, is a new one. 0ms keeps them forever. Events that are not processed are always kept."),
    setting("retention.issues", "365d", ValueType::Time { min: Duration::ZERO, max: seconds(100 * 365 * 86_400) },
        "How long an issue is kept after its last change, with its ticket, messages, events and replies. 0ms keeps them forever. Issues with pending events or undelivered replies, quarantined issues and open tickets are always kept."),
    setting("retention.outbox", "7d", ValueType::Time { min: seconds(3600), max: seconds(100 * 365 * 86_400) },
        "How long delivered replies and events, and dead letters after their release, are kept. A repeated delivery is recognised for this long."),
    setting("retention.sessions", "30d", ValueType::Time { min: seconds(3600), max: seconds(100 * 365 * 86_400) },
        "How long the session of a model run, with its prompts and answers, is kept after its last event."),
    setting("retention.every", "1h", ValueType::Time { min: Duration::from_millis(100), max: seconds(86_400) },
        "Interval at which `serve` removes old events and issues, in small batches."),
    setting("history.keep", "48h", ValueType::Time { min: Duration::ZERO, max: seconds(30 * 86_400) },
        "How long the history of metrics is kept in the database, a row for each process and minute. 0ms stores none: each process then knows only its last hour."),
    setting("audit.rows_max", "100000", ValueType::Count { min: 100, max: 10_000_000 },
        "Maximum number of entries in the audit log. Older entries are removed."),
    setting("log.format", "auto", ValueType::Choice(&["auto", "text", "json"]),
        "Log format. `auto` selects text on a terminal and JSON otherwise."),
    setting("log.level", "info", ValueType::Filter,
        "Log level, or filter directives such as `info,headwater_issue=debug`."),
    setting("otlp.url", "", ValueType::WebUrl,
        "URL of an OpenTelemetry collector (OTLP over HTTP) for traces. Empty disables traces."),
];

/// The setting of this name, if there is one.
pub(crate) fn find(name: &str) -> Option<&'static Setting> {
    TABLE.iter().find(|setting| setting.name == name)
}

impl Setting {
    /// `--http-listen` without its dashes.
    pub(crate) fn flag(&self) -> String {
        self.name.replace(['.', '_'], "-")
    }

    /// `HEADWATER_HTTP_LISTEN`.
    pub(crate) fn variable(&self) -> String {
        format!("HEADWATER_{}", self.name.replace('.', "_").to_uppercase())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_setting_has_a_unique_name_and_a_valid_default() {
        let mut names = HashSet::new();
        for setting in TABLE {
            assert!(names.insert(setting.flag()), "duplicate setting {}", setting.name);
            assert!(setting.name.split('.').count() == 2, "{} must have one section", setting.name);
            assert!(setting.description.ends_with('.'), "{} needs a full sentence", setting.name);
            if !setting.default.is_empty() {
                let checked = setting.value_type.check(setting.default);
                assert!(checked.is_ok(), "{}: {checked:?}", setting.name);
            }
        }
    }

    #[test]
    fn flag_and_variable_are_derived_from_the_name() {
        let setting = find("http.body_bytes_max").expect("the setting exists");
        assert_eq!(setting.flag(), "http-body-bytes-max");
        assert_eq!(setting.variable(), "HEADWATER_HTTP_BODY_BYTES_MAX");
    }
}
