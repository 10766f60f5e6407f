//! Old events and issues are deleted, and what is pending is not.

mod support;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Database, Postgres, Redis};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, Row};

use crate::support::desk::{all_idle, answered, open};
use crate::support::sender::{github, github_issues, integrations, send};
use crate::support::{LIMIT, Server, ServerDir};

/// The database of a test, for statements by hand.
enum Sql {
    Postgres(Database),
    Sqlite(String),
}

impl Sql {
    fn url(&self) -> String {
        match self {
            Self::Postgres(database) => database.url(),
            Self::Sqlite(url) => url.clone(),
        }
    }

    /// Executes a statement; `OLD` is a time 400 days ago, `LATER` is tomorrow.
    async fn run(&self, sql: &str) -> Result<Vec<String>> {
        match self {
            Self::Postgres(database) => {
                let sql = sql.replace("OLD", "now() - interval '400 days'");
                let rows = database.query(&sql.replace("LATER", "now() + interval '1 day'"))?;
                Ok(rows.lines().map(str::to_owned).collect())
            }
            Self::Sqlite(url) => {
                let sql = sql.replace("OLD", "(unixepoch() - 400 * 86400) * 1000");
                let sql = sql.replace("LATER", "(unixepoch() + 86400) * 1000");
                let mut connection = sqlx::SqliteConnection::connect(url).await?;
                let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&mut connection).await?;
                rows.iter().map(|row| Ok(row.try_get::<i64, _>(0)?.to_string())).collect()
            }
        }
    }

    async fn count(&self, sql: &str) -> Result<u64> {
        Ok(self.run(&format!("SELECT count(*) FROM {sql}")).await?[0].parse()?)
    }
}

/// An answered ticket: its id and that of its issue.
async fn ticket(server: &Server, content: &str) -> Result<(String, i64)> {
    let created = open(server, content).await?;
    let ticket = created["ticket_id"].as_str().context("a ticket")?.to_owned();
    answered(server, &ticket, 1).await?;
    Ok((ticket, created["issue_id"].as_i64().context("an issue")?))
}

async fn webhook(server: &Server, delivery: &str) -> Result<i64> {
    let body = github_issues("opened", 7, "Where is it?").to_string();
    let (status, answer) = send(github(server, "issues", delivery, body.as_bytes())).await?;
    ensure!(status == 200, "{status} {answer}");
    let path = format!("/api/v1/issues/{}", answer["issue_id"]);
    server.until(&path, |_, issue| issue["pending_events"] == 0).await?;
    answer["issue_id"].as_i64().context("an issue")
}

async fn old_data_is_deleted(sql: Sql, dir: ServerDir) -> Result<()> {
    let url = sql.url();
    let base = ["--database-url", &url, "--issue-quiet", "10ms", "--sweep-every", "200ms"];
    let mut server = dir.serve(&base)?;
    let closed = ticket(&server, "closed").await?;
    let still_open = ticket(&server, "open").await?;
    let quarantined = ticket(&server, "quarantined").await?;
    let undelivered = ticket(&server, "undelivered").await?;
    let foreign = webhook(&server, "first").await?;
    for (id, _) in [&closed, &quarantined, &undelivered] {
        let path = format!("/api/v1/tickets/{id}/close");
        ensure!(server.post(&path, &json!({})).await?.0 == 200);
    }
    all_idle(&server).await?;
    all_delivered(&sql, &server).await?;
    ensure!(server.stop()?.success(), "{}", server.log());

    sql.run("UPDATE issues SET updated_at = OLD").await?;
    sql.run("UPDATE event_logs SET created_at = OLD, processed_at = OLD").await?;
    let (issue, of) = (quarantined.1, undelivered.1);
    sql.run(&format!("UPDATE issues SET quarantined_at = OLD WHERE id = {issue}")).await?;
    sql.run(&format!(
        "UPDATE event_logs SET processed_at = NULL WHERE id = (SELECT max(id) FROM event_logs WHERE issue_id = {issue})"
    ))
    .await?;
    sql.run(&format!("UPDATE issues SET pending_events = 1 WHERE id = {issue}")).await?;
    sql.run(&format!(
        "UPDATE outbox SET status = 'pending', due_at = LATER WHERE id = (SELECT max(id) FROM outbox WHERE issue_id = {of})"
    ))
    .await?;
    let day = "INSERT INTO desk_usage (scope, tokens) VALUES ";
    sql.run(&format!(
        "{day} ('day:000001:desk', 1), ('day:999999:desk', 1), ('issue:{}', 1)",
        closed.1
    ))
    .await?;

    let server = dir.serve(&[&base[..], &["--retention-every", "200ms"]].concat())?;
    server.wait_for_log("deleted after their retention")?;
    for gone in [closed.1, foreign] {
        server.until(&format!("/api/v1/issues/{gone}"), |status, _| status == 404).await?;
        for table in ["event_logs", "outbox", "tickets"] {
            assert_eq!(sql.count(&format!("{table} WHERE issue_id = {gone}")).await?, 0, "{table}");
        }
    }
    assert_eq!(server.get(&format!("/api/v1/tickets/{}", closed.0)).await?.0, 404);
    let messages = format!("ticket_messages WHERE ticket_id = '{}'", closed.0);
    assert_eq!(sql.count(&messages).await?, 0);
    assert_eq!(sql.count("desk_usage").await?, 1, "the day that is not over");

    // Open tickets stay, without their events.
    let (status, shown) = server.get(&format!("/api/v1/tickets/{}", still_open.0)).await?;
    assert_eq!((status, shown["messages"].as_array().map(Vec::len)), (200, Some(2)), "{shown}");
    let logs = |issue: i64| format!("event_logs WHERE issue_id = {issue}");
    assert_eq!(sql.count(&logs(still_open.1)).await?, 0);
    // What is pending stays.
    assert_eq!(sql.count(&logs(quarantined.1)).await?, 1);
    for kept in [quarantined.1, undelivered.1] {
        assert_eq!(server.get(&format!("/api/v1/issues/{kept}")).await?.0, 200);
    }

    // An event of a deleted issue makes a new one.
    assert_ne!(webhook(&server, "second").await?, foreign);
    let (status, doctor) = server.get("/api/v1/doctor").await?;
    let findings = doctor["findings"].as_array().context("findings")?;
    let of = |subject: &str| findings.iter().find(|finding| finding["subject"] == subject);
    assert_eq!(status, 200);
    assert_eq!(of("retention").map(|finding| &finding["severity"]), Some(&json!("ok")), "{doctor}");
    Ok(())
}

#[tokio::test]
async fn old_data_is_deleted_from_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    old_data_is_deleted(Sql::Postgres(database), ServerDir::new()?.settings(&integrations())?).await
}

#[tokio::test]
async fn old_data_is_deleted_from_sqlite() -> Result<()> {
    let dir = ServerDir::new()?.settings(&integrations())?;
    let url = format!("sqlite:{}", dir.file("issues.db"));
    old_data_is_deleted(Sql::Sqlite(url), dir).await
}

#[tokio::test]
async fn doctor_warns_about_tables_without_a_retention() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--retention-events", "0ms", "--retention-issues", "0ms"])?;
    let (_, doctor) = server.get("/api/v1/doctor").await?;
    let mut findings = doctor["findings"].as_array().into_iter().flatten();
    let retention: &Value =
        findings.find(|finding| finding["subject"] == "retention").context("a finding")?;
    assert_eq!(retention["severity"], "warning", "{retention}");
    assert!(retention["found"].as_str().is_some_and(|found| found.contains("`event_logs`")));
    Ok(())
}

/// Rows that one transaction may delete.
const BATCH: u64 = 500;

#[tokio::test]
async fn an_issue_with_many_events_is_deleted_in_small_transactions() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let sql = Sql::Postgres(database);
    let dir = ServerDir::new()?.settings(&integrations())?;
    let url = sql.url();
    let base = ["--database-url", &url, "--issue-quiet", "10ms"];
    let mut server = dir.serve(&base)?;
    let issue = webhook(&server, "first").await?;
    all_idle(&server).await?;
    ensure!(server.stop()?.success(), "{}", server.log());
    sql.run("UPDATE outbox SET status = 'delivered', delivered_at = now()").await?;
    sql.run(&format!(
        "INSERT INTO event_logs (issue_id, integration_id, source, event_type, dedup_key, digest, payload, payload_bytes, processed_at)
         SELECT issue_id, integration_id, source, event_type, 'copy ' || n, digest, payload, payload_bytes, now()
         FROM event_logs, generate_series(1, 1700) AS n WHERE issue_id = {issue}"
    ))
    .await?;
    sql.run(&format!(
        "INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at)
         SELECT issue_id, integration_id, 'event', 'x', 'copy ' || n, '{{}}', 'delivered', now()
         FROM event_logs, generate_series(1, 1300) AS n WHERE issue_id = {issue} AND dedup_key NOT LIKE 'copy %'"
    ))
    .await?;
    sql.run(&format!(
        "INSERT INTO tickets (ticket_id, issue_id, user_id, title, status, created_at, updated_at)
         SELECT gen_random_uuid(), {issue}, 'ada', 'parcel', 'closed', now(), now()"
    ))
    .await?;
    sql.run(&format!(
        "INSERT INTO ticket_messages (message_id, ticket_id, author, content, created_at)
         SELECT gen_random_uuid(), ticket_id, 'user', 'where is it', now()
         FROM tickets, generate_series(1, 1400) WHERE issue_id = {issue}"
    ))
    .await?;
    // Of integrations and of authors.
    for kind in ["day", "user"] {
        sql.run(&format!(
            "INSERT INTO desk_usage (scope, tokens) SELECT '{kind}:000001:' || n, 1 FROM generate_series(1, 1200) AS n"
        ))
        .await?;
    }
    sql.run("INSERT INTO desk_reservations (id, issue_id, day_scope, user_scope, tokens, tokens_if_lost, expires_at, rolled_up)
         SELECT 'old ' || n, 0, 'day:000001:1', '', 1, 1, 1, true FROM generate_series(1, 1200) AS n")
        .await?;
    sql.run("INSERT INTO audit_log (id, at, caller, role, client, method, path)
         SELECT to_char(n, 'FM00000000'), OLD, 'ada', 'admin', '127.0.0.1', 'POST', '/' FROM generate_series(1, 1700) AS n")
        .await?;
    sql.run("UPDATE issues SET updated_at = OLD").await?;
    // Counts the rows that each transaction deletes.
    let Sql::Postgres(database) = &sql else { unreachable!("opened above") };
    database.query(
        "CREATE TABLE deletions (deleted_from text, transaction bigint, deleted bigint);
         CREATE FUNCTION count_deletions() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             INSERT INTO deletions SELECT TG_TABLE_NAME, txid_current(), count(*) FROM gone; RETURN NULL; END $$;
         CREATE TRIGGER count_events AFTER DELETE ON event_logs REFERENCING OLD TABLE AS gone
             FOR EACH STATEMENT EXECUTE FUNCTION count_deletions();
         CREATE TRIGGER count_outbox AFTER DELETE ON outbox REFERENCING OLD TABLE AS gone
             FOR EACH STATEMENT EXECUTE FUNCTION count_deletions();
         CREATE TRIGGER count_messages AFTER DELETE ON ticket_messages REFERENCING OLD TABLE AS gone
             FOR EACH STATEMENT EXECUTE FUNCTION count_deletions();
         CREATE TRIGGER count_usage AFTER DELETE ON desk_usage REFERENCING OLD TABLE AS gone
             FOR EACH STATEMENT EXECUTE FUNCTION count_deletions();
         CREATE TRIGGER count_reservations AFTER DELETE ON desk_reservations REFERENCING OLD TABLE AS gone
             FOR EACH STATEMENT EXECUTE FUNCTION count_deletions();
         CREATE TRIGGER count_entries AFTER DELETE ON audit_log REFERENCING OLD TABLE AS gone
             FOR EACH STATEMENT EXECUTE FUNCTION count_deletions();",
    )?;

    let keep_events = ["--retention-events", "0ms", "--retention-every", "200ms"];
    let keep_entries = ["--audit-rows-max", "100"];
    let server = dir.serve(&[&base[..], &keep_events, &keep_entries].concat())?;
    server.until(&format!("/api/v1/issues/{issue}"), |status, _| status == 404).await?;
    let deadline = Instant::now() + LIMIT;
    for old in
        ["desk_usage WHERE scope LIKE '%:000001:%'", "desk_reservations WHERE id LIKE 'old %'"]
    {
        while sql.count(old).await? > 0 {
            ensure!(Instant::now() < deadline, "rows are left: {old} {}", server.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    let deleted = [
        ("event_logs", 1700),
        ("outbox", 1300),
        ("ticket_messages", 1400),
        ("desk_usage", 2400),
        ("desk_reservations", 1200),
        ("audit_log", 1600),
    ];
    for (table, rows) in deleted {
        let of = format!("deletions WHERE deleted_from = '{table}'");
        let sum = sql.run(&format!("SELECT sum(deleted) FROM {of}")).await?[0].parse::<u64>()?;
        assert!(sum >= rows, "{table}: {sum}");
        let largest = format!(
            "SELECT max(n) FROM (SELECT sum(deleted) AS n FROM {of} GROUP BY transaction) AS each"
        );
        let largest = sql.run(&largest).await?[0].parse::<u64>()?;
        assert!(largest <= BATCH, "{largest} rows of {table} in one transaction");
    }
    Ok(())
}

/// The report of tokens reads the sums of past days, and only the runs of the last ones.
async fn past_model_runs_are_summed_up(sql: Sql, dir: ServerDir) -> Result<()> {
    const DAY_MS: u128 = 24 * 60 * 60 * 1000;
    let url = sql.url();
    let mut server = dir.serve(&["--database-url", &url])?;
    // Ten runs on each of the last five days, by two models.
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    sql.run(&format!(
        "INSERT INTO model_runs (id, at, issue_id, integration, model, result, calls, tokens_in, tokens_out, cost_micros)
         WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < 49)
         SELECT 'run-' || n, {now_ms} - (n % 5) * {DAY_MS}, 1, 'desk', CASE WHEN n % 2 = 0 THEN 'large' ELSE 'small' END,
             CASE WHEN n % 7 = 0 THEN 'failed' ELSE 'done' END, 1, n, 2 * n, CASE WHEN n % 2 = 0 THEN 1000000 ELSE NULL END
         FROM numbers"
    ))
    .await?;
    let report = async |server: &Server| -> Result<Value> {
        let (status, table) = server.get("/api/v1/reports/tokens-and-cost").await?;
        ensure!(status == 200, "{status} {table}");
        Ok(table["rows"].clone())
    };
    let sum = |rows: &Value, column: usize| -> f64 {
        rows.as_array().into_iter().flatten().filter_map(|row| row[column].as_f64()).sum()
    };
    let before = report(&server).await?;
    let sums: Vec<f64> = (3..8).map(|column| sum(&before, column)).collect();
    assert_eq!(sums, [50.0, 8.0, 1225.0, 2450.0, 25.0], "{before}");
    assert_eq!(before.as_array().map(Vec::len), Some(10), "{before}");
    ensure!(server.stop()?.success(), "{}", server.log());

    let server = dir.serve(&["--database-url", &url, "--retention-every", "200ms"])?;
    let deadline = Instant::now() + LIMIT;
    while sql.count("model_run_days").await? < 6 {
        ensure!(Instant::now() < deadline, "not summed up: {}", server.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(report(&server).await?, before);
    // What is summed up is not read any more, and is not summed up again.
    let summed_up = (now_ms / DAY_MS - 1) * DAY_MS;
    sql.run(&format!("DELETE FROM model_runs WHERE at < {summed_up}")).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(report(&server).await?, before);
    Ok(())
}

#[tokio::test]
async fn past_model_runs_are_summed_up_in_postgres() -> Result<()> {
    past_model_runs_are_summed_up(Sql::Postgres(Postgres::shared()?.database()?), ServerDir::new()?)
        .await
}

#[tokio::test]
async fn past_model_runs_are_summed_up_in_sqlite() -> Result<()> {
    let dir = ServerDir::new()?;
    let url = format!("sqlite:{}", dir.file("issues.db"));
    past_model_runs_are_summed_up(Sql::Sqlite(url), dir).await
}

/// Waits until nothing is to be delivered.
async fn all_delivered(sql: &Sql, server: &Server) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while sql.count("outbox WHERE status IN ('waiting', 'pending', 'taken')").await? > 0 {
        ensure!(Instant::now() < deadline, "undelivered events: {}", server.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test]
async fn delivered_replies_are_kept_as_long_as_the_setting_says() -> Result<()> {
    let dir = ServerDir::new()?;
    let url = format!("sqlite:{}", dir.file("issues.db"));
    let sql = Sql::Sqlite(url.clone());
    let base = ["--database-url", &url, "--issue-quiet", "10ms", "--sweep-every", "200ms"];
    let mut server = dir.serve(&base)?;
    let (old, new) = (ticket(&server, "old").await?.1, ticket(&server, "new").await?.1);
    all_idle(&server).await?;
    all_delivered(&sql, &server).await?;
    ensure!(server.stop()?.success(), "{}", server.log());
    let of = |issue: i64| format!("outbox WHERE status = 'delivered' AND issue_id = {issue}");
    let kept = sql.count(&of(new)).await?;
    assert!(sql.count(&of(old)).await? > 0 && kept > 0);
    for (issue, hours) in [(old, 3), (new, 1)] {
        let at = format!("(unixepoch() - {hours} * 3600) * 1000");
        sql.run(&format!(
            "UPDATE outbox SET delivered_at = {at} WHERE status = 'delivered' AND issue_id = {issue}"
        ))
        .await?;
    }

    let server = dir.serve(&[&base[..], &["--retention-outbox", "2h"]].concat())?;
    let deadline = Instant::now() + LIMIT;
    while sql.count(&of(old)).await? > 0 {
        ensure!(Instant::now() < deadline, "delivered rows are left: {}", server.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(sql.count(&of(new)).await?, kept);
    assert_eq!(
        server.get(&format!("/api/v1/issues/{old}")).await?.0,
        200,
        "only its rows are gone"
    );
    Ok(())
}

async fn sessions_are_kept_as_long_as_the_setting_says(stream_url: &str) -> Result<()> {
    let dir = ServerDir::new()?;
    let to = ["--stream-url", stream_url, "--retention-sessions", "2h", "--issue-quiet", "10ms"];
    let server = dir.serve(&to)?;
    ticket(&server, "hello").await?;
    let has_session =
        |_, page: &Value| page["sessions"].as_array().is_some_and(|it| !it.is_empty());
    server.until("/api/v1/sessions", has_session).await?;
    let (_, page) = server.get("/api/v1/sessions").await?;
    assert_eq!(page["sessions"][0]["ttl_ms"], 2 * 60 * 60 * 1000, "{page}");
    Ok(())
}

#[tokio::test]
async fn embedded_sessions_are_kept_as_long_as_the_setting_says() -> Result<()> {
    sessions_are_kept_as_long_as_the_setting_says("embedded:streams").await
}

#[tokio::test]
async fn sessions_in_redis_are_kept_as_long_as_the_setting_says() -> Result<()> {
    let redis = Redis::start()?;
    sessions_are_kept_as_long_as_the_setting_says(&redis.url()).await
}
