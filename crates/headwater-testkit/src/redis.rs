//! A real Redis server for one test, or one shared by the test run.
//!
//! Upstream: tests, `cluster` and `sentinel`, whose nodes are such servers. Downstream: `process` runs it,
//! `resp` talks to it.
//! Guarantees: a started server answers; a restarted one has the same port and data.

mod builder;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

pub use self::builder::{Persistence, RedisBuilder};
use crate::ports::Port;
use crate::process::Process;
use crate::resp::{RedisConnection, RedisReply};
use crate::shared;
use crate::temp_server_dir::TempServerDir;
use crate::wait::{SERVER_LIMIT, poll};

/// A Redis server, killed and removed when dropped, unless it is the shared one.
#[derive(Debug)]
pub struct Redis {
    server: Server,
    address: SocketAddr,
    credentials: RedisCredentials,
    _port: Option<Port>,
}

#[derive(Debug)]
enum Server {
    Own(Process),
    /// Shared with other tests; must not be killed or paused.
    Shared {
        pid: u32,
    },
}

/// Credentials and certificate of a server.
#[derive(Debug, Default)]
struct RedisCredentials {
    user: Option<(String, String)>,
    password: Option<String>,
    authority: Option<PathBuf>,
    client: Option<(PathBuf, PathBuf)>,
    socket: Option<PathBuf>,
}

impl Redis {
    /// Starts a server of your own without persistence and without authentication.
    pub fn start() -> Result<Redis> {
        Redis::builder().start()
    }

    /// Sets up a server of your own.
    pub fn builder() -> RedisBuilder {
        RedisBuilder::default()
    }

    /// The server all tests of this run share; use [`unique`](crate::unique) names in it.
    pub fn shared() -> Result<Redis> {
        let start =
            |server_dir: &Arc<TempServerDir>| Ok(Redis::builder().start_in(server_dir)?.detach());
        shared::server("redis", start, Redis::open_shared)
    }

    /// The URL to give to a client, with user and password if they are needed.
    pub fn url(&self) -> String {
        self.url_at(self.address)
    }

    /// The same URL with another address, for example that of a [`Proxy`](crate::Proxy).
    pub fn url_at(&self, address: SocketAddr) -> String {
        let scheme = if self.credentials.authority.is_some() { "rediss" } else { "redis" };
        let login = match (&self.credentials.user, &self.credentials.password) {
            (Some((name, password)), _) => format!("{name}:{password}@"),
            (None, Some(password)) => format!(":{password}@"),
            (None, None) => String::new(),
        };
        format!("{scheme}://{login}{address}/")
    }

    /// The address it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// The process id; an error if the server was killed or stopped.
    pub fn pid(&self) -> Result<u32> {
        match &self.server {
            Server::Own(process) => process.pid(),
            Server::Shared { pid } => Ok(*pid),
        }
    }

    /// The certificate of the authority to trust, as a PEM file, if the server speaks TLS.
    pub fn ca_certificate(&self) -> Option<&Path> {
        self.credentials.authority.as_deref()
    }

    /// A client certificate and its key, as PEM files, if the server speaks TLS.
    pub fn client_certificate(&self) -> Option<(&Path, &Path)> {
        let (certificate, key) = self.credentials.client.as_ref()?;
        Some((certificate, key))
    }

    /// The unix socket it listens on, if it has one.
    pub fn socket(&self) -> Option<&Path> {
        self.credentials.socket.as_deref()
    }

    /// Sends one command on a new connection, as the default user.
    pub fn command(&self, words: &[&str]) -> Result<RedisReply> {
        self.connect()?.command(words)
    }

    /// Opens a connection as the default user, for several commands.
    pub fn connect(&self) -> Result<RedisConnection> {
        let mut connection = match &self.credentials.socket {
            Some(socket) => RedisConnection::open_unix(socket)?,
            None => RedisConnection::open(self.address)?,
        };
        if let Some(password) = &self.credentials.password {
            connection.command(&["AUTH", password])?.ok()?;
        }
        Ok(connection)
    }

    /// Kills the server with SIGKILL and waits until it is gone.
    pub fn kill9(&self) -> Result<()> {
        self.process()?.kill9()
    }

    /// Freezes the server (SIGSTOP): connections stay open, nothing is answered.
    pub fn pause(&self) -> Result<()> {
        self.process()?.pause()
    }

    /// Resumes a paused server (SIGCONT).
    pub fn resume(&self) -> Result<()> {
        self.process()?.resume()
    }

    /// Shuts the server down gracefully, as SHUTDOWN does, and waits until it has exited.
    pub fn stop(&self) -> Result<()> {
        self.process()?.stop(Signal::TERM)
    }

    /// Starts the server again with the same port and data; a running one is stopped first.
    pub fn restart(&self) -> Result<()> {
        let process = self.process()?;
        if process.is_running() {
            process.stop(Signal::TERM)?;
        }
        process.respawn()?;
        self.wait_until_ready()
    }

    /// Waits until this process answers PING, which it does not while it loads its data.
    pub(crate) fn wait_until_ready(&self) -> Result<()> {
        let process = self.process()?;
        let pid = format!("process_id:{}\r\n", process.pid()?);
        let answers = || {
            process.check()?;
            let ping = || -> Result<bool> {
                let mut connection = self.connect()?;
                let ours = connection.command(&["INFO", "server"])?.text().contains(&pid);
                Ok(ours && connection.command(&["PING"])?.text() == "PONG")
            };
            Ok(ping().unwrap_or(false).then_some(()))
        };
        poll("Redis to answer PING", SERVER_LIMIT, answers).with_context(|| process.log_tail())
    }

    /// Leaves the server running; the text is for [`Redis::open_shared`].
    pub(crate) fn detach(self) -> String {
        let Server::Own(process) = &self.server else { return String::new() };
        let pid = process.pid().unwrap_or_default();
        process.detach();
        format!("{} {pid}", self.address)
    }

    /// A handle to a server that another process may have started.
    pub(crate) fn open_shared(text: &str) -> Result<Redis> {
        let (address, pid) = text.split_once(' ').context("not an address and a process id")?;
        let (address, pid) = (address.parse()?, pid.parse()?);
        let server = Server::Shared { pid };
        let redis =
            Redis { server, address, credentials: RedisCredentials::default(), _port: None };
        redis.command(&["PING"])?.ok()?;
        Ok(redis)
    }

    fn process(&self) -> Result<&Process> {
        match &self.server {
            Server::Own(process) => Ok(process),
            Server::Shared { .. } => {
                bail!("this server is shared with other tests, start your own")
            }
        }
    }
}
