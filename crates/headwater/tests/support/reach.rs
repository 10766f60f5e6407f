//! A place, and the words that lead every verb to the same servers.

use std::io::Write;
use std::process::{Output, Stdio};
use std::time::Instant;

use headwater_testkit::{Database, Postgres, Redis};
use serde_json::Value;

use super::{LIMIT, Place, Server, text};

/// A place, and the words that lead every verb to the same servers.
pub(crate) struct Reach {
    pub(crate) place: Place,
    /// To the server if there is one, else to streams and database.
    words: Vec<String>,
    /// To streams and database.
    pub(crate) direct: Vec<String>,
    server: Option<Server>,
    pub(crate) redis: Option<Redis>,
    pub(crate) database: Option<Database>,
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

impl Reach {
    /// Nothing is installed, and the verbs open what there is themselves.
    pub(crate) fn embedded() -> Self {
        Self::embedded_at(Place::new().unwrap())
    }

    pub(crate) fn embedded_at(place: Place) -> Self {
        let direct =
            owned(&["--stream-url", "embedded:streams", "--database-url", "sqlite:headwater.db"]);
        let words = direct.clone();
        Self { place, words, direct, server: None, redis: None, database: None }
    }

    /// On Redis and Postgres, which the verbs open themselves.
    pub(crate) fn redis() -> Self {
        let redis = Redis::start().unwrap();
        let database = Postgres::shared().unwrap().database().unwrap();
        let direct = owned(&["--stream-url", &redis.url(), "--database-url", &database.url()]);
        let (place, words) = (Place::new().unwrap(), direct.clone());
        let (redis, database) = (Some(redis), Some(database));
        Self { place, words, direct, server: None, redis, database }
    }

    /// Over a server, which is on Redis and Postgres.
    pub(crate) fn server() -> Self {
        Self::redis().serving()
    }

    /// The same with a server in between.
    pub(crate) fn serving(mut self) -> Self {
        let server = self.start();
        self.words = owned(&["--url", &format!("http://{}", server.address)]);
        self.server = Some(server);
        self
    }

    fn start(&self) -> Server {
        let direct: Vec<&str> = self.direct.iter().map(String::as_str).collect();
        self.place.serve(&direct).unwrap()
    }

    pub(crate) fn has_server(&self) -> bool {
        self.server.is_some()
    }

    pub(crate) fn the_server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    /// Asks while a server works on this place: that which there is, or one that is stopped afterwards.
    pub(crate) fn while_serving(&self, ask: impl FnOnce(&dyn Fn(&[&str]) -> Output)) {
        match &self.server {
            Some(_) => ask(&|verb| self.run(verb, "")),
            None => {
                let mut server = self.start();
                let url = format!("http://{}", server.address);
                ask(&|verb| self.run_at(verb, &["--url", &url], ""));
                assert!(server.stop().unwrap().success(), "{}", server.log());
            }
        }
    }

    pub(crate) fn run(&self, verb: &[&str], input: &str) -> Output {
        let to: Vec<&str> = self.words.iter().map(String::as_str).collect();
        self.run_at(verb, &to, input)
    }

    pub(crate) fn run_at(&self, verb: &[&str], to: &[&str], input: &str) -> Output {
        let mut command = self.place.command(&[verb, to].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // A verb need not read its input.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }

    /// The lines of a verb that succeeds, as JSON.
    pub(crate) fn json(&self, verb: &[&str]) -> Vec<Value> {
        self.json_of(verb, "")
    }

    pub(crate) fn json_of(&self, verb: &[&str], input: &str) -> Vec<Value> {
        lines(verb, &self.run(&[verb, &["--json"]].concat(), input))
    }

    /// What a verb prints that succeeds, for people.
    pub(crate) fn said(&self, verb: &[&str]) -> String {
        let output = self.run(verb, "");
        assert!(output.status.success(), "{verb:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// What a verb says that ends with this code.
    pub(crate) fn refused(&self, verb: &[&str], code: i32) -> String {
        let output = self.run(verb, "");
        let said = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{verb:?}: {said}");
        said
    }
}

/// The lines of a verb that succeeded, as JSON.
pub(crate) fn lines(verb: &[&str], output: &Output) -> Vec<Value> {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{verb:?}: {out}{err}");
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Asks until `condition` holds of the lines.
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
        assert!(Instant::now() < deadline, "{verb:?} does not become so: {found:?}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}
