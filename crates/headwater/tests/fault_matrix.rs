//! What keeps working while a dependency fails: the table of docs/reliability.md, one row per fault.
//!
//! Each test runs a server, a worker and a consumer on PostgreSQL and Redis behind proxies, with a model and a receiver
//! of replies. It causes one fault, checks what each role does meanwhile, ends the fault, and checks that everything
//! that was confirmed is handled.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::BTreeSet;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use headwater_testkit::{ChaosCounts, Cluster, Database, Postgres, Proxy, Redis};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::sender::{STANDARD_SECRET, now, send, standard};
use support::{LIMIT, Server, ServerDir, eventually, text};

/// What a role does during a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// It works as always.
    Works,
    /// It stops, and continues by itself afterwards. Nothing is lost.
    Waits,
    /// It rejects the request with an error, and nothing was done.
    Rejects,
}
use Effect::{Rejects, Waits, Works};

/// The roles, in the order of the columns.
const ROLES: [&str; 6] = [
    "server: webhooks",
    "worker: answers",
    "producer",
    "consumer",
    "verbs on SQL",
    "verbs on streams",
];

/// Every fault, and what each role does meanwhile.
const MATRIX: &[(Fault, &str, [Effect; 6])] = &[
    (Fault::RedisDown, "Redis is unreachable", [Works, Works, Rejects, Waits, Works, Rejects]),
    (Fault::RedisStalls, "Redis does not answer", [Works, Works, Rejects, Waits, Works, Rejects]),
    (Fault::RedisSlow, "Redis answers 100 ms late", [Works; 6]),
    (
        Fault::RedisFull,
        "Redis is full (`noeviction`)",
        [Works, Works, Rejects, Works, Works, Works],
    ),
    (
        Fault::RedisReadOnly,
        "Redis is a read-only replica",
        [Works, Works, Rejects, Waits, Works, Works],
    ),
    (
        Fault::RedisDenies,
        "Redis rejects the password",
        [Works, Works, Rejects, Waits, Works, Rejects],
    ),
    (Fault::ShardDown, "a shard of a Redis Cluster is down, for topics on the others", [Works; 6]),
    (
        Fault::ShardHangs,
        "a shard of a Redis Cluster does not answer, for topics on the others",
        [Works; 6],
    ),
    (
        Fault::PostgresDown,
        "PostgreSQL is unreachable",
        [Rejects, Waits, Works, Works, Rejects, Works],
    ),
    (
        Fault::PostgresStalls,
        "PostgreSQL does not answer",
        [Rejects, Waits, Works, Works, Rejects, Works],
    ),
    (Fault::PostgresSlow, "PostgreSQL answers 100 ms late", [Works; 6]),
    (
        Fault::PostgresReadOnly,
        "PostgreSQL is read-only",
        [Rejects, Waits, Works, Works, Works, Works],
    ),
    (
        Fault::PostgresDenies,
        "PostgreSQL rejects connections",
        [Rejects, Waits, Works, Works, Rejects, Works],
    ),
    (
        Fault::PostgresFull,
        "PostgreSQL has no disk space left",
        [Rejects, Waits, Works, Works, Works, Works],
    ),
    (
        Fault::PostgresWrongPassword,
        "PostgreSQL rejects the password",
        [Rejects, Waits, Works, Works, Rejects, Works],
    ),
    (Fault::ModelDown, "the model is unreachable", [Works, Waits, Works, Works, Works, Works]),
    (Fault::ModelSlow, "the model answers 100 ms late", [Works; 6]),
    (
        Fault::ModelDenies,
        "the model rejects the API key",
        [Works, Waits, Works, Works, Works, Works],
    ),
    (
        Fault::ReceiverDown,
        "the receiver of replies is unreachable",
        [Works, Waits, Works, Works, Works, Works],
    ),
    (Fault::ReceiverSlow, "the receiver of replies answers 100 ms late", [Works; 6]),
    (
        Fault::ReceiverDenies,
        "the receiver of replies rejects the token",
        [Works, Waits, Works, Works, Works, Works],
    ),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    RedisDown,
    RedisStalls,
    RedisSlow,
    RedisFull,
    RedisReadOnly,
    RedisDenies,
    ShardDown,
    ShardHangs,
    PostgresDown,
    PostgresStalls,
    PostgresSlow,
    PostgresReadOnly,
    PostgresDenies,
    PostgresFull,
    PostgresWrongPassword,
    ModelDown,
    ModelSlow,
    ModelDenies,
    ReceiverDown,
    ReceiverSlow,
    ReceiverDenies,
}

/// Long enough that a role which works would have finished on a quiet machine.
const WINDOW: Duration = Duration::from_secs(3);
const DELAY: Duration = Duration::from_millis(100);

/// Every reply that was delivered, with its idempotency key. A repeated delivery is a second entry with the same key.
type Replies = Arc<Mutex<Vec<(String, String)>>>;

/// Whether the model and the receiver reject their callers.
#[derive(Default)]
struct Denials {
    model: AtomicBool,
    receiver: AtomicBool,
}

/// A model that repeats the prompt, and a receiver of replies.
async fn external_services(denials: Arc<Denials>) -> (Replies, std::net::SocketAddr) {
    let replies = Replies::default();
    let kept = Arc::clone(&replies);
    let of_model = Arc::clone(&denials);
    let model = move |Json(request): Json<Value>| {
        let is_denied = of_model.model.load(Ordering::SeqCst);
        async move {
            if is_denied {
                return (
                    StatusCode::UNAUTHORIZED,
                    Json(json!({"error": {"message": "invalid key"}})),
                );
            }
            let content = format!("ACK {}", request["messages"]);
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
struct System {
    redis: Redis,
    /// Instead of the one server.
    cluster: Option<Cluster>,
    postgres: Postgres,
    database: Database,
    denials: Arc<Denials>,
    to_redis: Proxy,
    to_postgres: Proxy,
    to_model: Proxy,
    to_receiver: Proxy,
    replies: Replies,
    dir: ServerDir,
    arguments: Vec<String>,
    server: Server,
    _worker: Server,
    consumer: Child,
}

impl Drop for System {
    fn drop(&mut self) {
        let _ = self.consumer.kill();
        let _ = self.consumer.wait();
    }
}

impl System {
    async fn start(fault: Fault) -> Self {
        let denials = Arc::<Denials>::default();
        let (replies, address) = external_services(Arc::clone(&denials)).await;
        let (to_model, to_receiver) =
            (Proxy::start(address).unwrap(), Proxy::start(address).unwrap());
        let redis = Redis::start().unwrap();
        redis
            .command(&["ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all"])
            .unwrap()
            .ok()
            .unwrap();
        let cluster = matches!(fault, Fault::ShardDown | Fault::ShardHangs).then(|| {
            let cluster = Cluster::builder().setting("cluster-require-full-coverage", "no");
            cluster.setting("appendonly", "yes").start().unwrap()
        });
        // Passwords are a matter of the whole server.
        let has_passwords = fault == Fault::PostgresWrongPassword;
        let postgres = if has_passwords { Postgres::start() } else { Postgres::shared() };
        let postgres = postgres.unwrap();
        let database = postgres.database().unwrap();
        let to_redis = Proxy::start(redis.addr()).unwrap();
        let to_postgres = Proxy::start(postgres.addr()).unwrap();
        let mut database_url = database.url_at(to_postgres.addr());
        if has_passwords {
            database_url = require_password(&database, &database_url);
        }
        let settings = format!(
            "[[integration]]\nid = \"anybody\"\nprovider = \"standard\"\nsecret = \"{STANDARD_SECRET}\"\n\
             base_url = \"http://{}/callback\"\n",
            to_receiver.addr()
        );
        let dir = ServerDir::new().unwrap().settings(&settings).unwrap();
        let arguments = [
            "--stream-url".to_owned(),
            match &cluster {
                Some(cluster) => cluster.url(),
                None => format!("redis://app:secret@{}", to_redis.addr()),
            },
            "--database-url".to_owned(),
            database_url,
        ];
        let model = format!("http://{}/v1", to_model.addr());
        let desk = [
            "--model-url",
            &model,
            "--model-name",
            "m",
            "--issue-quiet",
            "10ms",
            "--sweep-every",
            "200ms",
        ];
        let all: Vec<&str> = arguments.iter().map(String::as_str).chain(desk).collect();
        let server = dir.serve(&all).unwrap();
        let worker = dir.worker(&all).unwrap();
        server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
        let topic = json!({"name": "sales", "partitions": 1});
        assert_eq!(server.post("/api/v1/topics", &topic).await.unwrap().0, 201);
        let exec = "cat >> handled; echo >> handled";
        let to: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let verb = ["consume", "sales", "--group", "g", "--exec", exec];
        let consumer = dir.command(&[&verb[..], &to].concat()).spawn().unwrap();
        let arguments = arguments.to_vec();
        let _worker = worker;
        let system = Self {
            redis,
            cluster,
            postgres,
            database,
            denials,
            to_redis,
            to_postgres,
            to_model,
            to_receiver,
            replies,
            dir,
            arguments,
            server,
            _worker,
            consumer,
        };
        // The consumer owns the partition.
        assert!(system.produce("first").await);
        eventually("the first message", || system.has_handled("first")).await.unwrap();
        system
    }

    fn signal_consumer(&self, signal: Signal) {
        let id = i32::try_from(self.consumer.id()).unwrap();
        kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
    }

    /// Sends a webhook; returns whether it was confirmed.
    async fn webhook(&self, id: &str) -> bool {
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
    async fn produce(&self, payload: &str) -> bool {
        let messages = json!({"messages": [{"payload": payload}]});
        let (status, body) =
            self.server.post("/api/v1/topics/sales/messages", &messages).await.unwrap();
        if status != 201 {
            assert!(status >= 500 && body["error"]["message"].is_string(), "{status} {body}");
        }
        status == 201
    }

    fn has_handled(&self, payload: &str) -> bool {
        let handled = std::fs::read_to_string(self.dir.path().join("handled")).unwrap_or_default();
        handled.lines().any(|line| line == payload)
    }

    /// How many deliveries answered a webhook, repeated ones included.
    fn answers(&self, id: &str) -> usize {
        let word = format!("event-{id}");
        let replies = self.replies.lock().unwrap();
        replies.iter().filter(|(_, text)| text.contains(&word)).count()
    }

    /// Runs a verb; returns whether it succeeded, otherwise it reports an unreachable server.
    fn verb(&self, verb: &[&str]) -> bool {
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

    /// Every event has one reply, which is one idempotency key. It was delivered once, or again if its confirmation may have been
    /// lost: the receiver was cut off, or the database did not store that it was delivered.
    fn assert_answered_once(&self, fault: Fault) {
        let may_repeat = matches!(
            fault,
            Fault::ReceiverDown
                | Fault::PostgresDown
                | Fault::PostgresStalls
                | Fault::PostgresReadOnly
                | Fault::PostgresDenies
                | Fault::PostgresFull
                | Fault::PostgresWrongPassword
        );
        let replies = self.replies.lock().unwrap();
        for id in ["before", "during", "after"] {
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

    /// A shard, primary and replica, that holds neither the topic nor the list of topics.
    fn shard(&self) -> [&Redis; 2] {
        let cluster = self.cluster.as_ref().unwrap();
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

    fn cause(&self, fault: Fault) {
        let redis = |words: &[&str]| drop(self.redis.command(words).unwrap().ok().unwrap());
        match fault {
            Fault::RedisDown => self.to_redis.cut().unwrap(),
            Fault::RedisStalls => self.to_redis.stall().unwrap(),
            Fault::RedisSlow => self.to_redis.delay(DELAY).unwrap(),
            Fault::RedisFull => redis(&["CONFIG", "SET", "maxmemory", "1mb"]),
            // The primary does not exist.
            Fault::RedisReadOnly => redis(&["REPLICAOF", "127.0.0.1", "1"]),
            Fault::RedisDenies => {
                redis(&["ACL", "SETUSER", "app", "resetpass", ">other"]);
                self.redis.command(&["CLIENT", "KILL", "USER", "app"]).unwrap();
            }
            // The replica first, so that it does not take over.
            Fault::ShardDown => self.shard().iter().rev().for_each(|node| node.kill9().unwrap()),
            Fault::ShardHangs => self.shard().iter().rev().for_each(|node| node.pause().unwrap()),
            Fault::PostgresDown => self.to_postgres.cut().unwrap(),
            Fault::PostgresStalls => self.to_postgres.stall().unwrap(),
            Fault::PostgresSlow => self.to_postgres.delay(DELAY).unwrap(),
            Fault::PostgresReadOnly => self.set_database("SET default_transaction_read_only = on"),
            Fault::PostgresDenies => self.set_database("ALLOW_CONNECTIONS false"),
            Fault::PostgresFull => {
                self.database.query(DISK_FULL).unwrap();
            }
            Fault::PostgresWrongPassword => self.set_password("other"),
            Fault::ModelDown => self.to_model.cut().unwrap(),
            Fault::ModelSlow => self.to_model.delay(DELAY).unwrap(),
            Fault::ModelDenies => self.denials.model.store(true, Ordering::SeqCst),
            Fault::ReceiverDown => self.to_receiver.cut().unwrap(),
            Fault::ReceiverSlow => self.to_receiver.delay(DELAY).unwrap(),
            Fault::ReceiverDenies => self.denials.receiver.store(true, Ordering::SeqCst),
        }
    }

    /// Ends all faults.
    fn heal(&self, fault: Fault) {
        for proxy in [&self.to_redis, &self.to_postgres, &self.to_model, &self.to_receiver] {
            proxy.heal().unwrap();
        }
        let redis = |words: &[&str]| drop(self.redis.command(words).unwrap().ok().unwrap());
        match fault {
            Fault::RedisFull => redis(&["CONFIG", "SET", "maxmemory", "0"]),
            Fault::RedisReadOnly => redis(&["REPLICAOF", "NO", "ONE"]),
            Fault::RedisDenies => redis(&["ACL", "SETUSER", "app", ">secret"]),
            Fault::ShardDown => {
                self.shard().iter().for_each(|node| node.restart().unwrap());
                self.cluster.as_ref().unwrap().wait_until_ok(LIMIT).unwrap();
            }
            Fault::ShardHangs => {
                let cluster = self.cluster.as_ref().unwrap();
                // All: to find the shard, one would have to ask its servers.
                cluster.nodes().iter().for_each(|node| node.resume().unwrap());
                cluster.wait_until_ok(LIMIT).unwrap();
            }
            Fault::PostgresReadOnly => self.set_database("RESET default_transaction_read_only"),
            Fault::PostgresDenies => self.set_database("ALLOW_CONNECTIONS true"),
            Fault::PostgresFull => {
                self.database.query("DROP FUNCTION disk_full CASCADE").unwrap();
            }
            Fault::PostgresWrongPassword => self.set_password("secret"),
            Fault::ModelDenies => self.denials.model.store(false, Ordering::SeqCst),
            Fault::ReceiverDenies => self.denials.receiver.store(false, Ordering::SeqCst),
            _ => {}
        }
    }

    /// Changes the password of the database user, and ends its sessions.
    fn set_password(&self, password: &str) {
        self.change(&format!("ALTER ROLE app PASSWORD '{password}'"));
    }

    /// Changes the database and ends its sessions.
    fn set_database(&self, change: &str) {
        let name = self.database.name();
        self.change(&format!("ALTER DATABASE \"{name}\" {change}"));
    }

    /// Executes a statement and ends the sessions of the database, from another database.
    fn change(&self, statement: &str) {
        let name = self.database.name();
        let admin = self.postgres.database().unwrap();
        admin.query(statement).unwrap();
        let end = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{name}'"
        );
        admin.query(&end).unwrap();
    }
}

/// Makes every write fail as PostgreSQL does when a table cannot be extended.
const DISK_FULL: &str = "
    CREATE FUNCTION disk_full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION 'could not extend file \"base/1/1\": No space left on device' USING ERRCODE = 'disk_full';
    END $$;
    DO $$ DECLARE one regclass; BEGIN
        FOR one IN SELECT oid FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace LOOP
            EXECUTE format('CREATE TRIGGER disk_full BEFORE INSERT OR UPDATE ON %s EXECUTE FUNCTION disk_full()', one);
        END LOOP;
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

/// Works if the condition holds during the fault, otherwise waits.
async fn works_or_waits(expected: Effect, what: &str, condition: impl Fn() -> bool) -> Effect {
    if expected == Works {
        eventually(what, &condition).await.unwrap();
        return Works;
    }
    tokio::time::sleep(WINDOW).await;
    if condition() { Works } else { Waits }
}

fn works_or_rejects(is_done: bool) -> Effect {
    if is_done { Works } else { Rejects }
}

async fn matrix_row(fault: Fault) {
    let (_, name, expected) = MATRIX.iter().find(|(row, ..)| *row == fault).unwrap();
    let system = System::start(fault).await;
    // A run that is asking its model, and a message that is not consumed yet, when the fault begins.
    system.to_model.stall().unwrap();
    assert!(system.webhook("before").await);
    system.signal_consumer(Signal::STOP);
    // The first one reaches the consumer, whose read is waiting for it.
    assert!(system.produce("before").await && system.produce("unread").await);
    match fault {
        Fault::ModelDown => system.cause(fault),
        Fault::ModelSlow => {
            system.to_model.heal().unwrap();
            system.cause(fault);
        }
        _ => {
            system.cause(fault);
            system.to_model.heal().unwrap();
        }
    }
    system.signal_consumer(Signal::CONT);

    let is_confirmed = system.webhook("during").await;
    let is_sent = system.produce("during").await;
    let seen = [
        works_or_rejects(is_confirmed),
        works_or_waits(expected[1], "the answer", || system.answers("before") > 0).await,
        works_or_rejects(is_sent),
        works_or_waits(expected[3], "the message", || system.has_handled("unread")).await,
        works_or_rejects(system.verb(&["issue", "list"])),
        works_or_rejects(system.verb(&["topic", "list"])),
    ];
    assert_eq!(seen, *expected, "{name}: {ROLES:?}\n{}", system.server.log());

    system.heal(fault);
    eventually("the answer to the first event", || system.answers("before") > 0).await.unwrap();
    for message in ["before", "unread"] {
        eventually("a message", || system.has_handled(message)).await.unwrap();
    }
    if is_confirmed {
        eventually("the answer to the second event", || system.answers("during") > 0)
            .await
            .unwrap();
    }
    if is_sent {
        eventually("the second message", || system.has_handled("during")).await.unwrap();
    }
    assert!(system.webhook("after").await && system.produce("after").await);
    eventually("the answer to the last event", || system.answers("after") > 0).await.unwrap();
    eventually("the last message", || system.has_handled("after")).await.unwrap();
    system.assert_answered_once(fault);
    // Three events and five messages, but for those that were rejected during the fault.
    let sent = 6 + u64::from(is_confirmed) + u64::from(is_sent);
    let repeated = |id| system.answers(id).saturating_sub(1) as u64;
    let doubled = ["before", "during", "after"].map(repeated).iter().sum();
    let counts = ChaosCounts { sent, handled: sent, doubled, ..Default::default() };
    counts.report(name).unwrap();
}

macro_rules! rows {
    ($($test:ident: $fault:ident,)*) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            matrix_row(Fault::$fault).await;
        }
    )*};
}
rows! {
    redis_is_unreachable: RedisDown,
    redis_does_not_answer: RedisStalls,
    redis_is_slow: RedisSlow,
    redis_is_full: RedisFull,
    redis_is_read_only: RedisReadOnly,
    redis_rejects_the_password: RedisDenies,
    a_shard_of_a_redis_cluster_is_down: ShardDown,
    a_shard_of_a_redis_cluster_does_not_answer: ShardHangs,
    postgres_is_unreachable: PostgresDown,
    postgres_does_not_answer: PostgresStalls,
    postgres_is_slow: PostgresSlow,
    postgres_is_read_only: PostgresReadOnly,
    postgres_rejects_connections: PostgresDenies,
    postgres_is_full: PostgresFull,
    postgres_rejects_the_password: PostgresWrongPassword,
    the_model_is_unreachable: ModelDown,
    the_model_is_slow: ModelSlow,
    the_model_rejects_the_key: ModelDenies,
    the_receiver_is_unreachable: ReceiverDown,
    the_receiver_is_slow: ReceiverSlow,
    the_receiver_rejects_the_token: ReceiverDenies,
}

/// The table as docs/reliability.md shows it.
fn table() -> String {
    let mut lines =
        vec![format!("| while | {} |", ROLES.join(" | ")), format!("|{}", "---|".repeat(7))];
    for (_, name, effects) in MATRIX {
        let effects = effects.map(|effect| format!("{effect:?}").to_lowercase());
        lines.push(format!("| {name} | {} |", effects.join(" | ")));
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_documented_table_is_this_one() {
    let page = include_str!("../../../docs/reliability.md");
    assert!(page.contains(&table()), "docs/reliability.md lacks this table:\n{}", table());
    assert!(LIMIT > WINDOW);
}
