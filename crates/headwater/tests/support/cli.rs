//! Runs commands of the real binary against embedded streams, Redis and PostgreSQL, or a server.

use std::io::Write;
use std::process::{Output, Stdio};
use std::time::Instant;

use headwater_testkit::{Database, Postgres, Redis};
use serde_json::Value;

use super::{LIMIT, Server, ServerDir, text};

/// A working directory with the arguments that select the backends or the server.
pub(crate) struct CliFixture {
    pub(crate) dir: ServerDir,
    /// Arguments for the server if there is one, else for the backends.
    pub(crate) args: Vec<String>,
    /// Arguments for the backends.
    pub(crate) direct_args: Vec<String>,
    server: Option<Server>,
    pub(crate) redis: Option<Redis>,
    pub(crate) database: Option<Database>,
}

fn owned(args: &[&str]) -> Vec<String> {
    args.iter().map(|word| (*word).to_owned()).collect()
}

impl CliFixture {
    /// Embedded streams and SQLite, opened by the commands.
    pub(crate) fn embedded() -> Self {
        Self::embedded_at(ServerDir::new().unwrap())
    }

    pub(crate) fn embedded_at(dir: ServerDir) -> Self {
        let direct_args =
            owned(&["--stream-url", "embedded:streams", "--database-url", "sqlite:headwater.db"]);
        let args = direct_args.clone();
        Self { dir, args, direct_args, server: None, redis: None, database: None }
    }

    /// Redis and PostgreSQL, opened by the commands.
    pub(crate) fn redis() -> Self {
        let redis = Redis::start().unwrap();
        let database = Postgres::shared().unwrap().database().unwrap();
        let direct_args = owned(&["--stream-url", &redis.url(), "--database-url", &database.url()]);
        let (dir, args) = (ServerDir::new().unwrap(), direct_args.clone());
        let (redis, database) = (Some(redis), Some(database));
        let cli = Self { dir, args, direct_args, server: None, redis, database };
        cli.stdout(&["migrate"]);
        cli
    }

    /// A server on Redis and PostgreSQL.
    pub(crate) fn with_server() -> Self {
        Self::redis().start_server()
    }

    /// Starts a server on these backends and uses it.
    pub(crate) fn start_server(mut self) -> Self {
        let server = self.spawn_server();
        self.args = owned(&["--url", &format!("http://{}", server.address)]);
        self.server = Some(server);
        self
    }

    fn spawn_server(&self) -> Server {
        let direct_args: Vec<&str> = self.direct_args.iter().map(String::as_str).collect();
        self.dir.serve(&direct_args).unwrap()
    }

    pub(crate) fn has_server(&self) -> bool {
        self.server.is_some()
    }

    pub(crate) fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    /// Calls `ask` while a server runs: the existing one, or one that is stopped afterwards.
    pub(crate) fn while_serving(&self, ask: impl FnOnce(&dyn Fn(&[&str]) -> Output)) {
        match &self.server {
            Some(_) => ask(&|verb| self.run(verb, "")),
            None => {
                let mut server = self.spawn_server();
                let url = format!("http://{}", server.address);
                ask(&|verb| self.run_at(verb, &["--url", &url], ""));
                assert!(server.stop().unwrap().success(), "{}", server.log());
            }
        }
    }

    pub(crate) fn run(&self, verb: &[&str], input: &str) -> Output {
        let to: Vec<&str> = self.args.iter().map(String::as_str).collect();
        self.run_at(verb, &to, input)
    }

    pub(crate) fn run_at(&self, verb: &[&str], to: &[&str], input: &str) -> Output {
        let mut command = self.dir.command(&[verb, to].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // A command may not read its input.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }

    /// The JSON lines of a successful command.
    pub(crate) fn json(&self, verb: &[&str]) -> Vec<Value> {
        self.json_of(verb, "")
    }

    pub(crate) fn json_of(&self, verb: &[&str], input: &str) -> Vec<Value> {
        lines(verb, &self.run(&[verb, &["--json"]].concat(), input))
    }

    /// Standard output of a successful command.
    pub(crate) fn stdout(&self, verb: &[&str]) -> String {
        let output = self.run(verb, "");
        assert!(output.status.success(), "{verb:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Output of a command that fails with this exit code.
    pub(crate) fn fails(&self, verb: &[&str], code: i32) -> String {
        let output = self.run(verb, "");
        let message = text(&output.stdout) + text(&output.stderr).as_str();
        assert_eq!(output.status.code(), Some(code), "{verb:?}: {message}");
        message
    }
}

/// The JSON lines of a successful command.
pub(crate) fn lines(verb: &[&str], output: &Output) -> Vec<Value> {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{verb:?}: {out}{err}");
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Runs a command until `condition` holds for its lines.
pub(crate) fn until(
    ask: &dyn Fn(&[&str]) -> Output,
    verb: &[&str],
    condition: impl Fn(&[Value]) -> bool,
) -> Vec<Value> {
    let verb = [verb, &["--json"]].concat();
    let deadline = Instant::now() + LIMIT;
    loop {
        let found = lines(&verb, &ask(&verb));
        if condition(&found) {
            return found;
        }
        assert!(Instant::now() < deadline, "{verb:?} condition not met: {found:?}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}
