//! The table of all settings: one row each, with its name, default, kind and meaning.
//!
//! Upstream: nothing; this is where a setting is born. Downstream: `sources` reads flags, environment and file by it,
//! `Settings` is built from it, `headwater config` prints it, and `docs/settings.md` is made of it.
//! Promises: one name per setting everywhere: `http.listen` is `--http-listen`, `HEADWATER_HTTP_LISTEN`, and `listen` below
//! `[http]` in the file. Not here: `[[integration]]` and `[[token]]`, of which there are several (see `lists`).

use std::time::Duration;

use crate::config::value_type::Kind;

/// One setting.
#[derive(Debug)]
pub(crate) struct Setting {
    /// Section and name, such as `http.listen`.
    pub(crate) name: &'static str,
    /// What holds if nobody says otherwise; empty means none.
    pub(crate) default: &'static str,
    /// What is allowed.
    pub(crate) kind: Kind,
    /// What it does, in one sentence.
    pub(crate) meaning: &'static str,
}

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

const fn setting(
    name: &'static str,
    default: &'static str,
    kind: Kind,
    meaning: &'static str,
) -> Setting {
    Setting { name, default, kind, meaning }
}

/// All settings, in the order in which they are shown.
#[rustfmt::skip]
pub(crate) const TABLE: &[Setting] = &[
    // Where everything lies.
    setting("stream.url", "embedded:headwater-data/streams", Kind::StreamUrl,
        "Where streams are: in this process, or on Redis."),
    setting("stream.spool", "headwater-data/spool", Kind::Text,
        "A directory where steps of model runs wait while Redis is away; processes may share it. Empty: they are lost then, and the log says which. One that is named must work; without the default one a process does."),
    setting("database.url", "sqlite:headwater-data/headwater.db", Kind::DatabaseUrl,
        "Where issues, tickets and the outbox are: a SQLite file, or Postgres."),
    setting("database.connections", "16", Kind::Count { min: 1, max: 1000 },
        "The most connections to the database."),
    setting("analytics.path", "headwater-data/analytics.duckdb", Kind::Text,
        "The DuckDB file in which `serve` keeps what happened, for reports and SQL; empty: none. One process has it at a time."),
    setting("start.wait", "30s", Kind::Time { min: Duration::ZERO, max: seconds(3600) },
        "How long to wait at the start for a Redis or Postgres that is away."),

    // HTTP.
    setting("http.listen", "127.0.0.1:8080", Kind::Listen,
        "Where `serve` listens. Anything but the machine itself needs a `[[token]]`."),
    setting("http.body_bytes_max", "1048576", Kind::Count { min: 1024, max: 1024 * 1024 },
        "The largest body of a request."),
    setting("http.body_memory_bytes_max", "268435456", Kind::Count { min: 16 * 1024 * 1024, max: 1024 * 1024 * 1024 * 1024 },
        "Memory for the bodies of all requests at once, while they are read and decoded. One client may use half of it. A request that finds none waits 2s, then it is answered with 503."),
    setting("http.import_bytes_max", "1073741824", Kind::Count { min: 1024, max: 1024 * 1024 * 1024 * 1024 },
        "The most bytes of a session that is imported."),
    setting("http.header_bytes_max", "32768", Kind::Count { min: 8192, max: 1024 * 1024 },
        "The most bytes of all headers of a request."),
    setting("http.connections_max", "1024", Kind::Count { min: 1, max: 100_000 },
        "Connections at once. Beyond it the connection that waited longest for a request is closed; if all are busy, 64 more are accepted and only `/health/` is answered on them."),
    setting("http.client_connections_max", "512", Kind::Count { min: 1, max: 100_000 },
        "The same for the connections of one client address (of an IPv6 address, its /64 network). Not applied with `http.forwarded`, where the address is the proxy's."),
    setting("http.read_timeout", "10s", Kind::Time { min: Duration::from_millis(100), max: seconds(600) },
        "How long a client may take to send its headers, counted from the accept of the connection or the last answer on it, and then its body."),
    setting("http.request_timeout", "30s", Kind::Time { min: Duration::from_millis(100), max: seconds(600) },
        "How long a request may take until its answer begins."),
    setting("http.rate_per_second", "200", Kind::Count { min: 1, max: 1_000_000 },
        "Requests per second that one client may send on average."),
    setting("http.rate_burst", "1000", Kind::Count { min: 1, max: 1_000_000 },
        "Requests that one client may send at once."),
    setting("http.forwarded", "false", Kind::Switch,
        "Whether the client's address is the last one in `X-Forwarded-For`. Only behind a proxy of yours that sets it."),

    // Work on issues.
    setting("worker.listen", "127.0.0.1:0", Kind::Listen,
        "Where `worker` answers for health and metrics; port 0 is any free one."),
    setting("worker.concurrency", "64", Kind::Count { min: 1, max: 10_000 },
        "Issues that one process handles at once."),
    setting("worker.claim", "60s", Kind::Time { min: seconds(1), max: seconds(86_400) },
        "How long a claim lives without a sign of life; renewed every quarter of it."),
    setting("worker.deadline", "15m", Kind::Time { min: seconds(1), max: seconds(86_400) },
        "How long one run of a handler may take."),
    setting("worker.attempts", "5", Kind::Count { min: 1, max: 1000 },
        "Failed runs after which an operator is needed. A model that is busy or away, or a database that does not answer, is waited for, and costs none."),
    setting("worker.drain", "25s", Kind::Time { min: Duration::ZERO, max: seconds(3600) },
        "How long a stop waits for what is under way; the rest is given back."),
    setting("issue.quiet", "800ms", Kind::Time { min: Duration::ZERO, max: seconds(3600) },
        "A run waits until no event of its issue has come for this long."),
    setting("issue.max_wait", "5s", Kind::Time { min: Duration::ZERO, max: seconds(86_400) },
        "But no event waits for quiet longer than this."),
    setting("issue.events_max", "200", Kind::Count { min: 1, max: 1000 },
        "Events in one run; the rest comes with the next."),
    setting("sweep.every", "5s", Kind::Time { min: Duration::from_millis(100), max: seconds(3600) },
        "How often to look for work that nobody was told of."),

    setting("outbox.attempts", "50", Kind::Count { min: 1, max: 10_000 },
        "Failed deliveries of one reply after which an operator is needed; 50 take several hours."),

    // Webhooks.
    setting("webhook.tolerance", "5m", Kind::Time { min: seconds(1), max: seconds(86_400) },
        "How old, or how far ahead, the time of a signed webhook may be."),

    // The desk.
    setting("model.url", "scripted:", Kind::ModelUrl,
        "The language model: `scripted:` in this process, or any chat endpoint that speaks like OpenAI's, such as `https://HOST/v1`."),
    setting("model.name", "", Kind::Text,
        "Which model of that service."),
    setting("model.key", "", Kind::Secret,
        "The key for that service."),
    setting("model.timeout", "2m", Kind::Time { min: seconds(1), max: seconds(3600) },
        "How long one answer of the model may take, repeated questions included."),
    setting("model.idle_timeout", "30s", Kind::Time { min: Duration::from_millis(100), max: seconds(3600) },
        "How long the model may say nothing."),
    setting("model.output_tokens_max", "1024", Kind::Count { min: 16, max: 1_000_000 },
        "Tokens of one answer."),
    setting("model.price_in", "0", Kind::Price,
        "What a million tokens of prompts cost; reports show the cost in the same currency."),
    setting("model.price_out", "0", Kind::Price,
        "What a million tokens of answers cost."),
    setting("desk.issue_tokens_max", "200000", Kind::Count { min: 0, max: 1_000_000_000_000 },
        "Tokens that one issue may cost; then a person takes over."),
    setting("desk.day_tokens_max", "5000000", Kind::Count { min: 0, max: 1_000_000_000_000 },
        "Tokens that all issues may cost per day (UTC); then they wait for the next. The scripted model costs none."),
    setting("desk.supersede_max", "5", Kind::Count { min: 0, max: 1000 },
        "How often in a row newer events may end a run of the desk before its answer."),
    setting("desk.search", "own", Kind::Choice(&["own", "all"]),
        "Whose earlier tickets the model may search: those of the same user, or all."),
    setting("desk.reclaim_idle", "5m", Kind::Time { min: Duration::from_millis(100), max: seconds(86_400) },
        "After how long an entry of `ticket_events` is taken over from a program that read it and shows no sign of life."),

    // What is told to operators.
    setting("audit.rows_max", "100000", Kind::Count { min: 100, max: 10_000_000 },
        "Entries of the audit log that are kept; older ones are removed."),
    setting("log.format", "auto", Kind::Choice(&["auto", "text", "json"]),
        "How logs look: text on a terminal and JSON otherwise, or always one of them."),
    setting("log.level", "info", Kind::Filter,
        "What is logged: a level, or rules such as `info,headwater_issue=debug`."),
    setting("otlp.url", "", Kind::WebUrl,
        "Where traces go: the address of an OpenTelemetry collector (OTLP over HTTP)."),
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
    fn every_setting_has_names_of_its_own_and_a_default_that_is_allowed() {
        let mut names = HashSet::new();
        for setting in TABLE {
            assert!(names.insert(setting.flag()), "{} stands twice", setting.name);
            assert!(setting.name.split('.').count() == 2, "{} has one section", setting.name);
            assert!(setting.meaning.ends_with('.'), "{} has a sentence", setting.name);
            if !setting.default.is_empty() {
                let checked = setting.kind.check(setting.default);
                assert!(checked.is_ok(), "{}: {checked:?}", setting.name);
            }
        }
    }

    #[test]
    fn one_name_is_spelled_in_three_ways() {
        let setting = find("http.body_bytes_max").expect("it is in the table");
        assert_eq!(setting.flag(), "http-body-bytes-max");
        assert_eq!(setting.variable(), "HEADWATER_HTTP_BODY_BYTES_MAX");
    }
}
