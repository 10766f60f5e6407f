//! What the help of each command shows beside its own options: examples, and the settings that matter to it.
//!
//! Upstream: `args.rs`. Guarantees: every command has an entry with an example that parses (tested); `-h` shows only the
//! settings of the entry, `--help` all.

/// Heading of options that every command has.
pub(super) const GLOBAL: &str = "Global options";

const NOTHING: &[&str] = &[];
const STREAMS: &[&str] = &["stream.url"];
const LOOP_WORKER: &[&str] = &["stream.url", "bus.request_attempts", "bus.retry_backoff"];
const DATABASE: &[&str] = &["database.url"];
const BOTH: &[&str] = &["stream.url", "database.url"];
const SERVE: &[&str] = &["stream.url", "database.url", "http.listen", "model.url", "log.level"];
const WORKER: &[&str] =
    &["stream.url", "database.url", "worker.listen", "worker.concurrency", "log.level"];
const ANALYTICS: &[&str] = &["analytics.path"];
const REBUILD: &[&str] = &["database.url", "analytics.path"];

/// The help of one command.
pub(super) struct VerbHelp {
    /// The command with its subcommand, such as `topic create`.
    pub(super) verb: &'static str,
    /// Settings that `-h` shows.
    pub(super) settings: &'static [&'static str],
    /// Command lines, without `headwater`.
    pub(super) examples: &'static [&'static str],
}

const fn verb(
    verb: &'static str,
    settings: &'static [&'static str],
    examples: &'static [&'static str],
) -> VerbHelp {
    VerbHelp { verb, settings, examples }
}

/// Every command.
#[rustfmt::skip]
pub(super) const VERBS: &[VerbHelp] = &[
    verb("serve", SERVE, &["serve --demo", "serve --http-listen 127.0.0.1:8080 --stream-url redis://127.0.0.1:6379 --database-url postgres://user@host/name"]),
    verb("worker", WORKER, &["worker --stream-url redis://127.0.0.1:6379 --database-url postgres://user@host/name"]),
    verb("config", NOTHING, &["config", "config --json"]),
    verb("status", BOTH, &["status", "status --url http://127.0.0.1:8080"]),
    verb("overview", BOTH, &["overview", "overview --url http://127.0.0.1:8080"]),
    verb("search", BOTH, &["search router", "search 1700000000000-0"]),
    verb("failure list", BOTH, &["failure list"]),
    verb("failure show", BOTH, &["failure show 3f2a51c09d7e8b64"]),
    verb("process list", DATABASE, &["process list"]),
    verb("process settings", NOTHING, &["process settings --url http://127.0.0.1:8080"]),
    verb("me", DATABASE, &["me --url http://127.0.0.1:8080"]),
    verb("topic create", STREAMS, &["topic create orders --partitions 4 --retention-age 7d --byte-budget 1GB"]),
    verb("topic list", STREAMS, &["topic list", "topic list --all", "topic list --rates --url http://127.0.0.1:8080"]),
    verb("topic describe", STREAMS, &["topic describe orders"]),
    verb("topic alter", STREAMS, &["topic alter orders --retention-age 14d --byte-budget none"]),
    verb("topic grow", STREAMS, &["topic grow orders --partitions 8", "topic grow orders --partitions 8 --dry-run"]),
    verb("topic trim", STREAMS, &["topic trim orders --age 24h", "topic trim orders --count 1000 --dry-run"]),
    verb("topic delete", STREAMS, &["topic delete orders"]),
    verb("produce", STREAMS, &["produce orders --key ada --payload espresso", "produce images --payload-file photo.jpg"]),
    verb("consume", STREAMS, &["consume orders --group baristas --count 10", "consume orders --group baristas --exec 'make-drink'"]),
    verb("tail", STREAMS, &["tail orders --from 5m"]),
    verb("message list", STREAMS, &["message list orders --key ada", "message list orders --from 1h --text espresso"]),
    verb("message delayed", STREAMS, &["message delayed orders"]),
    verb("message show", STREAMS, &["message show orders 1700000000000-0"]),
    verb("message why", STREAMS, &["message why orders 1700000000000-0"]),
    verb("group list", STREAMS, &["group list orders"]),
    verb("group describe", STREAMS, &["group describe orders baristas"]),
    verb("group why", STREAMS, &["group why orders baristas"]),
    verb("group owners", STREAMS, &["group owners", "group owners orders"]),
    verb("group moves", NOTHING, &["group moves --url http://127.0.0.1:8080", "group moves orders --group baristas --url http://127.0.0.1:8080"]),
    verb("group delete", STREAMS, &["group delete orders baristas"]),
    verb("group reset", STREAMS, &["group reset orders baristas --to 1h --dry-run"]),
    verb("pending", STREAMS, &["pending orders --group baristas --min-idle 5m"]),
    verb("dlq list", STREAMS, &["dlq list orders --from 1d --reason timeout"]),
    verb("dlq show", STREAMS, &["dlq show orders 1700000000000-0"]),
    verb("dlq replay", STREAMS, &["dlq replay orders --all --dry-run", "dlq replay orders 1700000000000-0", "dlq replay orders 1700000000000-0 --payload '{\"size\": 2}'"]),
    verb("dlq purge", STREAMS, &["dlq purge orders --reason timeout --dry-run"]),
    verb("plan create", BOTH, &["plan create orders --reason timeout --dry-run", "plan create --failure 3f2a51c09d7e8b64 --wait"]),
    verb("plan list", DATABASE, &["plan list", "plan list --state running"]),
    verb("plan show", DATABASE, &["plan show 3", "plan show 3 --wait"]),
    verb("plan pause", DATABASE, &["plan pause 3"]),
    verb("plan resume", DATABASE, &["plan resume 3"]),
    verb("plan cancel", DATABASE, &["plan cancel 3"]),
    verb("assign add", STREAMS, &["assign add encoder video-17 --info '{\"codec\": \"av1\"}'"]),
    verb("assign list", STREAMS, &["assign list encoder"]),
    verb("assign describe", STREAMS, &["assign describe encoder", "assign describe encoder video-17"]),
    verb("assign release", STREAMS, &["assign release encoder video-17"]),
    verb("assign run", STREAMS, &["assign run encoder --exec 'encode \"$HEADWATER_STREAM\"'"]),
    verb("loop worker", LOOP_WORKER, &["loop worker agents --exec ./answer"]),
    verb("loop submit", STREAMS, &["loop submit agents --request '{\"question\": \"Why?\"}'"]),
    verb("issue list", DATABASE, &["issue list --status quarantined", "issue list --error timeout"]),
    verb("issue show", DATABASE, &["issue show 7", "issue show 7 --newest-first"]),
    verb("issue event", DATABASE, &["issue event 12", "issue event 12 --original"]),
    verb("issue why", DATABASE, &["issue why 7"]),
    verb("issue timeline", DATABASE, &["issue timeline 7", "issue timeline 7 --json"]),
    verb("issue retry", BOTH, &["issue retry 7", "issue retry --all --waiting"]),
    verb("issue release", BOTH, &["issue release 7", "issue release --all"]),
    verb("ticket new", BOTH, &["ticket new --title 'Wi-Fi' --content 'It is slow.' --user ada"]),
    verb("ticket list", DATABASE, &["ticket list --status open --user ada", "ticket list --handed-over --unassigned"]),
    verb("ticket show", DATABASE, &["ticket show 6f1c1a35"]),
    verb("ticket follow", BOTH, &["ticket follow 6f1c1a35", "ticket follow 6f1c1a35 --json --count 2"]),
    verb("ticket why", DATABASE, &["ticket why 6f1c1a35"]),
    verb("ticket reply", BOTH, &["ticket reply 6f1c1a35 --content 'We look into it.'"]),
    verb("ticket take", DATABASE, &["ticket take 6f1c1a35"]),
    verb("ticket assign", DATABASE, &["ticket assign 6f1c1a35 --to grace", "ticket assign 6f1c1a35 --nobody"]),
    verb("ticket close", BOTH, &["ticket close 6f1c1a35"]),
    verb("ticket reopen", BOTH, &["ticket reopen 6f1c1a35"]),
    verb("draft list", DATABASE, &["draft list", "draft list --status all --issue 7"]),
    verb("draft show", DATABASE, &["draft show 3"]),
    verb("draft link", DATABASE, &["draft link 3"]),
    verb("draft approve", DATABASE, &["draft approve 3", "draft approve 3 --content 'It arrives today.'"]),
    verb("draft edit", DATABASE, &["draft edit 3 --content 'It arrives today.'"]),
    verb("draft reject", DATABASE, &["draft reject 3 --reason 'The order number is wrong.'"]),
    verb("effect list", DATABASE, &["effect list", "effect list --status unknown"]),
    verb("effect show", DATABASE, &["effect show 3"]),
    verb("prompt list", DATABASE, &["prompt list", "prompt list shop"]),
    verb("prompt show", DATABASE, &["prompt show shop", "prompt show shop --version 0"]),
    verb("prompt set", DATABASE, &["prompt set shop --file prompt.txt --comment 'Mention the opening hours'"]),
    verb("prompt diff", DATABASE, &["prompt diff shop", "prompt diff shop --from 0 --to 3"]),
    verb("prompt rollback", DATABASE, &["prompt rollback shop", "prompt rollback shop --to 0"]),
    verb("session list", BOTH, &["session list"]),
    verb("session show", BOTH, &["session show issue-7-run-1"]),
    verb("session replay", BOTH, &["session replay issue-7-run-1"]),
    verb("session diff", BOTH, &["session diff experiment", "session diff issue-7-run-1 experiment"]),
    verb("session fork", BOTH, &["session fork issue-7-run-1 experiment --until 1700000000000-0"]),
    verb("session export", BOTH, &["session export issue-7-run-1 --output run.jsonl"]),
    verb("session import", BOTH, &["session import copy --input run.jsonl"]),
    verb("export", BOTH, &["export --user ada --output ada.jsonl"]),
    verb("erase", BOTH, &["erase --user ada"]),
    verb("outbox list", DATABASE, &["outbox list", "outbox list --status pending", "outbox list --issue 7"]),
    verb("outbox show", DATABASE, &["outbox show 12"]),
    verb("outbox why", DATABASE, &["outbox why 12"]),
    verb("outbox retry", DATABASE, &["outbox retry 12", "outbox retry --all"]),
    verb("webhook list", NOTHING, &["webhook list --url http://127.0.0.1:8080"]),
    verb("webhook rejected", NOTHING, &["webhook rejected --url http://127.0.0.1:8080"]),
    verb("audit books", DATABASE, &["audit books", "audit books --after 100000"]),
    verb("audit log", DATABASE, &["audit log --limit 20"]),
    verb("history", DATABASE, &["history --series events,runs,run_p95_ms", "history --from 2d --step 1h", "history --topic orders --url http://127.0.0.1:8080"]),
    verb("top", BOTH, &["top", "top orders --every 5s"]),
    verb("sql", ANALYTICS, &["sql 'SELECT count(*) FROM ticket_events'"]),
    verb("report", ANALYTICS, &["report list", "report tickets-per-day --format csv"]),
    verb("analytics rebuild", REBUILD, &["analytics rebuild"]),
    verb("bench", BOTH, &["bench produce --count 10000 --partitions 4"]),
    verb("doctor", BOTH, &["doctor", "doctor --consistency --url http://127.0.0.1:8080"]),
    verb("migrate", DATABASE, &["migrate --dry-run", "migrate --adopt --dry-run --integration 1=shop/app"]),
    verb("completion", NOTHING, &["completion bash > ~/.local/share/bash-completion/completions/headwater"]),
];

/// Commands that have no server to ask, with the connection options that they do not have.
const WITHOUT_SERVER: &[(&str, &[&str])] = &[
    ("serve", &["url", "json", "wide"]),
    ("worker", &["url", "json", "wide"]),
    ("config", &["url", "wide"]),
    ("bench", &["url"]),
    ("migrate", &["url", "json", "wide"]),
    ("completion", &["url", "json", "wide"]),
];

/// Connection options that a command does not have.
pub(super) fn missing_options(verb: &str) -> &'static [&'static str] {
    WITHOUT_SERVER.iter().find(|(name, _)| *name == verb).map_or(&[], |(_, options)| options)
}

/// The examples of a command as a section of its help.
pub(super) fn examples(verb: &VerbHelp) -> String {
    let title = if verb.examples.len() == 1 { "Example:" } else { "Examples:" };
    let lines = verb.examples.iter().map(|example| format!("\n  headwater {example}"));
    format!("{title}{}", lines.collect::<String>())
}
