//! Configuration of a Redis server, and its configuration file.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;

use super::{Redis, RedisCredentials, Server};
use crate::ports::{Port, with_free_ports};
use crate::process::{Launch, Process, ProcessOutput, find_program};
use crate::temp_server_dir::TempServerDir;
use crate::tls;
use crate::wall_clock::WallClock;

/// The path of the server program, to run the tests on another version of Redis or on Valkey.
const PROGRAM_VARIABLE: &str = "HEADWATER_REDIS_SERVER";

/// What data survives a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Persistence {
    /// Nothing.
    #[default]
    None,
    /// An append-only file, written to disk every second.
    EverySecond,
    /// An append-only file, written to disk before each reply.
    Always,
}

/// Sets up a [`Redis`] server; made by [`Redis::builder`].
#[derive(Debug, Clone, Default)]
pub struct RedisBuilder {
    persistence: Persistence,
    settings: Vec<(String, String)>,
    user: Option<(String, String, String)>,
    password: Option<String>,
    tls: bool,
    certificate_name: Option<String>,
    client_certificates: bool,
    unix_socket: bool,
    sentinel: bool,
    environment: Vec<(String, String)>,
}

impl RedisBuilder {
    /// What survives a restart; nothing by default.
    pub fn persistence(mut self, persistence: Persistence) -> Self {
        self.persistence = persistence;
        self
    }

    /// The flags of `notify-keyspace-events`, such as `Ex`.
    pub fn notify(self, flags: &str) -> Self {
        self.setting("notify-keyspace-events", &format!("\"{flags}\""))
    }

    /// Adds an ACL user that `url()` uses; `command()` still uses the default user.
    ///
    /// Name and password are not escaped in the URL: use letters and digits only.
    pub fn user(mut self, name: &str, password: &str, rules: &str) -> Self {
        self.user = Some((name.to_string(), password.to_string(), rules.to_string()));
        self
    }

    /// Sets a password for the default user; `url()` and `command()` use it.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_string());
        self
    }

    /// Accepts only TLS on the port, with a certificate generated for this server.
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Issues the certificate for this name instead of the loopback address.
    pub fn certificate_name(mut self, name: &str) -> Self {
        self.certificate_name = Some(name.to_string());
        self
    }

    /// Accepts only clients with a certificate, such as [`Redis::client_certificate`].
    pub fn client_certificates(mut self) -> Self {
        self.client_certificates = true;
        self
    }

    /// Listens on a unix socket too, see [`Redis::socket`].
    pub fn unix_socket(mut self) -> Self {
        self.unix_socket = true;
        self
    }

    /// Refuses writes beyond this much memory (policy `noeviction`).
    pub fn maxmemory(self, bytes: u64) -> Self {
        self.setting("maxmemory", &bytes.to_string()).setting("maxmemory-policy", "noeviction")
    }

    /// Uses this wall clock.
    pub fn clock(mut self, clock: &WallClock) -> Self {
        self.environment = clock.environment();
        for (name, value) in &mut self.environment {
            if name == "LD_PRELOAD" {
                // Redis with jemalloc does not start with libfaketime: each needs the other first. Use the allocator of libc.
                value.push_str(":libc.so.6");
            }
        }
        self
    }

    /// Any line of `redis.conf`, quoted by the caller where the value needs it.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_string(), value.to_string()));
        self
    }

    /// Starts the server and waits until it answers.
    pub fn start(self) -> Result<Redis> {
        self.start_in(&Arc::new(TempServerDir::private()?))
    }

    pub(crate) fn sentinel(mut self) -> Self {
        self.sentinel = true;
        self
    }

    pub(crate) fn start_in(&self, server_dir: &Arc<TempServerDir>) -> Result<Redis> {
        let is_cluster_node = self.settings.iter().any(|(name, _)| name == "cluster-enabled");
        with_free_ports(|| {
            let port = if is_cluster_node { Port::for_cluster_node() } else { Port::for_server() };
            let redis = self.launch(server_dir, port?)?;
            redis.wait_until_ready()?;
            Ok(redis)
        })
    }

    /// Starts the server on this port and does not wait.
    pub(crate) fn launch(&self, server_dir: &Arc<TempServerDir>, port: Port) -> Result<Redis> {
        let program = match std::env::var_os(PROGRAM_VARIABLE).filter(|path| !path.is_empty()) {
            Some(path) => path.into(),
            None => find_program("redis-server", &[])?,
        };
        let directory = server_dir.new_directory("redis")?;
        let names = match &self.certificate_name {
            Some(name) => vec![name.clone()],
            None => vec!["127.0.0.1".to_string(), "localhost".to_string()],
        };
        let tls = if self.tls { Some(tls::write(&directory, &names)?) } else { None };
        // `command()` has no TLS library and uses the socket.
        let socket = (self.tls || self.unix_socket).then(|| directory.join("socket"));
        let file = directory.join("redis.conf");
        fs::write(&file, self.configuration(&directory, port.number, tls.as_ref()))?;

        let mut arguments = vec![file.into_os_string()];
        if self.sentinel {
            arguments.push("--sentinel".into());
        }
        let launch = Launch {
            program,
            arguments,
            environment: self.environment.clone(),
            user: None,
            output: ProcessOutput::Log,
        };
        Ok(Redis {
            server: Server::Own(Process::spawn(server_dir, &directory, launch)?),
            address: port.address(),
            credentials: RedisCredentials {
                user: self.user.as_ref().map(|(name, word, _)| (name.clone(), word.clone())),
                password: self.password.clone(),
                client: tls.as_ref().map(|files| files.client.clone()),
                authority: tls.map(|files| files.authority),
                socket,
            },
            _port: Some(port),
        })
    }

    fn configuration(&self, directory: &Path, port: u16, tls: Option<&tls::Files>) -> String {
        let quoted = |path: &Path| format!("\"{}\"", path.display());
        let mut lines = vec![
            "bind 127.0.0.1".to_string(),
            format!("dir {}", quoted(directory)),
            "protected-mode no".to_string(),
            // Without this, the primary waits five seconds for further replicas.
            "repl-diskless-sync-delay 0".to_string(),
        ];
        match tls {
            None => lines.push(format!("port {port}")),
            Some(files) => lines.extend([
                format!("port 0\ntls-port {port}"),
                format!("tls-auth-clients {}", if self.client_certificates { "yes" } else { "no" }),
                format!("tls-ca-cert-file {}", quoted(&files.authority)),
                format!("tls-cert-file {}", quoted(&files.certificate)),
                format!("tls-key-file {}", quoted(&files.key)),
            ]),
        }
        if self.tls || self.unix_socket {
            lines.push(format!("unixsocket {}", quoted(&directory.join("socket"))));
        }
        if !self.sentinel {
            lines.push("save \"\"".to_string());
            lines.push(match self.persistence {
                Persistence::None => "appendonly no".to_string(),
                Persistence::EverySecond => "appendonly yes\nappendfsync everysec".to_string(),
                Persistence::Always => "appendonly yes\nappendfsync always".to_string(),
            });
        }
        if let Some((name, password, rules)) = &self.user {
            lines.push(format!("user {name} on >{password} {rules}"));
        }
        if let Some(password) = &self.password {
            lines.push(format!("requirepass \"{password}\""));
        }
        lines.extend(self.settings.iter().map(|(name, value)| format!("{name} {value}")));
        lines.join("\n") + "\n"
    }
}
