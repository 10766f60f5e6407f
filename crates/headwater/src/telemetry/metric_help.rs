//! The meaning of every metric, as `/metrics` shows it in its HELP lines.
//!
//! Upstream: `telemetry` installs it with the recorder. Guarantees: a test compares it with the tables of
//! `docs/operations.md`, which another test compares with the code.

use metrics::{describe_counter, describe_gauge, describe_histogram};

/// Name and meaning of every metric.
const METRICS: &[(&str, &str)] = &[
    (
        "headwater_events_recorded_total",
        "events offered to the inbox, and messages of tickets, by `result`: `recorded`, `duplicate`, `refused`, `error`",
    ),
    (
        "headwater_confirmed_events_checked_total",
        "confirmed events that were read back on another connection",
    ),
    (
        "headwater_confirmed_events_missing_total",
        "confirmed events that were missing when they were read back: they are lost",
    ),
    (
        "headwater_database_connections_in_transaction_total",
        "connections to PostgreSQL that were found inside an open transaction and closed",
    ),
    (
        "headwater_database_idle_in_transaction_timeouts_total",
        "sessions that PostgreSQL terminated because they were idle in a transaction",
    ),
    ("headwater_issues_queued_total", "issues that became `queued` by an event"),
    (
        "headwater_issues_processed_total",
        "completed runs, by `result`: `done`, `failed`, `put_off` (deferred, no attempt counted), `quarantined`, `fenced`, `superseded`, `given_back`",
    ),
    ("headwater_issues_processing_duration_seconds", "time from claim to the end of a run"),
    ("headwater_events_per_issue_batch", "events per run (a count)"),
    ("headwater_issues", "current issues, by `status`: `queued`, `processing`, `quarantined`"),
    (
        "headwater_issues_oldest_wait_seconds",
        "longest time that a queued issue has waited, of the first 10,000 queued ones (a gauge)",
    ),
    ("headwater_redis_pending_messages", "nudges delivered and not acknowledged"),
    ("headwater_nudges_total", "nudges, by `result`: `sent`, or `lost`, which the sweep repeats"),
    (
        "headwater_nudges_without_run_total",
        "nudges without a run, by `result`: `idle`, `taken`, `waiting`, `quarantined`, `missing`, `malformed`, `error`",
    ),
    (
        "headwater_sweep_nudges_total",
        "nudges of the sweep, by `result`: `stream`, `direct` (added to the local queue)",
    ),
    ("headwater_sweep_requeued_total", "issues requeued because their claim expired"),
    ("headwater_sweep_quarantined_total", "issues quarantined because too many claims expired"),
    (
        "headwater_outbox_deliveries_total",
        "deliveries of replies and events, by `kind` and `result`: `delivered`, `retry`, `away` (target unavailable), `dead`, `released`, `fenced`, `unsettled`",
    ),
    ("headwater_outbox_lag_seconds", "age of the oldest undelivered row (a gauge)"),
    ("headwater_outbox_rows", "rows, by `status`: `pending`, `dead`"),
    ("headwater_http_requests_total", "requests, by `route`, `method`, `status`"),
    ("headwater_http_duration_seconds", "time until the response started"),
    (
        "headwater_http_connections_over_limit_total",
        "connections over a limit, by `result`: `replaced` an idle one, `reserved` for `/health/`, `closed`",
    ),
    ("headwater_webhooks_total", "webhooks, by `provider` and `result`"),
    (
        "headwater_model_failures_total",
        "failed model calls, by `model` and `fault`: `ours` (settings, key), `theirs` (the service), `content` (the text of one issue)",
    ),
    (
        "headwater_model_available",
        "1 while a model endpoint is called, 0 while its calls fail and only single ones test it, by `model`",
    ),
    (
        "headwater_model_fallbacks_total",
        "runs that went on with another model because the one before failed, by `integration` and `model`, the one that answered",
    ),
    (
        "headwater_model_runs_total",
        "runs that called the model, by `integration`, `model` and `result`: `done`, `handed_over`, `failed`, `superseded`",
    ),
    (
        "headwater_model_tokens_total",
        "tokens of the model, by `integration`, `model` and `direction`: `in`, `out`",
    ),
    (
        "headwater_model_cost",
        "cost of the model since the process started, in the currency of `model.price_in`, by `integration` and `model`; only with prices",
    ),
    (
        "headwater_tool_calls_total",
        "tool calls, by `tool` and `result`: `ok`, `failed` (not carried out), `unknown` (no outcome), `planned` (waits for an approval), `invalid` (arguments), `known` (made before), `stopped` (not made, because the tool fails)",
    ),
    (
        "headwater_prompt_read_failures_total",
        "failed reads of the active prompts; runs use the last known ones",
    ),
    (
        "headwater_token_budget_used",
        "tokens of the day used and reserved, by `integration`, as of the last model call of this process",
    ),
    (
        "headwater_token_budget_max",
        "`desk.day_tokens_max`, by `integration`, as of the last model call of this process",
    ),
    (
        "headwater_tickets_handed_over",
        "open tickets that are handed over to a person, by `assigned`: `true`, `false`",
    ),
    ("headwater_ticket_entries_total", "consumed entries of `ticket_events`, by `result`"),
    (
        "headwater_notifications_total",
        "ticket events for receivers of `[[notification]]`, by `notification` and `result`: `delivered`, `retried`, `dead`, `skipped`, `waiting` (for the stream backend or the database, to know whether the ticket was erased)",
    ),
    ("headwater_produced_total", "messages sent, by `result`"),
    ("headwater_consumed_total", "messages processed, by `result`"),
    ("headwater_acks_total", "messages settled"),
    ("headwater_retries_total", "failed messages that are retried"),
    (
        "headwater_dead_letters_total",
        "messages that became dead letters, by `result`, the cause: `attempts`, `crashes`, `handler`, `malformed`, `missing`",
    ),
    ("headwater_queue_anomalies_total", "detected and repaired anomalies"),
    (
        "headwater_handler_timeouts_total",
        "handlers that exceeded `handler_timeout`, by `result`: `dropped`, or `late` if they blocked their thread",
    ),
    ("headwater_topic_length", "messages of a partition"),
    ("headwater_pending", "messages delivered and not settled"),
    ("headwater_inflight", "messages in flight in this process"),
    ("headwater_partitions_owned", "partitions that this process owns"),
    ("headwater_handle_latency_seconds", "time in the handler"),
    ("headwater_ack_latency_seconds", "time of settling"),
    ("headwater_end_to_end_latency_seconds", "time from sending to the end of processing"),
    (
        "headwater_redis_connects_total",
        "attempts to connect, by `result`: `ok`, `failed`. A process that is connected makes a few; a rising rate means reconnects",
    ),
    (
        "headwater_redis_disconnects_total",
        "shared connections that were lost, or closed because the server did not answer in time",
    ),
    (
        "headwater_redis_retries_total",
        "calls that were sent again, by `result`: `unreachable` (no connection, or a lost reply of an idempotent call), `refused` (loading, busy, fail-over)",
    ),
    ("headwater_redis_redirects_total", "redirections by a cluster, by `result`: `moved`, `ask`"),
    (
        "headwater_redis_requests_in_flight",
        "requests without a reply on the shared connections of this process",
    ),
    ("headwater_bus_publish_total", "published events"),
    ("headwater_bus_publish_errors_total", "events that could not be published"),
    ("headwater_bus_publish_latency_seconds", "time until an event is stored"),
    ("headwater_bus_consume_total", "events passed to handlers"),
    ("headwater_bus_consume_errors_total", "events whose handler failed"),
    ("headwater_bus_consume_latency_seconds", "time in a handler"),
    ("headwater_bus_pending", "events delivered and not settled"),
    (
        "headwater_bus_live_missed_total",
        "how often live subscriptions lagged so far that they may have missed events",
    ),
    ("headwater_bus_parked_total", "entries of unknown types, parked for an operator"),
    ("headwater_bus_breaker_opened_total", "how often the circuit breaker opened"),
    ("headwater_bus_spooled", "events in the local spool of a program that uses one"),
    ("headwater_bus_replayed_total", "events published from the local spool"),
    ("headwater_bus_sessions_recovered_total", "recovered sessions"),
    ("headwater_bus_session_recovery_seconds", "time of a recovery of a session"),
    ("headwater_bus_session_snapshots_total", "stored snapshots"),
    ("headwater_bus_session_entries_compacted_total", "entries replaced by snapshots"),
    ("headwater_bus_sessions_expired_total", "expired sessions"),
    ("headwater_bus_sessions_filled_total", "completed forks and imports"),
    ("headwater_bus_main_loop_requests_total", "completed requests"),
    ("headwater_bus_main_loop_request_seconds", "duration of requests"),
    ("headwater_bus_main_loop_running", "requests in progress in this process"),
    ("headwater_bus_main_loop_retries_total", "retried requests"),
    ("headwater_bus_main_loop_given_back_total", "released requests"),
    (
        "headwater_bus_main_loop_repeated_total",
        "repeated deliveries of requests that already had a reply",
    ),
    ("headwater_bus_main_loop_submitted_total", "submitted requests"),
    ("headwater_bus_main_loop_submit_seconds", "time until the reply of a submitted request"),
    ("headwater_bus_main_loop_swept_total", "removed expired replies"),
    ("headwater_assignment_owned", "streams owned by this process"),
    (
        "headwater_assignment_blocked",
        "streams that cannot be assigned because the key of their lease holds a value of another type; the log names the key: delete it",
    ),
    ("headwater_assignment_claims_total", "attempts to take over a stream"),
    ("headwater_assignment_locks_acquired_total", "leases acquired"),
    ("headwater_assignment_locks_extended_total", "leases renewed"),
    ("headwater_assignment_locks_released_total", "leases released"),
    ("headwater_assignment_locks_lost_total", "leases lost"),
    ("headwater_assignment_processing_started_total", "started processing of streams"),
    ("headwater_assignment_processing_ended_total", "ended processing of streams"),
    ("headwater_assignment_processing_seconds", "duration of the processing"),
    ("headwater_assignment_notifications_total", "sent notifications"),
    (
        "headwater_assignment_notifications_dropped_total",
        "notifications dropped because no consumer read them",
    ),
    ("headwater_assignment_hints_total", "lease events of the backend"),
    ("headwater_assignment_heartbeat_seconds", "time to renew all leases of a process"),
    ("headwater_assignment_heartbeats_failed_total", "failed renewals of leases"),
    ("headwater_assignment_startup_recovered_total", "unowned streams found at startup"),
    ("headwater_assignment_quarantined_total", "quarantined streams"),
    ("headwater_assignment_malformed_total", "malformed entries"),
    (
        "headwater_history_rows_total",
        "minutes of the history of metrics, by `result`: `written`, or `dropped` after an hour without the database",
    ),
    ("headwater_analytics_rows_total", "rows stored, by `table`"),
    ("headwater_analytics_seen_before_total", "redelivered entries that were already stored"),
    ("headwater_analytics_commit_latency_seconds", "time of DuckDB transactions"),
    ("headwater_analytics_commit_errors_total", "failed DuckDB transactions"),
];

/// Gauges whose names end like those of histograms.
const GAUGES: [&str; 2] = ["headwater_outbox_lag_seconds", "headwater_issues_oldest_wait_seconds"];

/// Describes every metric to the recorder.
pub(super) fn describe() {
    for (name, meaning) in METRICS {
        if name.ends_with("_total") {
            describe_counter!(*name, *meaning);
        } else if (name.ends_with("_seconds") || name.ends_with("_batch")) && !GAUGES.contains(name)
        {
            describe_histogram!(*name, *meaning);
        } else {
            describe_gauge!(*name, *meaning);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_of_the_documentation_say_the_same() {
        let path = headwater_testkit::package_folder().join("../../docs/operations.md");
        let document = std::fs::read_to_string(path).unwrap();
        let rows = document.lines().filter_map(|line| {
            let (name, meaning) =
                line.strip_prefix("| `")?.strip_suffix(" |")?.split_once("` | ")?;
            name.starts_with("headwater_").then(|| (name.to_owned(), meaning.to_owned()))
        });
        let documented: Vec<_> = rows.collect();
        let described: Vec<_> =
            METRICS.iter().map(|(name, meaning)| (name.to_string(), meaning.to_string())).collect();
        assert_eq!(documented, described);
    }
}
