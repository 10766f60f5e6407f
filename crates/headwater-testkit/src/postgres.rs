//! A real Postgres server, and one database per test in it.
//!
//! Upstream: tests. Downstream: `process` runs the server; `psql` talks to it.
//! Guarantees: a created database is empty and belongs to one test; committed data survives `kill9`. `fsync` is off,
//! since tests do not need to survive a power failure.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Signal, geteuid};

use crate::ports::{Port, with_free_ports};
use crate::process::{Launch, Process, ProcessOutput, User, find_program};
use crate::random::unique;
use crate::shared;
use crate::temp_server_dir::TempServerDir;
use crate::wait::{SERVER_LIMIT, poll};
use crate::wall_clock::WallClock;

/// Debian installs the server programs outside PATH, in one directory per version.
const DEBIAN_VERSIONS: &str = "/usr/lib/postgresql";
/// Enough for the pools of many tests at the same time.
const CONNECTIONS_MAX: u32 = 300;
const SUPERUSER: &str = "postgres";

/// A Postgres server, killed and removed when dropped, unless it is the shared one.
#[derive(Debug)]
pub struct Postgres {
    // `None` if the server is shared with other tests and must not be killed or paused.
    own: Option<OwnServer>,
    address: SocketAddr,
    pid: u32,
}

#[derive(Debug)]
struct OwnServer {
    process: Process,
    data: PathBuf,
    _port: Port,
}

impl Postgres {
    /// Starts a server of your own.
    pub fn start() -> Result<Postgres> {
        Postgres::start_in(&Arc::new(TempServerDir::private()?), vec![])
    }

    /// Starts a server of your own that uses `clock`.
    pub fn start_at(clock: &WallClock) -> Result<Postgres> {
        Postgres::start_in(&Arc::new(TempServerDir::private()?), clock.environment())
    }

    /// The server all tests of this run share; each takes its own [`database`](Postgres::database).
    pub fn shared() -> Result<Postgres> {
        let start = |server_dir: &Arc<TempServerDir>| {
            let postgres = Postgres::start_in(server_dir, vec![])?;
            postgres.own()?.process.detach();
            Ok(format!("{} {}", postgres.address, postgres.pid))
        };
        shared::server("postgres", start, |text| {
            let (address, pid) = text.split_once(' ').context("not an address and a process id")?;
            let postgres = Postgres { own: None, address: address.parse()?, pid: pid.parse()? };
            std::net::TcpStream::connect(postgres.address)?;
            Ok(postgres)
        })
    }

    /// Creates an empty database for one test.
    pub fn database(&self) -> Result<Database> {
        let name = unique("test");
        query(self.address, "postgres", &format!("CREATE DATABASE {name} TEMPLATE template0"))?;
        Ok(Database { address: self.address, name })
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
        match &self.own {
            Some(own) => own.process.pid(),
            None => Ok(self.pid),
        }
    }

    /// Kills the server and all its backends with SIGKILL and waits until they are gone.
    pub fn kill9(&self) -> Result<()> {
        self.own()?.process.kill9()
    }

    /// Freezes the server and all its backends (SIGSTOP): connections stay open, nothing is answered.
    pub fn pause(&self) -> Result<()> {
        self.own()?.process.pause()
    }

    /// Resumes a paused server (SIGCONT).
    pub fn resume(&self) -> Result<()> {
        self.own()?.process.resume()
    }

    /// Shuts the server down gracefully, closing its connections, and waits until it has exited.
    pub fn stop(&self) -> Result<()> {
        self.own()?.process.stop(Signal::INT)
    }

    /// Starts the server again with the same port and data; a running one is stopped first.
    pub fn restart(&self) -> Result<()> {
        let own = self.own()?;
        if own.process.is_running() {
            self.stop()?;
        }
        own.process.respawn()?;
        own.wait_until_ready()
    }

    fn start_in(
        server_dir: &Arc<TempServerDir>,
        environment: Vec<(String, String)>,
    ) -> Result<Postgres> {
        let initdb = program("initdb")?;
        let user = if geteuid().is_root() { Some(unprivileged_user()?) } else { None };
        let directory = server_dir.new_directory("postgres")?;
        if let Some(user) = user {
            chown(&directory, Some(user.uid), Some(user.gid))?;
        }
        let data = directory.join("data");
        initialise(server_dir, &initdb, &directory, &data, user)?;

        with_free_ports(|| {
            let port = Port::for_server()?;
            let settings = [
                "listen_addresses=127.0.0.1".to_string(),
                "unix_socket_directories=".to_string(),
                format!("port={}", port.number),
                format!("max_connections={CONNECTIONS_MAX}"),
                "fsync=off".to_string(),
                // Files in the data directory; other kinds of shared memory would outlive a killed server.
                "dynamic_shared_memory_type=mmap".to_string(),
            ];
            let mut arguments = vec!["-D".into(), data.clone().into_os_string()];
            for setting in settings {
                arguments.extend(["-c".into(), setting.into()]);
            }
            let launch = Launch {
                program: program("postgres")?,
                arguments,
                environment: environment.clone(),
                user,
                output: ProcessOutput::Log,
            };
            let address = port.address();
            let process = Process::spawn(server_dir, &directory, launch)?;
            let own = OwnServer { process, data: data.clone(), _port: port };
            own.wait_until_ready()?;
            Ok(Postgres { pid: own.process.pid()?, own: Some(own), address })
        })
    }

    fn own(&self) -> Result<&OwnServer> {
        self.own.as_ref().context("this server is shared with other tests, start your own")
    }
}

impl OwnServer {
    /// Waits until the server has written into its pid file that it is ready, as `pg_ctl` does.
    fn wait_until_ready(&self) -> Result<()> {
        let pid = self.process.pid()?.to_string();
        let is_ready = || {
            self.process.check()?;
            let file = fs::read_to_string(self.data.join("postmaster.pid")).unwrap_or_default();
            let lines: Vec<&str> = file.lines().map(str::trim).collect();
            let ready = lines.first() == Some(&pid.as_str()) && lines.get(7) == Some(&"ready");
            Ok(ready.then_some(()))
        };
        let outcome = poll("Postgres to be ready", SERVER_LIMIT, is_ready);
        outcome.with_context(|| self.process.log_tail())
    }
}

/// A database of one test, removed when dropped.
#[derive(Debug)]
pub struct Database {
    address: SocketAddr,
    name: String,
}

impl Database {
    /// The URL to give to a client.
    pub fn url(&self) -> String {
        self.url_at(self.address)
    }

    /// The same URL with another address, for example that of a [`Proxy`](crate::Proxy).
    pub fn url_at(&self, address: SocketAddr) -> String {
        format!("postgres://{SUPERUSER}@{address}/{}", self.name)
    }

    /// The name, unique in the server.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs SQL through `psql`; rows are lines, columns are separated by `|`.
    pub fn query(&self, sql: &str) -> Result<String> {
        query(self.address, &self.name, sql)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // Fails if the server is gone or paused; the database is then removed with the server.
        let sql = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        let _ = query(self.address, "postgres", &sql);
    }
}

fn query(address: SocketAddr, database: &str, sql: &str) -> Result<String> {
    let output = Command::new(program("psql")?)
        .args(["--no-psqlrc", "--quiet", "--tuples-only", "--no-align"])
        .args(["--set", "ON_ERROR_STOP=1", "--username", SUPERUSER, "--dbname", database])
        .args(["--host", &address.ip().to_string(), "--port", &address.port().to_string()])
        .args(["--command", sql])
        .env("PGCONNECT_TIMEOUT", "60")
        .stdin(Stdio::null())
        .output()?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "psql failed: {problem}");
    Ok(String::from_utf8(output.stdout)?.trim_end().to_string())
}

/// Runs `initdb` as a managed process, so that it is killed with the test.
fn initialise(
    server_dir: &Arc<TempServerDir>,
    initdb: &Path,
    directory: &Path,
    data: &Path,
    user: Option<User>,
) -> Result<()> {
    let options = ["--username", SUPERUSER, "--auth", "trust", "--encoding", "UTF8"];
    let more = ["--locale", "C", "--no-sync", "--no-instructions", "--pgdata"];
    let arguments = options.iter().chain(&more).map(Into::into);
    let launch = Launch {
        program: initdb.to_path_buf(),
        arguments: arguments.chain([data.into()]).collect(),
        environment: vec![],
        user,
        output: ProcessOutput::Log,
    };
    let process = Process::spawn(server_dir, directory, launch)?;
    let status = poll("initdb to finish", SERVER_LIMIT, || process.try_wait())?;
    ensure!(status.success(), "initdb failed: {status}\n{}", process.log_tail());
    Ok(())
}

/// Postgres refuses to run as root.
fn unprivileged_user() -> Result<User> {
    let accounts = fs::read_to_string("/etc/passwd")?;
    let find = |wanted: &str| {
        accounts.lines().map(|line| line.split(':').collect::<Vec<_>>()).find_map(|fields| {
            let [name, _, uid, gid, ..] = fields[..] else { return None };
            let user = || Some(User { uid: uid.parse().ok()?, gid: gid.parse().ok()? });
            if name == wanted { user() } else { None }
        })
    };
    match find("postgres").or_else(|| find("nobody")) {
        Some(user) => Ok(user),
        None => {
            bail!("Postgres refuses to run as root, and there is no user `postgres` or `nobody`")
        }
    }
}

/// A program of Postgres: of the newest version that Debian keeps, or from PATH.
fn program(name: &str) -> Result<PathBuf> {
    let versions = fs::read_dir(DEBIAN_VERSIONS).into_iter().flatten().flatten();
    let mut programs: Vec<PathBuf> =
        versions.map(|version| version.path().join("bin").join(name)).collect();
    programs.sort();
    // The one in Debian's PATH is a slow wrapper script.
    let newest = programs.into_iter().rev().find(|program| program.is_file());
    newest.map_or_else(|| find_program(name, &[]), Ok)
}
