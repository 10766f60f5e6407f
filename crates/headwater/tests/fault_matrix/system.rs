//! The processes of the fault matrix, what they depend on, and the faults of these.

use std::collections::BTreeSet;
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use headwater_testkit::Proxy;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sqlx::SqliteConnection;
use tokio::sync::watch;

use crate::Fault;
use crate::sql_database::{ADD_TRIGGERS, DISK_FULL, DISK_HAS_SPACE, SqlDatabase};
use crate::stream_servers::StreamServers;
use crate::support::sender::{STANDARD_SECRET, now, send, standard};
use crate::support::{LIMIT, Server, ServerDir, eventually, text};

const DELAY: Duration = Duration::from_millis(100);

/// Every reply that was delivered, with its idempotency key. A repeated delivery is a second entry with the same key.
type Replies = Arc<Mutex<Vec<(String, String)>>>;

/// Names of the model that the processes ask for, so that an answer tells which one asked.
const SERVER_MODEL: &str = "of-the-server";
const WORKER_MODEL: &str = "of-the-worker";

/// Whether the model and the receiver reject their callers, and whether the model answers the server.
#[derive(Default)]
struct Denials {
    model: AtomicBool,
    receiver: AtomicBool,
    answers_server: watch::Sender<bool>,
    /// Requests of the server that wait for that.
    waiting: AtomicUsize,
}

/// A model that repeats its name and the prompt, and a receiver of replies.
async fn external_services(denials: Arc<Denials>) -> (Replies, std::net::SocketAddr) {
    let replies = Replies::default();
    let kept = Arc::clone(&replies);
    let of_model = Arc::clone(&denials);
    let model = move |Json(request): Json<Value>| {
        let denials = Arc::clone(&of_model);
        async move {
            let name = request["model"].as_str().unwrap();
            if name == SERVER_MODEL {
                denials.waiting.fetch_add(1, Ordering::SeqCst);
                let mut answers = denials.answers_server.subscribe();
                answers.wait_for(|answers| *answers).await.unwrap();
            }
            if denials.model.load(Ordering::SeqCst) {
                return (
                    StatusCode::UNAUTHORIZED,
                    Json(json!({"error": {"message": "invalid key"}})),
                );
            }
            let content = format!("ACK {name} {}", request["messages"]);
            let answer = json!({
                "choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1},
            });
            (StatusCode::OK, Json(answer))
        }
    };
    let receiver = move |headers: HeaderMap, Json(body): Json<Value>| {
        let is_denied = denials.receiver.load(Ordering::SeqCst);
        if !is_denied {
            let key = headers["idempotency-key"].to_str().unwrap().to_owned();
            kept.lock().unwrap().push((key, body["data"]["content"].to_string()));
        }
        async move { if is_denied { StatusCode::UNAUTHORIZED } else { StatusCode::OK } }
    };
    let router =
        Router::new().route("/v1/chat/completions", post(model)).route("/callback", post(receiver));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    (replies, address)
}

/// All processes, and the proxies between them.
pub(crate) struct System {
    streams: StreamServers,
    sql: SqlDatabase,
    /// The transaction of another program, which keeps the SQLite file locked or its log from being reused.
    other_program: Option<SqliteConnection>,
    denials: Arc<Denials>,
    pub(crate) to_model: Proxy,
    to_receiver: Proxy,
    replies: Replies,
    dir: ServerDir,
    /// Where verbs find the streams and the database.
    arguments: Vec<String>,
    pub(crate) server: Server,
    /// `None` with the embedded log, which one process has: the server answers.
    worker: Option<Server>,
    consumer: Child,
    /// Webhooks that were sent until the server, which handles one issue at a time, had one to handle.
    occupying: usize,
}

impl Drop for System {
    fn drop(&mut self) {
        let _ = self.consumer.kill();
        let _ = self.consumer.wait();
    }
}

impl System {
    /// Starts everything; `None` if this process may not mount the disk that the fault needs.
    pub(crate) async fn start(fault: Fault) -> Option<Self> {
        let denials = Arc::<Denials>::default();
        let (replies, address) = external_services(Arc::clone(&denials)).await;
        let (to_model, to_receiver) =
            (Proxy::start(address).unwrap(), Proxy::start(address).unwrap());
        let settings = format!(
            "[[integration]]\nid = \"anybody\"\nprovider = \"standard\"\nsecret = \"{STANDARD_SECRET}\"\n\
             base_url = \"http://{}/callback\"\n",
            to_receiver.addr()
        );
        let dir = ServerDir::new().unwrap().settings(&settings).unwrap();
        let sql = SqlDatabase::start(fault, &dir)?;
        let streams = StreamServers::start(fault, &dir)?;
        let has_worker = streams.disk().is_none();
        let arguments =
            ["--stream-url", &streams.url(), "--database-url", sql.url()].map(str::to_owned);
        let model = format!("http://{}/v1", to_model.addr());
        let desk = ["--model-url", &model, "--issue-quiet", "10ms", "--sweep-every", "200ms"];
        let all: Vec<&str> = arguments.iter().map(String::as_str).chain(desk).collect();
        // It waits for its model longer than a test takes.
        let patience = ["--model-timeout", "5m", "--model-idle-timeout", "5m"];
        let of_server = ["--model-name", SERVER_MODEL, "--worker-concurrency", "1"];
        let of_server = [of_server, patience].concat();
        let of_worker = ["--model-name", WORKER_MODEL];
        let of_server = if has_worker { &of_server[..] } else { &of_worker };
        let server = dir.serve(&[&all[..], of_server].concat()).unwrap();
        let start_worker = || dir.worker(&[&all[..], &of_worker].concat()).unwrap();
        let worker = has_worker.then(start_worker);
        server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
        let topic = json!({"name": "sales", "partitions": 1});
        assert_eq!(server.post("/api/v1/topics", &topic).await.unwrap().0, 201);
        let exec = "cat >> handled; echo >> handled";
        let arguments = match has_worker {
            true => arguments.to_vec(),
            false => vec!["--url".to_owned(), server.url("")],
        };
        let to: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let verb = ["consume", "sales", "--group", "g", "--exec", exec];
        let consumer = dir.command(&[&verb[..], &to].concat()).spawn().unwrap();
        let mut system = Self {
            streams,
            sql,
            other_program: None,
            denials,
            to_model,
            to_receiver,
            replies,
            dir,
            arguments,
            server,
            worker,
            consumer,
            occupying: 0,
        };
        // The consumer owns the partition.
        assert!(system.produce("first").await);
        eventually("the first message", || system.has_handled("first")).await.unwrap();
        if system.worker.is_some() {
            system.occupy_server().await;
        }
        Some(system)
    }

    /// Sends webhooks until the server waits for the answer to one of them: all others are answered by the worker.
    async fn occupy_server(&mut self) {
        let is_waiting = |system: &Self| system.denials.waiting.load(Ordering::SeqCst) > 0;
        while !is_waiting(self) {
            let id = occupying(self.occupying);
            assert!(self.webhook(&id).await);
            self.occupying += 1;
            assert!(self.occupying < 100, "the server handles no issue");
            let is_taken = || is_waiting(self) || self.answers(&id) > 0;
            eventually("the server or the worker to take an issue", is_taken).await.unwrap();
        }
    }

    /// Whether all answers to a webhook are by the worker, and none by the server.
    pub(crate) fn is_answered_by_worker(&self, id: &str) -> bool {
        let word = format!("event-{id}");
        let replies = self.replies.lock().unwrap();
        let mut answers = replies.iter().filter(|(_, text)| text.contains(&word));
        answers.all(|(_, text)| text.contains(WORKER_MODEL))
    }

    pub(crate) fn signal_consumer(&self, signal: Signal) {
        let id = i32::try_from(self.consumer.id()).unwrap();
        kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
    }

    /// Sends a webhook; returns whether it was confirmed.
    pub(crate) async fn webhook(&self, id: &str) -> bool {
        let event = json!({"type": "note", "issue": id, "text": format!("event-{id}")}).to_string();
        match send(standard(&self.server, id, now(), event.as_bytes())).await {
            Ok((200, _)) => true,
            Ok((status, body)) => {
                assert!(status >= 500 && body["error"]["message"].is_string(), "{status} {body}");
                false
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Sends a message over the server; returns whether it was confirmed.
    pub(crate) async fn produce(&self, payload: &str) -> bool {
        let messages = json!({"messages": [{"payload": payload}]});
        let (status, body) =
            self.server.post("/api/v1/topics/sales/messages", &messages).await.unwrap();
        if status != 201 {
            assert!(status >= 500 && body["error"]["message"].is_string(), "{status} {body}");
        }
        status == 201
    }

    /// Whether there is the ticket of the verb.
    pub(crate) async fn has_ticket(&self) -> bool {
        let (_, tickets) = self.server.get("/api/v1/tickets").await.unwrap();
        tickets.to_string().contains("by the verb")
    }

    pub(crate) fn has_handled(&self, payload: &str) -> bool {
        let handled = std::fs::read_to_string(self.dir.path().join("handled")).unwrap_or_default();
        handled.lines().any(|line| line == payload)
    }

    /// How many deliveries answered a webhook, repeated ones included.
    pub(crate) fn answers(&self, id: &str) -> usize {
        let word = format!("event-{id}");
        let replies = self.replies.lock().unwrap();
        replies.iter().filter(|(_, text)| text.contains(&word)).count()
    }

    /// Runs a verb; returns whether it succeeded, otherwise it reports an unreachable server.
    pub(crate) fn verb(&self, verb: &[&str]) -> bool {
        let to: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let output = self.dir.run(&[verb, &to].concat()).unwrap();
        let error = text(&output.stderr);
        assert!(
            matches!(output.status.code(), Some(0..=3)),
            "{verb:?}: {:?} {error}",
            output.status
        );
        let causes = ["unreachable", "unavailable", "denied", "authentication failed", "full"];
        let is_explained = causes.iter().any(|cause| error.contains(cause));
        assert!(output.status.success() || is_explained, "{verb:?}: {error}");
        output.status.success()
    }

    /// Whether the events that kept the server occupied are answered.
    pub(crate) fn are_occupying_answered(&self) -> bool {
        (0..self.occupying).all(|number| self.answers(&occupying(number)) > 0)
    }

    /// Every event has one reply, which is one idempotency key. It was delivered once, or again if its confirmation may have been
    /// lost: the receiver was cut off, or the database did not store that it was delivered.
    pub(crate) fn assert_answered_once(&self, fault: Fault) {
        let may_repeat = matches!(
            fault,
            Fault::ReceiverDown
                | Fault::ReceiverStalls
                | Fault::PostgresDown
                | Fault::PostgresStalls
                | Fault::PostgresReadOnly
                | Fault::PostgresDenies
                | Fault::PostgresFull
                | Fault::PostgresWrongPassword
                | Fault::SqliteLocked
                | Fault::SqliteFull
        );
        let replies = self.replies.lock().unwrap();
        let occupying = (0..self.occupying).map(occupying);
        for id in ["before", "during", "after"].map(str::to_owned).into_iter().chain(occupying) {
            let word = format!("event-{id}");
            let keys: Vec<&String> = replies
                .iter()
                .filter(|(_, text)| text.contains(&word))
                .map(|(key, _)| key)
                .collect();
            let distinct: BTreeSet<&String> = keys.iter().copied().collect();
            assert!(distinct.len() <= 1, "{id} was answered twice: {replies:?}");
            assert!(may_repeat || keys.len() <= 1, "{id} was delivered {} times", keys.len());
        }
    }

    /// Causes the fault.
    pub(crate) async fn cause(&mut self, fault: Fault) {
        let (streams, sql) = (&self.streams, &self.sql);
        match fault {
            Fault::RedisDown | Fault::ClusterDown => {
                streams.proxies().iter().for_each(|proxy| proxy.cut().unwrap());
            }
            Fault::RedisStalls | Fault::ClusterStalls => {
                streams.proxies().iter().for_each(|proxy| proxy.stall().unwrap());
            }
            Fault::RedisSlow | Fault::ClusterSlow => {
                streams.proxies().iter().for_each(|proxy| proxy.delay(DELAY).unwrap());
            }
            Fault::RedisFull | Fault::ClusterFull => {
                streams.command(&["CONFIG", "SET", "maxmemory", "1mb"]);
            }
            // The primary does not exist.
            Fault::RedisReadOnly => streams.command(&["REPLICAOF", "127.0.0.1", "1"]),
            Fault::ClusterReadOnly => {
                streams.command(&["CONFIG", "SET", "min-replicas-to-write", "2"]);
            }
            Fault::RedisDenies | Fault::ClusterDenies | Fault::SentinelsDeny => streams.deny(),
            Fault::EmbeddedFull => {
                streams.disk().unwrap().fill().unwrap();
                // The last page of a file may have space.
                while self.produce(&"fills the page ".repeat(64)).await {}
            }
            // The replica first, so that it does not take over.
            Fault::ShardDown => streams.shard().iter().rev().for_each(|node| node.kill9().unwrap()),
            Fault::ShardHangs => {
                streams.shard().iter().rev().for_each(|node| node.pause().unwrap());
            }
            Fault::SentinelsDown => {
                streams.sentinels().iter().for_each(|sentinel| sentinel.kill9().unwrap());
            }
            Fault::SentinelsHang => {
                streams.sentinels().iter().for_each(|sentinel| sentinel.pause().unwrap());
            }
            Fault::PostgresDown => sql.proxy().cut().unwrap(),
            Fault::PostgresStalls => sql.proxy().stall().unwrap(),
            Fault::PostgresSlow => sql.proxy().delay(DELAY).unwrap(),
            Fault::PostgresReadOnly => sql.set_database("SET default_transaction_read_only = on"),
            Fault::PostgresDenies => sql.set_database("ALLOW_CONNECTIONS false"),
            Fault::PostgresFull => {
                for statement in [DISK_HAS_SPACE, ADD_TRIGGERS, DISK_FULL] {
                    sql.query(statement);
                }
            }
            Fault::PostgresWrongPassword => sql.set_password("other"),
            Fault::SqliteLocked => {
                self.other_program =
                    Some(begin(sql.other_program().await, "BEGIN IMMEDIATE").await);
            }
            Fault::SqliteFull => {
                // From now on every write makes the file of the log longer: it is empty, and a reader keeps it from being reused.
                let mut reader = sql.other_program().await;
                // Fails while another connection reads.
                let checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)";
                while sqlx::query_scalar::<_, i64>(checkpoint).fetch_one(&mut reader).await.unwrap()
                    != 0
                {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                self.other_program = Some(begin(reader, "BEGIN; SELECT * FROM issues").await);
                sql.disk().fill().unwrap();
            }
            Fault::ModelDown => self.to_model.cut().unwrap(),
            Fault::ModelStalls => self.to_model.stall().unwrap(),
            Fault::ModelSlow => self.to_model.delay(DELAY).unwrap(),
            Fault::ModelDenies => self.denials.model.store(true, Ordering::SeqCst),
            Fault::ReceiverDown => self.to_receiver.cut().unwrap(),
            Fault::ReceiverStalls => self.to_receiver.stall().unwrap(),
            Fault::ReceiverSlow => self.to_receiver.delay(DELAY).unwrap(),
            Fault::ReceiverDenies => self.denials.receiver.store(true, Ordering::SeqCst),
        }
    }

    /// Ends the fault.
    pub(crate) async fn heal(&mut self, fault: Fault) {
        let (streams, sql) = (&self.streams, &self.sql);
        match fault {
            Fault::RedisDown
            | Fault::RedisStalls
            | Fault::RedisSlow
            | Fault::ClusterDown
            | Fault::ClusterStalls
            | Fault::ClusterSlow => {
                streams.proxies().iter().for_each(|proxy| proxy.heal().unwrap());
            }
            Fault::RedisFull | Fault::ClusterFull => {
                streams.command(&["CONFIG", "SET", "maxmemory", "0"]);
            }
            Fault::RedisReadOnly => streams.command(&["REPLICAOF", "NO", "ONE"]),
            Fault::ClusterReadOnly => {
                streams.command(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
            }
            Fault::RedisDenies | Fault::ClusterDenies | Fault::SentinelsDeny => streams.allow(),
            Fault::EmbeddedFull => streams.disk().unwrap().free().unwrap(),
            Fault::ShardDown => {
                streams.shard().iter().for_each(|node| node.restart().unwrap());
                streams.cluster().wait_until_ok(LIMIT).unwrap();
            }
            Fault::ShardHangs => {
                // All: to find the shard, one would have to ask its servers.
                streams.cluster().nodes().iter().for_each(|node| node.resume().unwrap());
                streams.cluster().wait_until_ok(LIMIT).unwrap();
            }
            Fault::SentinelsDown => {
                streams.sentinels().iter().for_each(|sentinel| sentinel.restart().unwrap());
            }
            Fault::SentinelsHang => {
                streams.sentinels().iter().for_each(|sentinel| sentinel.resume().unwrap());
            }
            Fault::PostgresDown | Fault::PostgresStalls | Fault::PostgresSlow => {
                sql.proxy().heal().unwrap();
            }
            Fault::PostgresReadOnly => sql.set_database("RESET default_transaction_read_only"),
            Fault::PostgresDenies => sql.set_database("ALLOW_CONNECTIONS true"),
            Fault::PostgresFull => sql.query(DISK_HAS_SPACE),
            Fault::PostgresWrongPassword => sql.set_password("secret"),
            Fault::SqliteLocked => drop(self.other_program.take()),
            Fault::SqliteFull => {
                drop(self.other_program.take());
                sql.disk().free().unwrap();
            }
            Fault::ModelDown | Fault::ModelStalls | Fault::ModelSlow => {
                self.to_model.heal().unwrap();
            }
            Fault::ModelDenies => self.denials.model.store(false, Ordering::SeqCst),
            Fault::ReceiverDown | Fault::ReceiverStalls | Fault::ReceiverSlow => {
                self.to_receiver.heal().unwrap();
            }
            Fault::ReceiverDenies => self.denials.receiver.store(false, Ordering::SeqCst),
        }
        self.denials.answers_server.send_replace(true);
    }
}

/// The id of a webhook of [`System::occupy_server`].
fn occupying(number: usize) -> String {
    format!("occupying-{number}.")
}

/// Begins a transaction, which lasts as long as the connection.
async fn begin(mut connection: SqliteConnection, statements: &'static str) -> SqliteConnection {
    sqlx::raw_sql(statements).execute(&mut connection).await.unwrap();
    connection
}
