//! The processes of the fault matrix, what they depend on, and the faults of these.

use std::collections::BTreeSet;
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use headwater_testkit::{Cluster, Database, Postgres, Proxy, Redis, Sentinel};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, SqliteConnection};
use tokio::sync::watch;

use crate::Fault;
use crate::support::disk::SmallDisk;
use crate::support::sender::{STANDARD_SECRET, now, send, standard};
use crate::support::{LIMIT, Server, ServerDir, directory, eventually, text};

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

/// The servers that have the streams.
enum StreamServers {
    One { redis: Box<Redis>, proxy: Proxy },
    Cluster(Cluster),
    Sentinel(Box<Sentinel>),
}

impl StreamServers {
    fn start(fault: Fault) -> Self {
        match fault {
            Fault::ShardDown | Fault::ShardHangs => {
                let cluster = Cluster::builder().setting("cluster-require-full-coverage", "no");
                Self::Cluster(cluster.setting("appendonly", "yes").start().unwrap())
            }
            Fault::SentinelsDown | Fault::SentinelsHang | Fault::SentinelsDeny => {
                let sentinel = Sentinel::start().unwrap();
                sentinel.sentinels().iter().for_each(add_user);
                Self::Sentinel(Box::new(sentinel))
            }
            _ => {
                let redis = Redis::start().unwrap();
                add_user(&redis);
                let proxy = Proxy::start(redis.addr()).unwrap();
                Self::One { redis: Box::new(redis), proxy }
            }
        }
    }

    fn url(&self) -> String {
        match self {
            Self::One { proxy, .. } => format!("redis://app:secret@{}", proxy.addr()),
            Self::Cluster(cluster) => cluster.url(),
            Self::Sentinel(sentinel) => {
                format!("{}?sentinel_user=app&sentinel_password=secret", sentinel.url())
            }
        }
    }

    fn proxy(&self) -> &Proxy {
        let Self::One { proxy, .. } = self else { panic!("a fault of one server") };
        proxy
    }

    /// Runs a command at the one server.
    fn command(&self, words: &[&str]) {
        let Self::One { redis, .. } = self else { panic!("a fault of one server") };
        redis.command(words).unwrap().ok().unwrap();
    }

    /// The servers at which the processes log in as `app`.
    fn servers_with_user(&self) -> &[Redis] {
        match self {
            Self::One { redis, .. } => std::slice::from_ref(redis),
            Self::Cluster(_) => &[],
            Self::Sentinel(sentinel) => sentinel.sentinels(),
        }
    }

    /// Changes the password of the user, and ends its connections.
    fn deny(&self) {
        for server in self.servers_with_user() {
            server
                .command(&["ACL", "SETUSER", "app", "resetpass", ">other"])
                .unwrap()
                .ok()
                .unwrap();
            server.command(&["CLIENT", "KILL", "USER", "app"]).unwrap().ok().unwrap();
        }
    }

    /// Accepts the password again.
    fn allow(&self) {
        for server in self.servers_with_user() {
            server.command(&["ACL", "SETUSER", "app", ">secret"]).unwrap().ok().unwrap();
        }
    }

    fn sentinels(&self) -> &[Redis] {
        let Self::Sentinel(sentinel) = self else { panic!("a fault of Sentinels") };
        sentinel.sentinels()
    }

    fn cluster(&self) -> &Cluster {
        let Self::Cluster(cluster) = self else { panic!("a fault of a cluster") };
        cluster
    }

    /// A shard, primary and replica, that holds neither the topic nor the list of topics.
    fn shard(&self) -> [&Redis; 2] {
        let cluster = self.cluster();
        let primary = |key: &str| {
            let slot = cluster.slot_of(key).unwrap();
            cluster.primary_of_slot(slot).unwrap().port()
        };
        let needed = [
            "streaming:mq:topics:registry",
            "streaming:mq:topics:plain",
            "streaming:mq:topic:sales:meta",
            "stream:topic:{sales:0}",
        ]
        .map(primary);
        let nodes = cluster.nodes();
        let replicas = nodes.len() / 2;
        let free = (0..replicas).find(|at| !needed.contains(&nodes[*at].port()));
        let free = free.expect("one of three shards has none of them");
        [&nodes[free], &nodes[free + replicas]]
    }
}

/// The database that has the issues.
enum SqlDatabase {
    Postgres { server: Box<Postgres>, database: Database, proxy: Proxy, url: String },
    Sqlite { disk: Option<SmallDisk>, url: String },
}

impl SqlDatabase {
    /// `None` if this process may not mount the disk that the fault needs.
    fn start(fault: Fault, dir: &ServerDir) -> Option<Self> {
        if matches!(fault, Fault::SqliteLocked | Fault::SqliteFull) {
            let data = directory(dir, "data").unwrap();
            let disk = match fault {
                Fault::SqliteFull => Some(SmallDisk::mount(&data).unwrap()?),
                _ => None,
            };
            let url = format!("sqlite:{}", data.join("issues.db").display());
            return Some(Self::Sqlite { disk, url });
        }
        // Passwords are a matter of the whole server.
        let has_passwords = fault == Fault::PostgresWrongPassword;
        let server = if has_passwords { Postgres::start() } else { Postgres::shared() }.unwrap();
        let database = server.database().unwrap();
        let proxy = Proxy::start(server.addr()).unwrap();
        let mut url = database.url_at(proxy.addr());
        if has_passwords {
            url = require_password(&database, &url);
        }
        Some(Self::Postgres { server: Box::new(server), database, proxy, url })
    }

    fn url(&self) -> &str {
        match self {
            Self::Postgres { url, .. } | Self::Sqlite { url, .. } => url,
        }
    }

    fn proxy(&self) -> &Proxy {
        let Self::Postgres { proxy, .. } = self else { panic!("a fault of PostgreSQL") };
        proxy
    }

    fn disk(&self) -> &SmallDisk {
        let Self::Sqlite { disk: Some(disk), .. } = self else { panic!("a fault of a small disk") };
        disk
    }

    /// Runs a statement in the database.
    fn query(&self, statement: &str) {
        let Self::Postgres { database, .. } = self else { panic!("a fault of PostgreSQL") };
        database.query(statement).unwrap();
    }

    /// Changes the password of the database user, and ends its sessions.
    fn set_password(&self, password: &str) {
        self.change(&format!("ALTER ROLE app PASSWORD '{password}'"));
    }

    /// Changes the database and ends its sessions.
    fn set_database(&self, change: &str) {
        let Self::Postgres { database, .. } = self else { panic!("a fault of PostgreSQL") };
        self.change(&format!("ALTER DATABASE \"{}\" {change}", database.name()));
    }

    /// Executes a statement and ends the sessions of the database, from another database.
    fn change(&self, statement: &str) {
        let Self::Postgres { server, database, .. } = self else { panic!("a fault of PostgreSQL") };
        let admin = server.database().unwrap();
        admin.query(statement).unwrap();
        let end = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{}'",
            database.name()
        );
        admin.query(&end).unwrap();
    }

    /// Another program that uses the file.
    async fn other_program(&self) -> SqliteConnection {
        let options: SqliteConnectOptions = self.url().parse().unwrap();
        options.busy_timeout(LIMIT).connect().await.unwrap()
    }
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
    arguments: [String; 4],
    pub(crate) server: Server,
    _worker: Server,
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
        let streams = StreamServers::start(fault);
        let arguments =
            ["--stream-url", &streams.url(), "--database-url", sql.url()].map(str::to_owned);
        let model = format!("http://{}/v1", to_model.addr());
        let desk = ["--model-url", &model, "--issue-quiet", "10ms", "--sweep-every", "200ms"];
        let all: Vec<&str> = arguments.iter().map(String::as_str).chain(desk).collect();
        // It waits for its model longer than a test takes.
        let patience = ["--model-timeout", "5m", "--model-idle-timeout", "5m"];
        let of_server = ["--model-name", SERVER_MODEL, "--worker-concurrency", "1"];
        let of_server = [of_server, patience].concat();
        let server = dir.serve(&[&all[..], &of_server[..]].concat()).unwrap();
        let _worker = dir.worker(&[&all[..], &["--model-name", WORKER_MODEL]].concat()).unwrap();
        server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
        let topic = json!({"name": "sales", "partitions": 1});
        assert_eq!(server.post("/api/v1/topics", &topic).await.unwrap().0, 201);
        let exec = "cat >> handled; echo >> handled";
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
            _worker,
            consumer,
            occupying: 0,
        };
        // The consumer owns the partition.
        assert!(system.produce("first").await);
        eventually("the first message", || system.has_handled("first")).await.unwrap();
        system.occupy_server().await;
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
        assert!(
            output.status.success()
                || ["unreachable", "denied", "authentication failed"]
                    .iter()
                    .any(|it| error.contains(it)),
            "{error}"
        );
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
            Fault::RedisDown => streams.proxy().cut().unwrap(),
            Fault::RedisStalls => streams.proxy().stall().unwrap(),
            Fault::RedisSlow => streams.proxy().delay(DELAY).unwrap(),
            Fault::RedisFull => streams.command(&["CONFIG", "SET", "maxmemory", "1mb"]),
            // The primary does not exist.
            Fault::RedisReadOnly => streams.command(&["REPLICAOF", "127.0.0.1", "1"]),
            Fault::RedisDenies | Fault::SentinelsDeny => streams.deny(),
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
            Fault::RedisDown | Fault::RedisStalls | Fault::RedisSlow => {
                streams.proxy().heal().unwrap();
            }
            Fault::RedisFull => streams.command(&["CONFIG", "SET", "maxmemory", "0"]),
            Fault::RedisReadOnly => streams.command(&["REPLICAOF", "NO", "ONE"]),
            Fault::RedisDenies | Fault::SentinelsDeny => streams.allow(),
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

/// Adds the user as which the processes log in.
fn add_user(server: &Redis) {
    let user = ["ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all"];
    server.command(&user).unwrap().ok().unwrap();
}

/// Begins a transaction, which lasts as long as the connection.
async fn begin(mut connection: SqliteConnection, statements: &'static str) -> SqliteConnection {
    sqlx::raw_sql(statements).execute(&mut connection).await.unwrap();
    connection
}

/// Adds a trigger, which does nothing yet, to every table. A transaction per table: with the locks of several tables it and a
/// transaction of the worker could wait for each other, and PostgreSQL would cancel one.
const ADD_TRIGGERS: &str = "
    DO $$ DECLARE one regclass; BEGIN
        FOR one IN SELECT oid FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace LOOP
            EXECUTE format('CREATE TRIGGER disk_full BEFORE INSERT OR UPDATE ON %s EXECUTE FUNCTION disk_full()', one);
            COMMIT;
        END LOOP;
    END $$";

/// Makes writes succeed.
const DISK_HAS_SPACE: &str = "
    CREATE OR REPLACE FUNCTION disk_full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$";

/// Makes every write fail as PostgreSQL does when a table cannot be extended.
const DISK_FULL: &str = "
    CREATE OR REPLACE FUNCTION disk_full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION 'could not extend file \"base/1/1\": No space left on device' USING ERRCODE = 'disk_full';
    END $$";

/// Creates the user `app`, who needs a password, and returns the URL for this user.
fn require_password(database: &Database, url: &str) -> String {
    for statement in [
        "CREATE ROLE app LOGIN SUPERUSER PASSWORD 'secret'",
        "COPY (SELECT unnest(ARRAY['host all app all scram-sha-256', 'host all all all trust'])) TO PROGRAM 'cat > pg_hba.conf'",
        "SELECT pg_reload_conf()",
    ] {
        database.query(statement).unwrap();
    }
    let (_, address) = url.split_once('@').unwrap();
    format!("postgres://app:secret@{address}")
}
