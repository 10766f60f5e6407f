//! The verbs of operators, by the real binary: on streams that it opens itself, embedded and on Redis, and over a server.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use headwater_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::{Value, json};
use support::reach::Reach;
use support::{LIMIT, Place, text};

fn every_verb(reach: &Reach) {
    topics(reach);
    messages(reach);
    groups(reach);
    dead_letters(reach);
    watching(reach);
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
        reach.json(&["consume", "orders", "--group", "g", "--count", "4", "--timeout", "90s"]);
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
        reach.json(&["consume", "orders", "--group", "g", "--count", "1", "--timeout", "90s"]);
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
    // The good one comes last, and ends the verb.
    for (key, payload) in [("b", "bad"), ("c", "bad"), ("a", "good")] {
        reach.json(&["produce", "jobs", "--key", key, "--payload", payload]);
    }
    let script = r#"read -r line; echo "$HEADWATER_KEY $HEADWATER_ATTEMPT $line" >> seen; [ "$line" = good ] || { echo "no $line" >&2; exit 7; }"#;
    let verb =
        ["consume", "jobs", "--group", "g", "--count", "1", "--timeout", "90s", "--exec", script];
    let output = reach.run(&verb, "");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let seen = std::fs::read_to_string(reach.place.path().join("seen")).unwrap();
    assert_eq!(seen, "b 1 bad\nc 1 bad\na 1 good\n");

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
    let back = reach.json(&["consume", "jobs", "--group", "g", "--count", "1", "--timeout", "90s"]);
    assert_eq!((&back[0]["payload"], &back[0]["key"]), (&json!("bad"), &json!("b")));
    reach.refused(&["dlq", "purge", "jobs", "--all"], 2);
    reach.json(&["dlq", "purge", "jobs", "--all", "--yes"]);
    assert!(reach.json(&["dlq", "list", "jobs"]).is_empty());
}

fn watching(reach: &Reach) {
    let lines = reach.json(&["top", "--once", "--every", "100ms"]);
    let topic =
        lines.iter().find(|line| line["topic"] == "jobs" && line["group"].is_null()).unwrap();
    assert_eq!((&topic["partitions"], &topic["length"]), (&json!(1), &json!(4)), "{lines:?}");
    assert!(topic["in_per_second"].is_f64(), "{topic}");
    let group = lines.iter().find(|line| line["topic"] == "jobs" && line["group"] == "g").unwrap();
    assert_eq!((&group["lag"], &group["pending"]), (&json!(0), &json!(0)), "{group}");
    let table = reach.said(&["top", "jobs", "--once", "--every", "100ms"]);
    assert!(table.starts_with("TOPIC  PARTITIONS  LENGTH"), "{table}");
    assert!(!table.contains('\u{1b}'), "{table}");
}

#[test]
fn shells_learn_every_verb() {
    let place = Place::new().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let output = place.run(&["completion", shell]).unwrap();
        assert!(output.status.success());
        let script = text(&output.stdout);
        for word in ["topic", "release", "session", "--retention-age", "--stream-url"] {
            let word = if shell == "fish" { word.trim_start_matches("--") } else { word };
            assert!(script.contains(word), "{shell} does not know {word}");
        }
    }
    let checked = place.run(&["completion", "bash"]).unwrap();
    let script = place.path().join("headwater.bash");
    std::fs::write(&script, &checked.stdout).unwrap();
    let status = std::process::Command::new("bash").arg("-n").arg(&script).status().unwrap();
    assert!(status.success());
}

#[test]
fn settings_are_printed_with_where_they_came_from() {
    let place = Place::new().unwrap();
    let output = place.run(&["config", "--json", "--stream-url", "embedded:here"]).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("embedded:here"));
}

/// Starts a verb that is killed with everything it started.
fn start(reach: &Reach, verb: &[&str]) -> std::process::Child {
    let url = format!("http://{}", reach.the_server().address);
    let mut command = reach.place.command(&[verb, &["--url", &url]].concat());
    command.process_group(0).spawn().unwrap()
}

#[test]
fn a_consumer_over_http_that_is_killed_loses_nothing_and_has_failed_once() {
    let reach = Reach::server();
    reach.json(&["topic", "create", "jobs"]);
    reach.json(&["produce", "jobs", "--key", "k", "--payload", "precious"]);
    let script = "touch started; sleep 600";
    let mut child = start(&reach, &["consume", "jobs", "--group", "g", "--exec", script]);
    let started = reach.place.path().join("started");
    wait_until("the command to start", LIMIT, || started.exists()).unwrap();
    let pending = reach.json(&["pending", "jobs", "--group", "g"]);
    assert_eq!(pending.len(), 1, "{pending:?}");
    let group = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process_group(group, Signal::KILL).unwrap();
    child.wait().unwrap();

    let again =
        reach.json(&["consume", "jobs", "--group", "g", "--count", "1", "--timeout", "90s"]);
    assert_eq!((&again[0]["payload"], &again[0]["attempt"]), (&json!("precious"), &json!(2)));
    assert!(reach.json(&["pending", "jobs", "--group", "g"]).is_empty());
}

#[test]
fn consumers_over_one_server_share_the_partitions_of_a_group() {
    let reach = Reach::server();
    reach.json(&["topic", "create", "pairs", "--partitions", "2"]);
    let url = format!("http://{}", reach.the_server().address);
    let verb = ["consume", "pairs", "--group", "g", "--count", "1", "--url", &url];
    let consumers: Vec<_> = (0..2)
        .map(|_| reach.place.command(&verb).stdout(std::process::Stdio::piped()).spawn().unwrap())
        .collect();
    // A group is there as soon as one has joined.
    let owners = || {
        let output = reach.run(&["group", "describe", "pairs", "g", "--json"], "");
        let group: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let holder = |number: usize| group["partitions"][number]["owner"]["holder"].clone();
        [holder(0), holder(1)]
    };
    wait_until("each to have a partition", LIMIT * 2, || {
        let [first, second] = owners();
        first.is_string() && second.is_string() && first != second
    })
    .unwrap();
    for partition in ["0", "1"] {
        reach.json(&["produce", "pairs", "--partition", partition, "--payload", partition]);
    }
    let mut payloads = Vec::new();
    for consumer in consumers {
        let output = consumer.wait_with_output().unwrap();
        assert!(output.status.success());
        let lines = lines_of(&output);
        assert_eq!(lines.len(), 1, "{lines:?}");
        payloads.push(lines[0]["payload"].clone());
    }
    payloads.sort_by_key(Value::to_string);
    assert_eq!(payloads, ["0", "1"]);
}

#[test]
fn a_consumer_over_http_that_is_stopped_gives_back_what_it_has_and_counts_no_attempt() {
    let reach = Reach::server();
    reach.json(&["topic", "create", "jobs"]);
    reach.json(&["produce", "jobs", "--payload", "first"]);
    reach.json(&["produce", "jobs", "--payload", "second"]);
    // The command for the first goes on until it is told; the second is in hand, and not begun.
    let script = "touch started; until [ -e go ]; do sleep 0.05; done";
    let verb = ["consume", "jobs", "--group", "g", "--exec", script];
    let mut child = start(&reach, &verb);
    let file = |name: &str| reach.place.path().join(name);
    wait_until("the command to start", LIMIT, || file("started").exists()).unwrap();
    let process = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(process, Signal::TERM).unwrap();
    std::fs::write(file("go"), "").unwrap();
    assert!(child.wait().unwrap().success());

    let verb = ["consume", "jobs", "--group", "g", "--count", "1", "--timeout", "90s"];
    let rest = &reach.json(&verb)[0];
    assert_eq!((&rest["payload"], &rest["attempt"]), (&json!("second"), &json!(1)));
    let group = &reach.json(&["group", "list", "jobs"])[0];
    assert_eq!((&group["lag"], &group["pending"]), (&json!(0), &json!(0)));
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
fn every_workload_of_bench_counts_what_arrived() {
    for reach in [Reach::embedded(), Reach::redis()] {
        for workload in ["produce", "consume", "latency", "record", "claim"] {
            let line = &reach.json(&["bench", workload, "--count", "200", "--partitions", "3"])[0];
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
    let redis = reach.redis.as_ref().unwrap();
    redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    let output = reach.run(&["doctor", "--json"], "");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.contains("set `maxmemory-policy noeviction`"), "{said}");

    redis.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).unwrap();
    let to = ["--stream-url", &redis.url(), "--database-url", "sqlite:other.db"];
    reach.run_at(&["ticket", "new", "--title", "t", "--content", "c"], &to, "");
    let output = reach.run_at(&["doctor"], &to, "");
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("workers: none is alive"), "{said}");
    assert!(said.contains("audit: every event is accounted for"), "{said}");
    assert!(said.contains("synchronous is"), "{said}");

    // The Postgres of tests need not survive a power cut.
    let output = reach.run(&["doctor"], "");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("set `fsync = on`"));

    let lines = lines_of(&reach.run(&["doctor", "--json"], ""));
    let fine = |subject: &str, found: &str| {
        let is = |line: &&Value| {
            line["subject"] == subject && line["found"].as_str().unwrap().contains(found)
        };
        let line = lines.iter().find(is);
        assert!(line.is_some_and(|line| line["severity"] == "ok"), "{subject} {found}: {lines:?}");
    };
    fine("streams", "redis 7");
    fine("commands", "Redis 6.2");
    fine("eviction", "noeviction");
    fine("database", "postgres 1");
    fine("migrations", "up to date");
    fine("connections", "in use");
    fine("persistence", "full_page_writes is on");
    fine("clock", "of that of the database");
    fine("clock", "of that of the streams");
    fine("quarantine", "no issue");

    redis.stop().unwrap();
    let output = reach.run(&["doctor"], "");
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stdout));
}

/// The lines of a verb that may end with warnings.
fn lines_of(output: &std::process::Output) -> Vec<Value> {
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_doctor_of_a_server_sees_what_the_server_stands_on() {
    let reach = Reach::embedded().serving();
    let mut found = String::new();
    // The server listens before its worker is known.
    wait_until("its worker to be alive", LIMIT, || {
        let lines = lines_of(&reach.run(&["doctor", "--json"], ""));
        let each = lines.iter().map(|line| format!("{} {}\n", line["subject"], line["found"]));
        found = each.collect();
        found.contains("1 alive")
    })
    .unwrap();
    for words in ["embedded", "sqlite", "journal_mode is wal", "every event is accounted for"] {
        assert!(found.contains(words), "{words}: {found}");
    }
    assert!(reach.said(&["doctor"]).contains("ok"));
}

#[test]
fn a_verb_that_comes_too_soon_waits_as_long_as_the_server_says() {
    let place = Place::new().unwrap();
    let server = place.serve(&["--http-rate-per-second", "1", "--http-rate-burst", "1"]).unwrap();
    let url = format!("http://{}", server.address);
    for _ in 0..3 {
        let output = place.run(&["topic", "list", "--url", &url]).unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
}

#[test]
fn the_streams_of_the_server_are_no_topics_to_make_or_remove() {
    let place = Place::new().unwrap();
    for name in ["ticket_events", "issue_work"] {
        for words in [
            &["topic", "create", name][..],
            &["topic", "grow", name, "--partitions", "3"],
            &["topic", "delete", name, "--yes"],
        ] {
            let output = place.run(words).unwrap();
            let said = text(&output.stderr);
            assert!(!output.status.success(), "{words:?}");
            assert!(said.contains(name) && said.contains("belongs to the server"), "{said}");
        }
    }
}

#[test]
fn a_tail_of_a_topic_that_is_not_there_says_so_and_waits_for_it() {
    let reach = Reach::server();
    let url = format!("http://{}", reach.the_server().address);
    let mut command = reach.place.command(&["tail", "later", "--count", "1", "--url", &url]);
    let mut tail = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut said = std::io::BufReader::new(tail.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).unwrap();
    assert!(line.contains("there is no topic `later` yet; waiting"), "{line}");
    // It may not be waiting yet: one of these comes after.
    let mut ended = None;
    wait_until("the end of the tail", LIMIT, || {
        reach.json(&["produce", "later", "--payload", "x"]);
        ended = tail.try_wait().unwrap();
        ended.is_some()
    })
    .unwrap();
    assert!(ended.unwrap().success());
}

#[test]
fn a_url_that_leads_elsewhere_is_told_from_a_thing_that_is_not_there() {
    let reach = Reach::embedded().serving();
    let address = reach.the_server().address;
    for (url, code, words) in [
        (format!("http://{address}"), 1, "no topic `nothing`"),
        (format!("http://{address}/api/v1"), 1, "there is no Headwater at"),
        (format!("https://{address}"), 3, "speaks http, not https"),
    ] {
        let output = reach.run_at(&["topic", "describe", "nothing"], &["--url", &url], "");
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{url}: {said}");
        assert!(said.contains(words), "{url}: {said}");
    }
}
