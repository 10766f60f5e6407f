//! The verbs of operators, by the real binary: on streams that it opens itself, embedded and on Redis, and over a server.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::io::Write;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use headwater_testkit::Redis;
use serde_json::{Value, json};
use support::Place;

/// A place, and the words that lead every verb to the same streams.
struct Reach {
    place: Place,
    words: Vec<String>,
    /// The same for verbs that open the streams themselves, if they can while a server runs.
    direct: Vec<String>,
    _server: Option<support::Server>,
    _redis: Option<Redis>,
}

impl Reach {
    fn embedded() -> Self {
        let words = vec!["--stream-url".to_owned(), "embedded:streams".to_owned()];
        let place = Place::new().unwrap();
        Self { place, direct: words.clone(), words, _server: None, _redis: None }
    }

    fn redis() -> Self {
        let redis = Redis::start().unwrap();
        let words = vec!["--stream-url".to_owned(), redis.url()];
        let place = Place::new().unwrap();
        Self { place, direct: words.clone(), words, _server: None, _redis: Some(redis) }
    }

    fn server() -> Self {
        let redis = Redis::start().unwrap();
        let place = Place::new().unwrap();
        let direct = vec!["--stream-url".to_owned(), redis.url()];
        let server = place.serve(&["--stream-url", &redis.url()]).unwrap();
        let words = vec!["--url".to_owned(), format!("http://{}", server.address)];
        Self { place, words, direct, _server: Some(server), _redis: Some(redis) }
    }

    fn run(&self, verb: &[&str], input: &str) -> Output {
        let to = if verb[0] == "consume" { &self.direct } else { &self.words };
        let to: Vec<&str> = to.iter().map(String::as_str).collect();
        let mut command = self.place.command(&[verb, &to].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    /// The lines of a verb that succeeds, as JSON.
    fn json(&self, verb: &[&str]) -> Vec<Value> {
        self.json_of(verb, "")
    }

    /// The same for a verb that prints JSON anyway.
    fn bench(&self, verb: &[&str]) -> Vec<Value> {
        let output = self.run(verb, "");
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{verb:?}: {out}{err}");
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn json_of(&self, verb: &[&str], input: &str) -> Vec<Value> {
        let output = self.run(&[verb, &["--json"]].concat(), input);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{verb:?}: {out}{err}");
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// What a verb says that ends with this code.
    fn refused(&self, verb: &[&str], code: i32) -> String {
        let output = self.run(verb, "");
        let said = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{verb:?}: {said}");
        said
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn every_verb(reach: &Reach) {
    topics(reach);
    messages(reach);
    groups(reach);
    dead_letters(reach);
}

fn topics(reach: &Reach) {
    let created =
        reach.json(&["topic", "create", "orders", "--partitions", "4", "--retention-age", "7d"]);
    assert_eq!(created, [json!({"name": "orders", "created": true})]);
    let again =
        reach.json(&["topic", "create", "orders", "--partitions", "4", "--retention-age", "7d"]);
    assert_eq!(again, [json!({"name": "orders", "created": false})]);
    let said = reach.refused(&["topic", "create", "orders", "--partitions", "5"], 1);
    assert!(said.contains("`orders` exists with other settings"), "{said}");
    let said = reach.refused(&["topic", "create", "none", "--partitions", "0"], 2);
    assert!(said.contains("partition"), "{said}");

    let list = reach.json(&["topic", "list"]);
    assert_eq!((&list[0]["name"], &list[0]["partitions"]), (&json!("orders"), &json!(4)));
    let table = reach.run(&["topic", "list"], "");
    assert!(
        text(&table.stdout).starts_with("NAME    PARTITIONS  LENGTH"),
        "{}",
        text(&table.stdout)
    );

    reach.json(&["topic", "grow", "orders", "--partitions", "8"]);
    let described = &reach.json(&["topic", "describe", "orders"])[0];
    assert_eq!(described["partitions"].as_array().unwrap().len(), 8);
    assert_eq!(described["partitions"][1]["stream_key"], "stream:topic:orders:p:1");
    assert_eq!(described["policies"]["retention_age_ms"], 7 * 24 * 3600 * 1000_u64);
    let said = reach.refused(&["topic", "describe", "nothing"], 1);
    assert!(said.contains("no topic `nothing`"), "{said}");

    reach.json(&["topic", "create", "gone/away ü"]);
    let said = reach.refused(&["topic", "delete", "gone/away ü"], 2);
    assert!(said.contains("--yes"), "{said}");
    assert_eq!(
        reach.json(&["topic", "delete", "gone/away ü", "--yes"]),
        [json!({"deleted": true})]
    );
    reach.refused(&["topic", "delete", "gone/away ü", "--yes"], 1);
}

fn messages(reach: &Reach) {
    let sent = reach.json(&[
        "produce",
        "orders",
        "--key",
        "ada",
        "--header",
        "kind=new",
        "--payload",
        "espresso",
        "--id",
        "1",
    ]);
    assert_eq!(sent[0]["duplicate"], false);
    let again = reach.json(&[
        "produce",
        "orders",
        "--key",
        "ada",
        "--header",
        "kind=new",
        "--payload",
        "espresso",
        "--id",
        "1",
    ]);
    assert_eq!((&again[0]["id"], &again[0]["duplicate"]), (&sent[0]["id"], &json!(true)));
    let lines = reach.json_of(&["produce", "orders", "--payload", "-"], "one\ntwo\nthree\n");
    assert_eq!(lines.len(), 3);

    let consumed =
        reach.json(&["consume", "orders", "--group", "g", "--count", "4", "--timeout", "20s"]);
    assert_eq!(consumed.len(), 4, "{consumed:?}");
    let first = consumed.iter().find(|message| message["payload"] == "espresso").unwrap();
    assert_eq!(first["id"], sent[0]["id"]);
    assert_eq!((&first["key"], &first["attempt"]), (&json!("ada"), &json!(1)));
    assert_eq!(first["headers"]["kind"], "new");
    // Acknowledged after printing: nothing comes again.
    let none = reach.json(&["consume", "orders", "--group", "g", "--timeout", "500ms"]);
    assert!(none.is_empty(), "{none:?}");

    let tail = reach.json(&["tail", "orders", "--from", "beginning", "--count", "4"]);
    let payloads: Vec<&Value> = tail.iter().map(|message| &message["payload"]).collect();
    assert_eq!(payloads, ["espresso", "one", "two", "three"]);

    let started = Instant::now();
    let delayed = reach.json(&["produce", "orders", "--payload", "later", "--delay", "1s"]);
    assert!(delayed[0]["delayed_id"].is_string(), "{delayed:?}");
    let later =
        reach.json(&["consume", "orders", "--group", "g", "--count", "1", "--timeout", "30s"]);
    assert_eq!(later[0]["payload"], "later");
    assert!(started.elapsed() >= Duration::from_secs(1));
}

fn groups(reach: &Reach) {
    let list = reach.json(&["group", "list", "orders"]);
    assert_eq!(
        (&list[0]["group"], &list[0]["lag"], &list[0]["pending"]),
        (&json!("g"), &json!(0), &json!(0))
    );
    reach.refused(&["group", "describe", "orders", "nobody"], 1);

    let dry = &reach.json(&["group", "reset", "orders", "g", "--to", "beginning", "--dry-run"])[0];
    assert_eq!((&dry["again"]["count"], &dry["is_done"]), (&json!(5), &json!(false)));
    let said = reach.refused(&["group", "reset", "orders", "g", "--to", "yesterday", "--yes"], 2);
    assert!(said.contains("`beginning`, `end`, an entry id or a time"), "{said}");
    let done =
        &reach.json(&["group", "reset", "orders", "g", "--to", "beginning", "--yes", "--force"])[0];
    assert_eq!(done["is_done"], true);
    assert_eq!(reach.json(&["group", "describe", "orders", "g"])[0]["lag"], 5);

    let pending = reach.json(&["pending", "orders", "--group", "g"]);
    assert!(pending.is_empty(), "{pending:?}");
    let trimmed = &reach.json(&["topic", "trim", "orders", "--count", "0", "--yes"])[0];
    assert_eq!((&trimmed["removed"], &trimmed["held_back"]), (&json!(0), &json!(true)));
    let trimmed = &reach.json(&["topic", "trim", "orders", "--count", "0", "--yes", "--force"])[0];
    assert_eq!(trimmed["removed"], 5);
}

fn dead_letters(reach: &Reach) {
    reach.json(&["topic", "create", "jobs", "--max-retries", "0"]);
    for (key, payload) in [("a", "good"), ("b", "bad"), ("c", "bad")] {
        reach.json(&["produce", "jobs", "--key", key, "--payload", payload]);
    }
    let script = r#"read -r line; echo "$HEADWATER_KEY $HEADWATER_ATTEMPT $line" >> seen; [ "$line" = good ] || { echo "no $line" >&2; exit 7; }"#;
    let output =
        reach.run(&["consume", "jobs", "--group", "g", "--timeout", "3s", "--exec", script], "");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let seen = std::fs::read_to_string(reach.place.path().join("seen")).unwrap();
    assert_eq!(seen, "a 1 good\nb 1 bad\nc 1 bad\n");

    let letters = reach.json(&["dlq", "list", "jobs"]);
    assert_eq!(letters.len(), 2, "{letters:?}");
    assert!(letters[0]["reason"].as_str().unwrap().contains("no bad"), "{letters:?}");
    assert_eq!(reach.json(&["dlq", "list", "jobs", "--key", "c"]).len(), 1);
    let id = letters[0]["id"].as_str().unwrap();
    let shown = &reach.json(&["dlq", "show", "jobs", id])[0];
    assert_eq!((&shown["payload"], &shown["key"]), (&json!("bad"), &json!("b")));

    reach.refused(&["dlq", "replay", "jobs"], 2);
    let dry = &reach.json(&["dlq", "replay", "jobs", "--all", "--dry-run"])[0];
    assert_eq!((&dry["replayed"], &dry["is_done"]), (&json!(2), &json!(false)));
    assert_eq!(reach.json(&["dlq", "replay", "jobs", id])[0]["replayed"], 1);
    let back = reach.json(&["consume", "jobs", "--group", "g", "--count", "1", "--timeout", "20s"]);
    assert_eq!((&back[0]["payload"], &back[0]["key"]), (&json!("bad"), &json!("b")));
    reach.refused(&["dlq", "purge", "jobs", "--all"], 2);
    reach.json(&["dlq", "purge", "jobs", "--all", "--yes"]);
    assert!(reach.json(&["dlq", "list", "jobs"]).is_empty());
}

#[test]
fn every_verb_on_embedded_streams() {
    every_verb(&Reach::embedded());
}

#[test]
fn every_verb_on_redis() {
    every_verb(&Reach::redis());
}

#[test]
fn every_verb_over_a_server() {
    every_verb(&Reach::server());
}

#[test]
fn wrong_words_are_exit_code_2_with_a_usage_line_and_a_hint() {
    let reach = Reach::embedded();
    for (verb, hint) in [
        (&["topic", "cretae", "x"][..], "Usage"),
        (&["topic", "create"][..], "Usage"),
        (&["produce", "orders", "--delay", "soon", "--payload", "x"][..], "such as 5s"),
        (&["produce", "orders", "--header", "x", "--payload", "x"][..], "NAME=VALUE"),
        (&["consume", "orders"][..], "--group"),
        (&["topic", "trim", "orders"][..], "--count"),
        (&["tail", "orders", "--from", "yesterday"][..], "such as"),
    ] {
        let said = reach.refused(verb, 2);
        assert!(said.contains(hint), "{verb:?}: {said}");
    }
}

#[test]
fn a_server_that_cannot_be_reached_is_exit_code_3_within_its_deadline() {
    // A port that nobody listens on: it was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let place = Place::new().unwrap();
    for words in [
        vec!["topic", "list", "--url"],
        vec!["topic", "list", "--stream-url"],
        vec!["consume", "orders", "--group", "g", "--stream-url"],
    ] {
        let scheme = if words.contains(&"--url") { "http" } else { "redis" };
        let url = format!("{scheme}://127.0.0.1:{port}");
        let started = Instant::now();
        let output = place.run(&[&words[..], &[&url]].concat()).unwrap();
        assert_eq!(output.status.code(), Some(3), "{words:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("cannot be reached"), "{}", text(&output.stderr));
        assert!(started.elapsed() < Duration::from_secs(30), "{words:?}");
    }
}

#[test]
fn every_workload_of_bench_counts_what_arrived() {
    for reach in [Reach::embedded(), Reach::redis()] {
        for workload in ["produce", "consume", "latency", "record", "claim"] {
            let line = &reach.bench(&["bench", workload, "--count", "200", "--partitions", "3"])[0];
            assert_eq!(
                (&line["workload"], &line["count"]),
                (&json!(workload), &json!(200)),
                "{line}"
            );
            assert_eq!((&line["lost"], &line["duplicated"]), (&json!(0), &json!(0)), "{line}");
            assert!(line["per_second"].as_f64().unwrap() > 0.0, "{line}");
        }
        // The topics of the runs are gone.
        assert!(reach.json(&["topic", "list"]).is_empty());
    }
}

#[test]
fn the_doctor_says_what_to_change() {
    let reach = Reach::redis();
    let redis = reach._redis.as_ref().unwrap();
    redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    let output = reach.run(&["doctor", "--json"], "");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.contains("set `maxmemory-policy noeviction`"), "{said}");

    redis.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).unwrap();
    let output = reach.run(&["doctor"], "");
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("workers: none is alive"), "{said}");
    assert!(said.contains("audit: every event is accounted for"), "{said}");

    redis.stop().unwrap();
    let output = reach.run(&["doctor"], "");
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stdout));
}
