//! Streams on Redis: one server, the primary that Sentinel names, or a Cluster.
//!
//! A name is its key; `keys` spells what is derived from it. A call is packed by its caller (`command`), sent over a link
//! that all callers share (`link`, so that they share round trips), sent again if the server refused it without effect
//! (`call`), and read where its reply lies (`reply`). What must be one step is one script (`scripts`). Reads that wait have
//! connections of their own (`lane`).
//!
//! Promises: every call ends by its deadline, with `Unavailable` if need be; a command whose reply was lost is not sent
//! again unless twice is as good as once; connections come back by themselves.

mod error;
mod keys;
mod url;

mod reply;

mod msgpack;
mod scripts;

mod command;

mod wire;

mod connection;

mod link;
mod sentinel;

mod node;

mod cluster;

mod call;
mod parts;
mod servers;

mod silence;
mod subscription;

mod bells;
mod lane;

mod lanes;

mod reader;
mod tail;

mod appends;
mod dedup;
mod delays;
mod leases;
mod notify;
mod registry;
mod settle;
mod stats;
mod streams;
mod trim;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use self::bells::Bells;
use self::command::Commands;
use self::error::Failure;
use self::node::Manners;
use self::reply::{Replies, Value};
use self::servers::{Effect, Servers};
use self::silence::Silencers;
use self::trim::Trims;
use self::url::{Place, Url};
use crate::backend::{Backend, Description};
use crate::clock::Timestamp;
use crate::connect::Options;
use crate::error::{Result, StreamError};

/// The oldest server that has all commands this backend uses.
const VERSION_MIN: (u32, u32) = (6, 2);

/// A backend on Redis.
struct RedisBackend {
    servers: Arc<Servers>,
    database: u32,
    description: Description,
    trims: Trims,
    bells: Bells,
    silencers: Silencers,
}

/// Checks a URL without connecting.
pub(crate) fn check_url(url: &str) -> Result<()> {
    Url::parse(url).map(drop)
}

/// Opens the backend: finds the servers and looks at what they are.
pub(crate) async fn open(url: &str, options: &Options) -> Result<Arc<dyn Backend>> {
    let url = Url::parse(url)?;
    let tls = wire::tls(&url.access).await?;
    let manners = Manners { access: Arc::new(url.access.clone()), tls };
    let servers = Arc::new(Servers::new(&url.place, manners, options.call_deadline));
    let description = look(&servers, &url).await?;
    let database = url.access.database;
    let (trims, bells, silencers) = Default::default();
    Ok(Arc::new(RedisBackend { servers, database, description, trims, bells, silencers }))
}

#[async_trait]
impl Backend for RedisBackend {
    fn describe(&self) -> Description {
        self.description.clone()
    }

    fn call_deadline(&self) -> Option<Duration> {
        Some(self.servers.call_deadline())
    }

    fn cluster_slot(&self, key: &str) -> Option<u16> {
        self.servers.is_cluster().then(|| keys::slot(key))
    }

    async fn now(&self) -> Result<Timestamp> {
        let replies = self.servers.call(0, Commands::one(&["TIME"]), Effect::Repeatable).await?;
        let mut cursor = replies.cursor();
        let mut read = || {
            cursor.array_of(2)?;
            Ok(cursor.digits()?.saturating_mul(1000).saturating_add(cursor.digits()? / 1000))
        };
        read().map(Timestamp::from_millis).map_err(|failure: Failure| failure.about("TIME"))
    }

    async fn close(&self) -> Result<()> {
        self.servers.close().await;
        Ok(())
    }
}

impl RedisBackend {
    /// Sends commands that are all about one name, or what is derived from it.
    async fn call(
        &self,
        name: impl AsRef<str>,
        commands: Commands,
        effect: Effect,
    ) -> Result<Replies> {
        self.servers.call(self.slot(name), commands, effect).await
    }

    fn slot(&self, name: impl AsRef<str>) -> u16 {
        self.servers.slot(name.as_ref())
    }
}

/// Looks at the server: its version, and what it lets us do.
async fn look(servers: &Servers, url: &Url) -> Result<Description> {
    let mut commands = Commands::new();
    for section in ["server", "persistence", "memory"] {
        commands.add(&["INFO", section]);
    }
    commands.add(&["CLIENT", "UNBLOCK", "0"]);
    commands.add(&["CONFIG", "GET", notify::SETTING]);
    let replies = servers.call_any(commands).await?;
    let mut cursor = replies.cursor();
    let mut text = || match cursor.value() {
        Ok(Value::Text(text)) => Some(String::from_utf8_lossy(text).into_owned()),
        _ => None,
    };
    // A server that tells nothing leaves gaps, no more.
    let info = [text(), text(), text()].map(Option::unwrap_or_default).join("\n");
    let line = |name: &str| {
        info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::to_owned)
    };
    let version = line("redis_version");
    check_version(version.as_deref())?;
    check_mode(line("redis_mode").as_deref(), url)?;
    let can_unblock = matches!(cursor.value(), Ok(Value::Number(_)));
    servers.set_can_unblock(can_unblock);
    let flags = notify::read_flags(&mut cursor);
    let topology = match &url.place {
        Place::Single(_) => "one server".to_owned(),
        Place::Sentinel { service, .. } => format!("sentinel, service {service}"),
        Place::Cluster { .. } => format!("cluster, {} primaries", servers.primaries().len()),
    };
    let mut facts = vec![
        ("topology", topology),
        ("tls", if url.access.tls { "yes" } else { "no" }.to_owned()),
        (notify::SETTING, flags.map_or_else(|reason| reason, |flags| format!("{flags:?}"))),
        (
            "waiting reads",
            if can_unblock {
                "ended by CLIENT UNBLOCK".to_owned()
            } else {
                "in slices of 500 ms, for CLIENT UNBLOCK is not allowed".to_owned()
            },
        ),
    ];
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
    Ok(Description { kind: "redis", address: url.to_string(), version, facts })
}

/// A server that does not tell its version is taken as it is: every refusal is reported where it happens.
fn check_version(version: Option<&str>) -> Result<()> {
    let Some(version) = version else { return Ok(()) };
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if found < VERSION_MIN {
        let (major, minor) = VERSION_MIN;
        let problem = format!("it is Redis {version}; at least {major}.{minor} is needed");
        return Err(StreamError::invalid("the server", problem));
    }
    Ok(())
}

fn check_mode(mode: Option<&str>, url: &Url) -> Result<()> {
    let problem = match (mode, &url.place) {
        (Some("cluster"), Place::Single(_)) => {
            "this server is part of a cluster; write redis-cluster://"
        }
        (Some("sentinel"), _) => "this is a Sentinel; write redis-sentinel://host:port/service",
        _ => return Ok(()),
    };
    Err(StreamError::invalid("the stream URL", problem))
}

/// A name that another program may have chosen. One that we would refuse is shown as well as can be.
fn foreign_name<N>(bytes: &[u8], new: impl Fn(String) -> Result<N>) -> Result<N, Failure> {
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
    new(shown).map_err(|error| Failure::shape(error.to_string()))
}
