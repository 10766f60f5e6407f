//! The whole pipeline under faults: every confirmed event is answered exactly once, by event id.
//!
//! Two servers and two workers on PostgreSQL and Redis, both behind proxies; a model that acknowledges the ids of the
//! events in its prompt; a GitHub that stores comments, and a callback receiver. Processes are killed and stopped,
//! Redis is flushed, both databases are killed, connections are cut and stalled, single `BEGIN`s and `COMMIT`s are
//! delayed.
//!
//! `cargo xtask chaos` runs a long version; `HEADWATER_FAULTS` and `HEADWATER_WEBHOOKS` set its length.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use futures_util::StreamExt;
use headwater_stream::clock::{Clock, SystemClock};
use headwater_testkit::{ChaosCounts, Port, Postgres, Proxy, Redis, TestRandom, chaos_is_over};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::support::sender::{
    SECRET, STANDARD_SECRET, github_comment, github_to, now, standard_to,
};
use crate::support::{Server, ServerDir};

/// Issues per integration; events are distributed over them.
const ISSUES: u64 = 40;

/// How long the pipeline may take to become idle after the last fault: claims and deliveries of dead processes have to
/// expire.
const IDLE_TIMEOUT: Duration = Duration::from_secs(240);

/// More than all runs use.
const TOKENS_MAX: &str = "1000000000";

fn amount(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// The fake model and the receivers of replies.
#[derive(Clone, Default)]
struct ExternalServices {
    /// Comments by issue.
    comments: Arc<Mutex<BTreeMap<String, Vec<String>>>>,
    /// Callbacks by idempotency key.
    callbacks: Arc<Mutex<BTreeMap<String, String>>>,
    /// Every reply as it was received, for the report of a doubled one.
    received: Arc<Mutex<Vec<String>>>,
    /// Whether some responses are lost after their effect.
    lose_responses: Arc<AtomicBool>,
    requests: Arc<Mutex<u64>>,
}

impl ExternalServices {
    async fn start() -> Result<(Self, String)> {
        let services = Self::default();
        let router = Router::new()
            .route("/v1/chat/completions", post(complete))
            .route("/repositories/{id}/issues/{number}/comments", post(comment).get(comments))
            .route(
                "/user",
                axum::routing::get(async || Json(json!({"login": "shop-bot", "id": 7}))),
            )
            .route("/callback", post(callback))
            .with_state(services.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((services, format!("http://{address}")))
    }

    /// Loses one response in twenty, if enabled.
    async fn respond(&self) -> StatusCode {
        let is_lost = {
            let mut requests = self.requests.lock().expect("no panic");
            *requests += 1;
            requests.is_multiple_of(20) && self.lose_responses.load(Ordering::SeqCst)
        };
        if is_lost { StatusCode::BAD_GATEWAY } else { StatusCode::CREATED }
    }

    fn record(&self, what: &str, idempotency_key: &str, text: &str) {
        let time = SystemClock.now().to_rfc3339();
        let line = format!("{time} {what} {idempotency_key}: {text}");
        self.received.lock().expect("no panic").push(line);
    }

    /// The replies that acknowledged an event, in the order of their arrival, duplicates included.
    fn replies_to(&self, event: &str) -> Vec<String> {
        let received = self.received.lock().expect("no panic");
        received.iter().filter(|line| event_ids(line).contains(event)).cloned().collect()
    }

    /// How often each event was acknowledged, in distinct comments and callbacks.
    fn acknowledged(&self) -> BTreeMap<String, u64> {
        let comments = self.comments.lock().expect("no panic");
        let callbacks = self.callbacks.lock().expect("no panic");
        let texts = comments.values().flatten().chain(callbacks.values());
        let mut counts = BTreeMap::new();
        for event in texts.flat_map(|text| event_ids(text)) {
            *counts.entry(event).or_default() += 1;
        }
        counts
    }
}

/// The distinct ids such as `ev-17` in a text.
fn event_ids(text: &str) -> BTreeSet<String> {
    let ids = text.match_indices("ev-").map(|(at, _)| {
        let digits = text[at + 3..].chars().take_while(char::is_ascii_digit);
        format!("ev-{}", digits.collect::<String>())
    });
    ids.collect()
}

/// Acknowledges the pending events of the prompt.
async fn complete(Json(request): Json<Value>) -> Json<Value> {
    let messages = request["messages"].as_array().into_iter().flatten();
    let texts = messages.filter_map(|message| message["content"].as_str());
    let pending =
        texts.flat_map(str::lines).filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let pending = pending.filter(|line| line["pending"] == true);
    let ids: BTreeSet<String> =
        pending.flat_map(|line| event_ids(&line["text"].to_string())).collect();
    let content = format!("ACK {}", ids.into_iter().collect::<Vec<_>>().join(" "));
    Json(json!({
        "choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    }))
}

async fn comment(
    State(services): State<ExternalServices>,
    Path((_, number)): Path<(String, String)>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> (StatusCode, Json<Value>) {
    let text = body["body"].as_str().unwrap_or_default().to_owned();
    services.record(&format!("comment on {number}"), idempotency_key(&headers), &text);
    services.comments.lock().expect("no panic").entry(number).or_default().push(text);
    (services.respond().await, Json(json!({"id": 1})))
}

async fn comments(
    State(services): State<ExternalServices>,
    Path((_, number)): Path<(String, String)>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Json<Value> {
    let number_of =
        |name, default| query.get(name).and_then(|text| text.parse().ok()).unwrap_or(default);
    let (page, per_page): (usize, usize) = (number_of("page", 1), number_of("per_page", 30));
    let comments = services.comments.lock().expect("no panic");
    let bodies = comments.get(&number).into_iter().flatten();
    let bodies = bodies.skip((page - 1) * per_page).take(per_page);
    let user = json!({"login": "shop-bot", "id": 7});
    Json(bodies.map(|body| json!({"id": 1, "body": body, "user": user})).collect())
}

fn idempotency_key(headers: &HeaderMap) -> &str {
    headers.get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default()
}

async fn callback(
    State(services): State<ExternalServices>,
    headers: HeaderMap,
    body: String,
) -> StatusCode {
    let key = idempotency_key(&headers);
    let body: Value = serde_json::from_str(&body).unwrap_or_default();
    let content = body["data"]["content"].as_str().unwrap_or_default().to_owned();
    services.record("callback", key, &content);
    services.callbacks.lock().expect("no panic").insert(key.to_owned(), content);
    services.respond().await
}

/// The processes and services under test.
struct Pipeline {
    postgres: Postgres,
    redis: Redis,
    to_postgres: Proxy,
    to_redis: Proxy,
    /// Two servers, then two workers.
    processes: Vec<Process>,
    /// How long a process may be stopped, in milliseconds.
    stop: Range<u64>,
}

/// How long connections are stalled, in milliseconds; also longer than the call deadline of 10 s.
const STALL: Range<u64> = 200..4_000;
const LONG_STALL: Range<u64> = 9_000..12_000;

struct Process {
    place: ServerDir,
    arguments: Vec<String>,
    server: Server,
}

impl Process {
    fn start(place: ServerDir, arguments: Vec<String>) -> Result<Self> {
        let server = place.start_soon(&as_str(&arguments))?;
        Ok(Self { place, arguments, server })
    }

    /// Kills the process, if it runs, and starts it again.
    fn restart(&mut self) -> Result<()> {
        self.server.kill9()?;
        self.server = self.place.start_soon(&as_str(&self.arguments))?;
        Ok(())
    }
}

fn as_str(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

impl Pipeline {
    /// Injects one fault. Stalls end before this returns; a stopped process continues by itself later.
    async fn fault(&mut self, random: &mut TestRandom) -> Result<String> {
        let process = usize::try_from(random.between(0..4))?;
        let stall = if random.between(0..8) == 0 { LONG_STALL } else { STALL };
        let pause = Duration::from_millis(random.between(stall));
        let name = match random.between(0..12) {
            0 | 1 => {
                self.processes[process].restart()?;
                format!("kill -9 of process {process}")
            }
            2 | 3 => {
                let stop = Duration::from_millis(random.between(self.stop.clone()));
                let server = &self.processes[process].server;
                server.signal(Signal::STOP)?;
                let pid = Pid::from_raw(i32::try_from(server.pid())?);
                tokio::spawn(async move {
                    tokio::time::sleep(stop).await;
                    // It may have been killed in the meantime.
                    pid.map(|pid| kill_process(pid, Signal::CONT))
                });
                format!("process {process} stopped for {stop:?}")
            }
            4 => {
                self.redis.command(&["FLUSHALL"])?.ok()?;
                "FLUSHALL".to_owned()
            }
            5 => {
                self.redis.kill9()?;
                self.redis.restart()?;
                "kill -9 of Redis".to_owned()
            }
            6 => {
                self.postgres.kill9()?;
                self.postgres.restart()?;
                "kill -9 of PostgreSQL".to_owned()
            }
            7 => {
                self.to_postgres.cut_once()?;
                self.to_redis.cut_once()?;
                "all connections cut".to_owned()
            }
            8 => {
                self.to_postgres.stall()?;
                tokio::time::sleep(pause).await;
                self.to_postgres.heal()?;
                format!("PostgreSQL stalled for {pause:?}")
            }
            9 => {
                self.to_redis.stall()?;
                tokio::time::sleep(pause).await;
                self.to_redis.heal()?;
                format!("Redis stalled for {pause:?}")
            }
            other => {
                let statement = if other == 10 { "BEGIN" } else { "COMMIT" };
                self.to_postgres.hold(statement, 20, Duration::from_millis(10_400))?;
                tokio::time::sleep(pause).await;
                self.to_postgres.heal()?;
                format!("one {statement} in 20 held back")
            }
        };
        Ok(name)
    }

    /// Remaining work according to SQL: issues that are not idle, undelivered rows, and quarantined issues.
    async fn remaining(&self, connection: &mut PgConnection) -> Result<(i64, i64, i64)> {
        Ok(sqlx::query_as(
            "SELECT (SELECT count(*) FROM issues WHERE processing_status != 'idle'),
                 (SELECT count(*) FROM outbox WHERE status != 'delivered'),
                 (SELECT count(*) FROM issues WHERE quarantined_at IS NOT NULL)",
        )
        .fetch_one(connection)
        .await?)
    }

    /// Why work remains: issues that are not idle, without their events.
    async fn unfinished(&self, connection: &mut PgConnection) -> Result<Vec<String>> {
        let rows =
            "SELECT to_jsonb(i)::text FROM issues i WHERE processing_status != 'idle' ORDER BY id";
        Ok(sqlx::query_scalar(rows).fetch_all(connection).await?)
    }

    /// The replies to an event according to SQL.
    async fn reply_rows(&self, connection: &mut PgConnection, event: &str) -> Result<Vec<String>> {
        let rows = "SELECT to_jsonb(o)::text FROM outbox o WHERE o.kind = 'reply' AND o.payload::text ~ $1 ORDER BY o.id";
        let word = format!("{event}[^0-9]");
        Ok(sqlx::query_scalar(rows).bind(word).fetch_all(connection).await?)
    }
}

/// Sends one event until a server confirms it, like a provider.
async fn deliver(client: &reqwest::Client, servers: &[String], number: u64) {
    let (issue, id) = (number % ISSUES, format!("ev-{number}"));
    let comment = github_comment(issue, "ann", &id).to_string();
    let event = json!({"type": "note", "issue": issue.to_string(), "text": id}).to_string();
    for attempt in 0.. {
        let url = &servers[usize::try_from(number + attempt).unwrap_or_default() % servers.len()];
        let request = match number % 2 {
            0 => github_to(client, url, "issue_comment", &id, comment.as_bytes()),
            _ => standard_to(client, url, &id, now(), event.as_bytes()),
        };
        match request.send().await {
            Ok(answer) if answer.status() == StatusCode::OK => return,
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_confirmed_event_is_answered_exactly_once_despite_faults() -> Result<()> {
    let mut random = TestRandom::for_test();
    let faults = amount("HEADWATER_FAULTS", 6);
    let webhooks = amount("HEADWATER_WEBHOOKS", 20 * faults);
    let stop = if faults > 50 { 5_000..70_000 } else { 500..15_000 };
    let (services, url) = ExternalServices::start().await?;
    let (postgres, redis) = (Postgres::start()?, Redis::start()?);
    let database = postgres.database()?;
    let (to_postgres, to_redis) = (Proxy::start(postgres.addr())?, Proxy::start(redis.addr())?);
    let settings = format!(
        "[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\nbase_url = \"{url}\"\n\
         reply_token_env = \"SHOP_TOKEN\"\nbot_login = \"shop-bot\"\n\
         [[integration]]\nid = \"anybody\"\nprovider = \"standard\"\nsecret = \"{STANDARD_SECRET}\"\nbase_url = \"{url}/callback\"\n"
    );
    let ports = [Port::for_server()?, Port::for_server()?];
    let (database_url, stream_url) =
        (database.url_at(to_postgres.addr()), redis.url_at(to_redis.addr()));
    let model = format!("{url}/v1");
    // The crash limit is high, because workers are killed often.
    let common = [
        "--database-url",
        &database_url,
        "--stream-url",
        &stream_url,
        "--model-url",
        &model,
        "--model-name",
        "m",
        "--worker-claim",
        "10s",
        "--worker-attempts",
        "1000",
        // One author sends half of all events: in a long run, more than an author may use in a day.
        "--desk-user-tokens-max",
        TOKENS_MAX,
        "--desk-strangers-tokens-max",
        TOKENS_MAX,
        "--desk-day-tokens-max",
        TOKENS_MAX,
        "--sweep-every",
        "1s",
        "--issue-quiet",
        "50ms",
        "--http-rate-per-second",
        "1000000",
        "--http-rate-burst",
        "1000000",
    ];
    let mut processes = Vec::new();
    for index in 0..4 {
        let place = ServerDir::new()?.settings(&settings)?.variable("SHOP_TOKEN", "a token");
        let role = match ports.get(index) {
            Some(port) => {
                vec!["serve".to_owned(), "--http-listen".to_owned(), port.address().to_string()]
            }
            None => vec!["worker".to_owned()],
        };
        let arguments = role.into_iter().chain(common.map(str::to_owned)).collect();
        processes.push(Process::start(place, arguments)?);
    }
    let mut pipeline = Pipeline { postgres, redis, to_postgres, to_redis, processes, stop };
    services.lose_responses.store(true, Ordering::SeqCst);

    // Send webhooks and inject faults concurrently.
    let servers = ports.each_ref().map(|port| format!("http://{}", port.address()));
    let client = reqwest::Client::builder().timeout(Duration::from_secs(15)).no_proxy().build()?;
    let (sent, released) = (Arc::new(AtomicU64::new(0)), Arc::new(Semaphore::new(0)));
    let releasing = Arc::clone(&released);
    let counting = Arc::clone(&sent);
    let sending = tokio::spawn(async move {
        let deliveries = (0..webhooks).map(|number| {
            let (client, servers, sent) = (client.clone(), servers.clone(), Arc::clone(&counting));
            let released = Arc::clone(&releasing);
            async move {
                released.acquire().await.expect("never closed").forget();
                deliver(&client, &servers, number).await;
                sent.fetch_add(1, Ordering::SeqCst);
            }
        });
        futures_util::stream::iter(deliveries).buffer_unordered(8).collect::<Vec<_>>().await;
    });
    for number in 0..faults {
        if chaos_is_over() {
            // All events are sent.
            released.add_permits(usize::try_from(webhooks)?);
            break;
        }
        // Release some events for each fault, at a random time.
        released.add_permits(usize::try_from(webhooks.div_ceil(faults))?);
        tokio::time::sleep(Duration::from_millis(random.between(0..600))).await;
        let fault = pipeline.fault(&mut random).await?;
        let time = SystemClock.now().to_rfc3339();
        println!("{time} fault {number}: {fault}; {} sent", sent.load(Ordering::SeqCst));
    }
    pipeline.to_postgres.heal()?;
    pipeline.to_redis.heal()?;
    services.lose_responses.store(false, Ordering::SeqCst);
    for process in &mut pipeline.processes {
        if process.server.has_ended() {
            println!("process exited by itself: {}", process.server.log());
            process.restart()?;
        }
    }
    sending.await?;

    // Wait until the pipeline is idle.
    let mut connection = PgConnection::connect(&database.url()).await?;
    let deadline = Instant::now() + IDLE_TIMEOUT;
    loop {
        let remaining = pipeline.remaining(&mut connection).await?;
        if remaining == (0, 0, 0) {
            break;
        }
        if Instant::now() >= deadline {
            let unfinished = pipeline.unfinished(&mut connection).await?;
            println!("issues that are not idle: {unfinished:#?}");
            for (index, process) in pipeline.processes.iter().enumerate() {
                println!("log of process {index}: {}", process.server.log());
            }
            bail!("(not idle, not delivered, quarantined) = {remaining:?}");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let acknowledged = services.acknowledged();
    let (mut lost, mut doubled) = (Vec::new(), Vec::new());
    for event in (0..webhooks).map(|number| format!("ev-{number}")) {
        match acknowledged.get(&event) {
            None => lost.push(event),
            Some(1) => {}
            Some(count) => doubled.push((event, count)),
        }
    }
    println!(
        "{webhooks} webhooks, {faults} faults: {} lost, {} doubled",
        lost.len(),
        doubled.len()
    );
    let counts = ChaosCounts {
        sent: webhooks,
        handled: webhooks - lost.len() as u64,
        doubled: doubled.iter().map(|(_, count)| **count - 1).sum(),
        ..Default::default()
    };
    counts.report("pipeline of webhooks")?;
    for (event, _) in &doubled {
        println!("replies to {event}: {:#?}", services.replies_to(event));
        println!("rows of {event}: {:#?}", pipeline.reply_rows(&mut connection, event).await?);
    }
    assert!(lost.is_empty() && doubled.is_empty(), "lost {lost:?}, doubled {doubled:?}");
    Ok(())
}

/// No process is killed, and all settings are defaults: a connection whose `BEGIN` timed out must not confirm.
#[tokio::test(flavor = "multi_thread")]
async fn webhooks_confirmed_while_begins_stall_are_in_the_database() -> Result<()> {
    // `cargo xtask chaos` stalls one in 100 for a minute; a short run stalls more of them.
    let seconds = amount("HEADWATER_STALL_SECONDS", 15);
    let one_in = if seconds >= 60 { 100 } else { 10 };
    let (services, url) = ExternalServices::start().await?;
    let postgres = Postgres::shared()?;
    let database = postgres.database()?;
    let proxy = Proxy::start(postgres.addr())?;
    let settings = format!(
        "[[integration]]\nid = \"anybody\"\nprovider = \"standard\"\nsecret = \"{STANDARD_SECRET}\"\nbase_url = \"{url}/callback\"\n"
    );
    let place = ServerDir::new()?.settings(&settings)?;
    let (proxy_url, model) = (database.url_at(proxy.addr()), format!("{url}/v1"));
    let mut server =
        place.serve(&["--database-url", &proxy_url, "--model-url", &model, "--model-name", "m"])?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    proxy.hold("BEGIN", one_in, Duration::from_millis(10_400))?;

    let (base, client) = (server.url(""), server.client.clone());
    let (until, confirmed) =
        (Instant::now() + Duration::from_secs(seconds), Mutex::new(Vec::new()));
    let sender = |lane: u64| {
        let (base, client, confirmed) = (&base, &client, &confirmed);
        async move {
            for round in 0.. {
                if Instant::now() > until {
                    return;
                }
                let number = lane + 16 * round;
                let id = format!("ev-{number}");
                let event =
                    json!({"type": "note", "issue": (number % ISSUES).to_string(), "text": id});
                let event = event.to_string();
                let request = standard_to(client, base, &id, now(), event.as_bytes());
                if let Ok((200, body)) = crate::support::sender::send(request).await {
                    confirmed.lock().expect("no panic").push(body["event_log_id"].as_i64());
                }
            }
        }
    };
    futures_util::future::join_all((0..16).map(sender)).await;
    let held = proxy.held();
    proxy.heal()?;
    // Uncommitted transactions end with their connections.
    server.kill9()?;
    let confirmed: BTreeSet<Option<i64>> = confirmed.into_inner()?.into_iter().collect();
    let mut connection = PgConnection::connect(&database.url()).await?;
    let stored: Vec<i64> =
        sqlx::query_scalar("SELECT id FROM event_logs").fetch_all(&mut connection).await?;
    let stored: BTreeSet<Option<i64>> = stored.into_iter().map(Some).collect();
    let lost: Vec<_> = confirmed.difference(&stored).collect();
    println!("{} confirmed, {held} stalled, {} lost", confirmed.len(), lost.len());
    assert!(lost.is_empty(), "{lost:?}");
    assert!(confirmed.len() > 100 && held > 0, "{} confirmed, {held} stalled", confirmed.len());
    assert!(services.acknowledged().values().all(|count| *count == 1), "an answer was doubled");
    Ok(())
}
