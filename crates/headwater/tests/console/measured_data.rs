//! What the measures of the console are taken on: servers with much data, and the screens that show it.
//!
//! Upstream: `measures`. Guarantees: what the API can make is made through it; the rest, such as quarantined issues, is written to the
//! tables with statements that both databases understand.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt};
use headwater_testkit::{Database, Postgres, Redis};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, SqliteConnection};

use crate::support::{LIMIT, Server, ServerDir, text};

/// How much data there is, and how often something is measured.
pub(crate) struct Amounts {
    pub(crate) issues: usize,
    pub(crate) messages: usize,
    pub(crate) letters: usize,
    pub(crate) tickets: usize,
    /// Quarantined issues, and issues that wait for their time.
    pub(crate) stuck: usize,
    /// Times that each screen is read, and that one without a limit is read.
    pub(crate) rounds: usize,
    pub(crate) unlimited_rounds: usize,
    /// Times that a page is painted, and that a change is awaited.
    pub(crate) pages: usize,
    /// Tickets answered in one round of the comparison with viewers, and runs in one round of the one with `issue_runs`.
    pub(crate) answers: usize,
    pub(crate) runs: usize,
    /// Rounds of each comparison.
    pub(crate) comparisons: usize,
    /// Whether this is the amount of data that the measures are about.
    pub(crate) is_full: bool,
}

impl Amounts {
    pub(crate) fn chosen() -> Self {
        match std::env::var("HEADWATER_MEASURES").as_deref() {
            Ok("full") => Self {
                issues: 100_000,
                messages: 1_000_000,
                letters: 100_000,
                tickets: 500,
                stuck: 100,
                rounds: 40,
                unlimited_rounds: 5,
                pages: 20,
                answers: 3000,
                runs: 30_000,
                comparisons: 9,
                is_full: true,
            },
            _ => Self {
                issues: 600,
                messages: 2000,
                letters: 600,
                tickets: 20,
                stuck: 100,
                rounds: 3,
                unlimited_rounds: 1,
                pages: 3,
                answers: 40,
                runs: 600,
                comparisons: 3,
                is_full: false,
            },
        }
    }
}

/// Minutes of the history of another process: the longest range of the overview.
const HISTORY_MINUTES: u32 = 2880;

/// The database of a server that is measured.
pub(crate) enum MeasuredDatabase {
    Sqlite(PathBuf),
    Postgres(Database),
}

impl MeasuredDatabase {
    /// The database file of a directory.
    pub(crate) fn sqlite(dir: &ServerDir) -> Self {
        Self::Sqlite(dir.path().join("headwater.db"))
    }

    /// The value of `--database-url`, in the directory of the server.
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Sqlite(_) => "sqlite:headwater.db".to_owned(),
            Self::Postgres(database) => database.url(),
        }
    }

    async fn connection(file: &Path) -> Result<SqliteConnection> {
        Ok(SqliteConnection::connect(&format!("sqlite:{}", file.display())).await?)
    }

    /// Runs statements. `{now}` and `{later}` are times, `{now_ms}` is a number of milliseconds.
    pub(crate) async fn execute(&self, sql: &str) -> Result<()> {
        let with_times = |[now, later, now_ms]: [&str; 3]| {
            sql.replace("{now}", now).replace("{later}", later).replace("{now_ms}", now_ms)
        };
        match self {
            Self::Sqlite(file) => {
                let now = "(unixepoch() * 1000)";
                let sql = with_times([now, "(unixepoch() * 1000 + 86400000)", now]);
                let mut connection = Self::connection(file).await?;
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await?;
                Ok(connection.close().await?)
            }
            Self::Postgres(database) => {
                let later = "(now() + interval '1 day')";
                let now_ms = "(extract(epoch FROM now())::bigint * 1000)";
                database.query(&with_times(["now()", later, now_ms])).map(drop)
            }
        }
    }

    /// Rows of `issue_runs`.
    pub(crate) async fn runs(&self) -> Result<i64> {
        let count = "SELECT count(*) FROM issue_runs";
        match self {
            Self::Sqlite(file) => {
                let mut connection = Self::connection(file).await?;
                let runs = sqlx::query_scalar(count).fetch_one(&mut connection).await?;
                connection.close().await?;
                Ok(runs)
            }
            Self::Postgres(database) => Ok(database.query(count)?.parse()?),
        }
    }
}

/// A server with all the data.
pub(crate) struct MeasuredServer {
    pub(crate) server: Server,
    _servers: Option<(Redis, Postgres)>,
    _database: MeasuredDatabase,
    _dir: ServerDir,
}

impl MeasuredServer {
    /// On SQLite and embedded streams.
    pub(crate) async fn on_sqlite(amounts: &Amounts) -> Result<Self> {
        let dir = measured_dir()?;
        let database = MeasuredDatabase::sqlite(&dir);
        let url = database.url();
        // The streams of the issues are not those of the server.
        let arguments = ["--stream-url", "embedded:memory", "--database-url", &url];
        bench(&dir, "claim", amounts.issues, &arguments)?;
        Self::start(dir, database, None, &["--database-url", &url], amounts).await
    }

    /// On PostgreSQL and Redis.
    pub(crate) async fn on_postgres(amounts: &Amounts) -> Result<Self> {
        let (redis, postgres) = (Redis::start()?, Postgres::start()?);
        let database = MeasuredDatabase::Postgres(postgres.database()?);
        let dir = measured_dir()?;
        let (stream_url, url) = (redis.url(), database.url());
        migrate(&dir, &url)?;
        let arguments = ["--stream-url", &stream_url, "--database-url", &url];
        bench(&dir, "claim", amounts.issues, &arguments)?;
        Self::start(dir, database, Some((redis, postgres)), &arguments, amounts).await
    }

    async fn start(
        dir: ServerDir,
        database: MeasuredDatabase,
        servers: Option<(Redis, Postgres)>,
        arguments: &[&str],
        amounts: &Amounts,
    ) -> Result<Self> {
        let quick = ["--issue-quiet", "0s", "--issue-max-wait", "0s"];
        // One client makes all dead letters, and reads every screen.
        let unlimited = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
        let server = dir.serve(&[&quick[..], &unlimited, arguments].concat())?;
        // Issues with one event each, as `headwater bench` left them.
        let (first, last) = (amounts.stuck, 2 * amounts.stuck);
        let stuck = format!(
            "UPDATE issues SET quarantined_at = {{now}}, last_error = 'payment ' || id || ' refused by the bank' WHERE id <= {first};
             UPDATE event_logs SET processed_at = NULL WHERE issue_id > {first} AND issue_id <= {last};
             UPDATE issues SET processing_status = 'queued', pending_events = 1, first_pending_at = {{now}}, not_before = {{later}}
             WHERE id > {first} AND id <= {last};
             INSERT INTO replay_plans (state, active, selection, progress, created_by, created_at, changed_at)
             VALUES ('paused', 1, '{{\"topics\": [{{\"topic\": \"orders\", \"to\": \"9-0\"}}], \"max_replays\": 3}}',
                 '{{\"total\": 4, \"step\": 1, \"step_size\": 4}}', 'ann', {{now_ms}}, {{now_ms}});
             INSERT INTO metrics_history (minute, process, data)
             WITH RECURSIVE minutes(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM minutes WHERE n < {HISTORY_MINUTES})
             SELECT {{now_ms}} / 60000 - n, 'another-process', '{{\"n\": 6, \"events\": 40, \"runs\": 30, \"queued\": 3, \"outbox_lag_ms\": 1500,
                 \"run\": [0, 0, 0, 2, 5, 1], \"started\": 1700000000000, \"version\": \"1.2.3\"}}' FROM minutes"
        );
        database.execute(&stuck).await?;
        fill(&server, amounts).await?;
        Ok(Self { server, _servers: servers, _database: database, _dir: dir })
    }
}

/// The program to measure, in a directory of its own.
pub(crate) fn measured_dir() -> Result<ServerDir> {
    let dir = ServerDir::new()?;
    Ok(match std::env::var_os("HEADWATER_MEASURE_BINARY") {
        Some(binary) => dir.program(PathBuf::from(binary)),
        None => dir,
    })
}

pub(crate) fn migrate(dir: &ServerDir, url: &str) -> Result<()> {
    let migrated = dir.run(&["migrate", "--database-url", url])?;
    ensure!(migrated.status.success(), "{}", text(&migrated.stderr));
    Ok(())
}

/// Runs `headwater bench` on these backends and returns its line.
pub(crate) fn bench(
    dir: &ServerDir,
    workload: &str,
    count: usize,
    arguments: &[&str],
) -> Result<Value> {
    let count = count.to_string();
    let output = dir.run(&[&["bench", workload, "--count", &count], arguments].concat())?;
    ensure!(output.status.success(), "{}", text(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

pub(crate) async fn ok(server: &Server, path: &str, body: &Value) -> Result<Value> {
    let (status, answer) = server.post(&format!("/api/v1{path}"), body).await?;
    ensure!((200..300).contains(&status), "{path}: {status} {answer}");
    Ok(answer)
}

/// Messages and dead letters of `orders`, streams of a service, and some tickets.
async fn fill(server: &Server, amounts: &Amounts) -> Result<()> {
    ok(server, "/topics", &json!({"name": "orders", "partitions": 4})).await?;
    let message = |n: usize| json!({"key": format!("customer-{}", n % 1000), "payload": format!("{{\"order\":{n}}}")});
    let send = async |from: usize, to: usize| {
        for start in (from..to).step_by(1000) {
            let messages: Vec<Value> = (start..to.min(start + 1000)).map(message).collect();
            ok(server, "/topics/orders/messages", &json!({"messages": messages})).await?;
        }
        anyhow::Ok(())
    };
    send(0, amounts.letters).await?;
    let (mut dead, group) = (0, "/topics/orders/groups/billing");
    while dead < amounts.letters {
        let wanted = json!({"max": 100, "wait_ms": 2000, "lease_ms": 60000});
        let pulled = ok(server, &format!("{group}/pull"), &wanted).await?;
        let messages = pulled["messages"].as_array().context("messages")?;
        let letter = |message: &Value| json!({"lease": message["lease"], "outcome": "dead_letter", "reason": format!("order {} has no address", message["id"])});
        let settlements: Vec<Value> = messages.iter().map(letter).collect();
        dead += settlements.len();
        if !settlements.is_empty() {
            let settled = json!({"settlements": settlements});
            ok(server, &format!("{group}/settle"), &settled).await?;
        }
    }
    send(amounts.letters, amounts.messages.max(amounts.letters)).await?;
    for number in 0..20 {
        let stream = json!({"stream": format!("camera-{number}")});
        ok(server, "/assignments/cameras/streams", &stream).await?;
    }
    answer_tickets(server, amounts.tickets, "Router").await.map(drop)
}

/// Opens tickets and waits until all are answered; returns the answers per second.
pub(crate) async fn answer_tickets(server: &Server, count: usize, word: &str) -> Result<f64> {
    let began = Instant::now();
    let open = |n: usize| async move {
        let new = json!({"title": format!("{word} {n} blinks red"), "content": "Since yesterday.", "user_id": "ann"});
        ok(server, "/tickets", &new).await
    };
    let opening = futures_util::stream::iter((0..count).map(open)).buffer_unordered(32);
    opening.try_for_each(|_| async { Ok(()) }).await?;
    // In this order: a queued issue becomes one that is processed, not the other way round.
    let deadline = Instant::now() + LIMIT * 5;
    for status in ["queued", "processing"] {
        let path = format!("/api/v1/issues?status={status}&integration=desk&limit=1");
        while server.get(&path).await?.1["issues"] != json!([]) {
            ensure!(Instant::now() < deadline, "issues are still {status}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

/// The value of a field of an item of a list of the API, as text.
async fn listed(
    server: &Server,
    path: &str,
    list: &str,
    index: usize,
    name: &str,
) -> Result<String> {
    let (_, page) = server.get(&format!("/api/v1{path}")).await?;
    let value = &page[list][index][name];
    ensure!(!value.is_null(), "{path} has no `{name}` at {index}: {page}");
    Ok(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// Names of the reports; none if analytics is not built in.
async fn reports(server: &Server) -> Result<Vec<String>> {
    if server.get("/api/v1/reports/tickets-per-day").await?.0 == 501 {
        return Ok(Vec::new());
    }
    // The file is opened after the start.
    server.until("/api/v1/reports/tickets-per-day", |status, _| status == 200).await?;
    let (_, page) = server.get("/api/v1/reports").await?;
    let reports = page["reports"].as_array().context("reports")?.iter();
    Ok(reports.filter_map(|report| report["name"].as_str().map(str::to_owned)).collect())
}

/// Screens whose time has a limit, with the ids that they need.
pub(crate) async fn limited_screens(server: &Server) -> Result<Vec<String>> {
    let first =
        async |path: &str, list: &str, name: &str| listed(server, path, list, 0, name).await;
    let ticket = first("/tickets", "tickets", "ticket_id").await?;
    let issue = first("/issues?limit=1", "issues", "id").await?;
    let queued = first("/issues?status=queued&limit=1", "issues", "id").await?;
    let letter = first("/topics/orders/dead-letters?limit=1", "dead_letters", "id").await?;
    let message = first("/topics/orders/messages?limit=1", "messages", "id").await?;
    let session = first("/sessions?limit=2", "sessions", "session").await?;
    let other = listed(server, "/sessions?limit=2", "sessions", 1, "session").await?;
    let step = first(&format!("/sessions/{session}/events"), "events", "id").await?;
    let cause = first("/failures", "clusters", "id").await?;
    let row = first("/outbox?limit=1", "rows", "id").await?;
    let plan = first("/plans", "plans", "id").await?;
    let mut paths: Vec<String> = [
        "/console",
        "/console?range=48h",
        "/console/tickets",
        "/console/tickets?words=blinks",
        "/console/issues",
        "/console/issues?status=queued",
        "/console/issues?quarantined=true",
        "/console/issues?newest_first=true",
        "/console/issues?error=bank",
        "/console/drafts",
        "/console/sessions",
        "/console/topics",
        "/console/topics/orders",
        "/console/topics/orders/messages",
        "/console/topics/orders/dead-letters",
        "/console/topics/orders/dead-letters?reason=no+address",
        "/console/topics/orders/groups/billing",
        "/console/assignment",
        "/console/assignment/cameras",
        "/console/tail?topic=orders",
        "/console/failures",
        "/console/plans",
        "/console/outbox",
        "/console/outbox?status=delivered",
        "/console/outbox?status=pending",
        "/console/reports",
        "/console/processes",
        "/console/webhooks",
        "/console/settings",
        "/console/audit",
        "/console/audit?path=purge",
        "/console/topics?name=ord",
        "/console/search?q=router",
        "/console/help",
    ]
    .map(str::to_owned)
    .to_vec();
    paths.extend([
        format!("/console/tickets/{ticket}"),
        format!("/console/issues/{issue}"),
        format!("/console/issues/{queued}"),
        format!("/console/topics/orders/dead-letters/{letter}"),
        format!("/console/topics/orders/messages/{message}"),
        format!("/console/search?q={message}"),
        format!("/console/sessions/{session}"),
        format!("/console/sessions/{session}/steps/{step}"),
        format!("/console/sessions/{session}/compare?with={other}"),
        format!("/console/failures/{cause}"),
        format!("/console/outbox/{row}"),
        format!("/console/plans/{plan}"),
    ]);
    paths.extend(reports(server).await?.iter().map(|name| format!("/console/reports/{name}")));
    Ok(paths)
}

/// Screens without a limit: each reads everything there is, when a person asks for it.
pub(crate) async fn unlimited_screens(server: &Server) -> Result<Vec<String>> {
    let mut paths: Vec<String> = [
        "/console/doctor",
        "/console/consistency?check=1",
        "/console/issues?error=in-no-error",
        "/console/topics/orders/messages?text=in-no-message",
        "/console/search?q=nothing",
    ]
    .map(str::to_owned)
    .to_vec();
    if !reports(server).await?.is_empty() {
        paths.push("/console/sql?query=SELECT%20count(*)%20FROM%20ticket_events".to_owned());
    }
    Ok(paths)
}
