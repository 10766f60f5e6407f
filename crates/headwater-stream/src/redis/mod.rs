//! The Redis backend: one server, a Sentinel service, or a Cluster.
//!
//! `keys` turns names into keys. The caller encodes its commands (`command`) and sends them over a
//! connection that all callers share (`multiplexed`); calls with large replies share a second one. Commands that the server rejected without effect are re-sent (`retry`).
//! Replies are parsed in place (`reply`). Each atomic step is one script (`scripts`). Blocking reads use dedicated connections
//! (`blocking_connection`).
//!
//! Guarantees: every call ends by its deadline, with `Unavailable` if necessary; a command whose reply was lost is re-sent only
//! if it is idempotent; connections are re-established automatically.

mod error;
mod keys;
mod metrics;
mod url;

mod reply;

mod msgpack;
mod scripts;

mod command;

mod transport;

mod connection;

mod multiplexed;
mod reconnect;
// These refer to each other: a node asks its Sentinels, and they tell it when another server is the primary.
mod node;
mod pubsub;
mod sentinel;

mod cluster;

mod client;
mod retry;

mod disconnect_reader;

mod blocking_connection;
mod delay_wakeups;

mod read_connections;

mod readers;

mod append;
mod dedup;
mod delays;
mod keyspace_notifications;
mod lease_watch;
mod leases;
mod registry;
mod settle;
mod stats;
mod streams;
mod trim;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tracing::warn;

use self::append::TransactionCheck;
use self::client::{Idempotency, RedisClient};
use self::command::Commands;
use self::connection::{ConnectionSettings, LivenessCheck};
use self::delay_wakeups::DueNotifier;
use self::disconnect_reader::NodeDisconnectors;
use self::error::ReplyError;
use self::keys::{Key, KeyName, Keyspace};
use self::reply::{Cursor, RespReplies, RespValue};
use self::trim::TrimSchedule;
use self::url::{Topology, Url};
use crate::backend::{Backend, BackendDescription};
use crate::clock::Timestamp;
use crate::connect::Options;
use crate::error::{Result, StreamError};

/// The oldest supported server version.
const VERSION_MIN: (u32, u32) = (6, 2);

/// The Redis backend.
struct RedisBackend {
    client: Arc<RedisClient>,
    url: Url,
    description: Mutex<BackendDescription>,
    trim_schedule: TrimSchedule,
    transaction_check: TransactionCheck,
    due_notifier: DueNotifier,
    disconnectors: NodeDisconnectors,
    /// Whether it was logged that the runs of servers are unknown.
    reported_missing_run: AtomicBool,
}

/// Validates a URL without connecting.
pub(crate) fn validate_url(url: &str) -> Result<()> {
    Url::parse(url).map(drop)
}

/// Opens the backend. Unless it is lazy, it connects, checks the server version and probes its capabilities.
pub(crate) async fn open(url: &str, options: &Options) -> Result<Arc<dyn Backend>> {
    let url = Url::parse(url)?;
    let login = &url.params.login;
    if login.user.is_some() && login.password.is_none() && options.credentials.is_none() {
        let problem = "user without a password, and without a provider of credentials";
        return Err(StreamError::invalid("the stream URL", problem));
    }
    let settings = ConnectionSettings {
        tls: transport::tls(&url.params).await?,
        params: Arc::new(url.params.clone()),
        credentials: options.credentials.clone(),
        liveness: LivenessCheck {
            silence_max: options.silence_max,
            // A call that waits for the reply still has time for a new connection.
            ping_timeout: options.call_deadline / 4,
        },
    };
    let client = Arc::new(RedisClient::new(
        &url.topology,
        settings,
        options.call_deadline,
        options.configure_notifications,
    ));
    let description = match options.lazy {
        true => BackendDescription {
            kind: "redis",
            address: url.to_string(),
            version: None,
            facts: Vec::new(),
        },
        false => probe(&client, &url).await?,
    };
    let (trim_schedule, transaction_check, due_notifier, disconnectors) = Default::default();
    Ok(Arc::new(RedisBackend {
        client,
        url,
        description: Mutex::new(description),
        trim_schedule,
        transaction_check,
        due_notifier,
        disconnectors,
        reported_missing_run: AtomicBool::new(false),
    }))
}

#[async_trait]
impl Backend for RedisBackend {
    fn describe(&self) -> BackendDescription {
        self.description.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn probe(&self) -> Result<BackendDescription> {
        let found = probe(&self.client, &self.url).await?;
        *self.description.lock().unwrap_or_else(PoisonError::into_inner) = found.clone();
        Ok(found)
    }

    fn call_deadline(&self) -> Option<Duration> {
        Some(self.client.call_deadline())
    }

    fn cluster_slot(&self, key: &str) -> Option<u16> {
        self.client.is_cluster().then(|| keys::slot(key))
    }

    async fn now(&self) -> Result<Timestamp> {
        let read = |reply: &mut Cursor<'_>| {
            reply.array_of(2)?;
            let (seconds, micros) = (reply.digits()?, reply.digits()?);
            Ok(Timestamp::from_millis(seconds.saturating_mul(1000).saturating_add(micros / 1000)))
        };
        self.call_idempotent("TIME", Commands::one(&["TIME"]), read).await
    }

    async fn server_run(&self, key: &str) -> Result<Option<String>> {
        let commands = Commands::one(&["INFO", "server"]);
        let replies = self.call(key, commands, Idempotency::Idempotent).await?;
        // It may not be permitted.
        let info = replies.cursor().string().unwrap_or_default();
        let run = info.lines().find_map(|line| line.strip_prefix("run_id:")).map(str::to_owned);
        if run.is_none() && !self.reported_missing_run.swap(true, Ordering::Relaxed) {
            warn!(
                "`INFO server` is not permitted or has no `run_id`: a restart or fail-over that lost the newest writes is not detected"
            );
        }
        Ok(run)
    }

    async fn close(&self) -> Result<()> {
        self.client.close().await;
        Ok(())
    }
}

impl RedisBackend {
    /// Sends commands whose keys are all in the slot of `name`, again after a lost reply, and parses the reply.
    async fn call_idempotent<T>(
        &self,
        name: impl AsRef<str> + Send,
        commands: Commands,
        read: impl FnOnce(&mut Cursor<'_>) -> Result<T, ReplyError> + Send,
    ) -> Result<T> {
        let replies = self.call(&name, commands, Idempotency::Idempotent).await?;
        read(&mut replies.cursor()).map_err(|error| error.into_stream_error(name))
    }

    /// The same, but fails after a lost reply.
    async fn call_once<T>(
        &self,
        name: impl AsRef<str> + Send,
        commands: Commands,
        read: impl FnOnce(&mut Cursor<'_>) -> Result<T, ReplyError> + Send,
    ) -> Result<T> {
        let replies = self.call(&name, commands, Idempotency::AtMostOnce).await?;
        read(&mut replies.cursor()).map_err(|error| error.into_stream_error(name))
    }

    /// Sends commands whose keys are all in the slot of `name`.
    async fn call(
        &self,
        name: impl AsRef<str>,
        commands: Commands,
        idempotency: Idempotency,
    ) -> Result<RespReplies> {
        self.client.call(self.slot(name), commands, idempotency).await
    }

    /// The same for calls whose reply may be large, on a connection of their own.
    async fn call_bulk(
        &self,
        name: impl AsRef<str>,
        commands: Commands,
        idempotency: Idempotency,
    ) -> Result<RespReplies> {
        self.client.call_bulk(self.slot(name), commands, idempotency).await
    }

    /// The keys and channels of this backend.
    fn keys(&self) -> &Keyspace {
        self.client.keys()
    }

    /// The key of a name.
    fn key<'a>(&'a self, name: &'a impl KeyName) -> Key<'a> {
        self.keys().of(name)
    }

    fn slot(&self, name: impl AsRef<str>) -> u16 {
        self.client.slot(name.as_ref())
    }
}

/// Probes the server: its version, and which commands it permits.
async fn probe(client: &RedisClient, url: &Url) -> Result<BackendDescription> {
    let mut commands = Commands::new();
    for section in ["server", "persistence", "memory"] {
        commands.add(&["INFO", section]);
    }
    commands.add(&["CLIENT", "UNBLOCK", "0"]);
    commands.add(&["CONFIG", "GET", keyspace_notifications::SETTING]);
    let replies = client.call_any(commands).await?;
    let mut cursor = replies.cursor();
    let mut text = || match cursor.value() {
        Ok(RespValue::Text(text)) => Some(String::from_utf8_lossy(text).into_owned()),
        _ => None,
    };
    // Missing information is not an error.
    let info = [text(), text(), text()].map(Option::unwrap_or_default).join("\n");
    let line = |name: &str| {
        info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::to_owned)
    };
    let version = line("redis_version");
    check_version(version.as_deref())?;
    // Valkey has another name for it.
    let mode = line("redis_mode").or_else(|| line("server_mode"));
    check_mode(mode.as_deref(), url)?;
    let can_unblock = matches!(cursor.value(), Ok(RespValue::Number(_)));
    client.set_can_unblock(can_unblock);
    let flags = keyspace_notifications::read_flags(&mut cursor);
    let topology = match &url.topology {
        Topology::Single(_) => "one server".to_owned(),
        Topology::Sentinel { service, .. } => format!("sentinel, service {service}"),
        Topology::Cluster { .. } => format!("cluster, {} primaries", client.primaries().len()),
    };
    let mut facts = Vec::new();
    if let Some(valkey) = line("valkey_version") {
        let compatible = version.as_deref().unwrap_or("(unknown)");
        facts.push(("server", format!("Valkey {valkey}, compatible with Redis {compatible}")));
    }
    facts.extend([
        ("topology", topology),
        ("tls", if url.params.tls { "yes" } else { "no" }.to_owned()),
        (
            keyspace_notifications::SETTING,
            flags.map_or_else(|reason| reason, |flags| format!("{flags:?}")),
        ),
        (
            "blocking reads",
            if can_unblock {
                "cancelled by CLIENT UNBLOCK".to_owned()
            } else {
                "polls every 500 ms because CLIENT UNBLOCK is denied".to_owned()
            },
        ),
    ]);
    if let Some(enabled) = line("aof_enabled") {
        facts.push(("append only file", if enabled == "0" { "off" } else { "on" }.to_owned()));
    }
    facts.extend(line("maxmemory_policy").map(|policy| ("eviction", policy)));
    let bytes = |name: &str| line(name).and_then(|bytes| bytes.parse::<u64>().ok());
    if let (Some(used), Some(most)) = (bytes("used_memory"), bytes("maxmemory"))
        && most > 0
    {
        let state = if used >= most { "full, " } else { "" };
        facts.push(("memory", format!("{state}{used} of {most} bytes")));
    }
    Ok(BackendDescription { kind: "redis", address: url.to_string(), version, facts })
}

/// Fails for an unsupported version. A server that does not report its version is accepted.
fn check_version(version: Option<&str>) -> Result<()> {
    let Some(version) = version else { return Ok(()) };
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if found < VERSION_MIN {
        let (major, minor) = VERSION_MIN;
        let problem = format!("Redis {version} is not supported; use {major}.{minor} or newer");
        return Err(StreamError::invalid("the server", problem));
    }
    Ok(())
}

fn check_mode(mode: Option<&str>, url: &Url) -> Result<()> {
    let problem = match (mode, &url.topology) {
        (Some("cluster"), Topology::Single(_)) => {
            "this server is part of a cluster; use redis-cluster://"
        }
        (Some("sentinel"), _) => "this is a Sentinel; use redis-sentinel://host:port/service",
        _ => return Ok(()),
    };
    Err(StreamError::invalid("the stream URL", problem))
}

/// A name that another program may have chosen. Invalid characters are replaced, and it is cut to the maximum length.
fn sanitized_name<N>(bytes: &[u8], new: impl Fn(String) -> Result<N>) -> Result<N, ReplyError> {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(name) = new(text.clone().into_owned()) {
        return Ok(name);
    }
    let plain = |c: char| if c.is_control() || c == '}' { char::REPLACEMENT_CHARACTER } else { c };
    let mut shown: String = text.chars().map(plain).collect();
    while shown.len() > crate::limits::NAME_BYTES_MAX {
        shown.pop();
    }
    if shown.is_empty() {
        shown.push(char::REPLACEMENT_CHARACTER);
    }
    new(shown).map_err(|error| ReplyError::unexpected(error.to_string()))
}
