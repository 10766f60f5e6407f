//! Operator commands on queues: on embedded streams, on Redis, and over a server.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use headwater_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::{Value, json};
use support::cli::CliFixture;
use support::{LIMIT, ServerDir, text};

fn every_verb(cli: &CliFixture) {
    topics(cli);
    messages(cli);
    groups(cli);
    dead_letters(cli);
    watching(cli);
}

fn topics(cli: &CliFixture) {
    let created =
        cli.json(&["topic", "create", "orders", "--partitions", "4", "--retention-age", "7d"]);
    assert_eq!(created, [json!({"name": "orders", "created": true})]);
    let again =
        cli.json(&["topic", "create", "orders", "--partitions", "4", "--retention-age", "7d"]);
    assert_eq!(again, [json!({"name": "orders", "created": false})]);
    let message = cli.fails(&["topic", "create", "orders", "--partitions", "5"], 1);
    assert!(message.contains("`orders` exists with other settings"), "{message}");
    let message = cli.fails(&["topic", "create", "none", "--partitions", "0"], 2);
    assert!(message.contains("partition"), "{message}");

    let list = cli.json(&["topic", "list"]);
    assert_eq!((&list[0]["name"], &list[0]["partitions"]), (&json!("orders"), &json!(4)));
    let table = cli.run(&["topic", "list"], "");
    assert!(
        text(&table.stdout).starts_with("NAME    PARTITIONS  LENGTH"),
        "{}",
        text(&table.stdout)
    );

    cli.json(&["topic", "grow", "orders", "--partitions", "8"]);
    let described = &cli.json(&["topic", "describe", "orders"])[0];
    assert_eq!(described["partitions"].as_array().unwrap().len(), 8);
    assert_eq!(described["partitions"][1]["stream_key"], "stream:topic:orders:p:1");
    assert_eq!(described["policies"]["retention_age_ms"], 7 * 24 * 3600 * 1000_u64);
    let message = cli.fails(&["topic", "describe", "nothing"], 1);
    assert!(message.contains("topic `nothing` does not exist"), "{message}");

    cli.json(&["topic", "create", "gone/away ü"]);
    let message = cli.fails(&["topic", "delete", "gone/away ü"], 2);
    assert!(message.contains("--yes"), "{message}");
    assert_eq!(cli.json(&["topic", "delete", "gone/away ü", "--yes"]), [json!({"deleted": true})]);
    cli.fails(&["topic", "delete", "gone/away ü", "--yes"], 1);
}

fn messages(cli: &CliFixture) {
    let sent = cli.json(&[
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
    let again = cli.json(&[
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
    let lines = cli.json_of(&["produce", "orders", "--payload", "-"], "one\ntwo\nthree\n");
    assert_eq!(lines.len(), 3);

    let consumed =
        cli.json(&["consume", "orders", "--group", "g", "--count", "4", "--timeout", "90s"]);
    assert_eq!(consumed.len(), 4, "{consumed:?}");
    let first = consumed.iter().find(|message| message["payload"] == "espresso").unwrap();
    assert_eq!(first["id"], sent[0]["id"]);
    assert_eq!((&first["key"], &first["attempt"]), (&json!("ada"), &json!(1)));
    assert_eq!(first["headers"]["kind"], "new");
    // Acknowledged after printing: nothing is redelivered.
    let none = cli.json(&["consume", "orders", "--group", "g", "--timeout", "500ms"]);
    assert!(none.is_empty(), "{none:?}");

    let tail = cli.json(&["tail", "orders", "--from", "beginning", "--count", "4"]);
    let payloads: Vec<&Value> = tail.iter().map(|message| &message["payload"]).collect();
    assert_eq!(payloads, ["espresso", "one", "two", "three"]);

    let started = Instant::now();
    let delayed = cli.json(&["produce", "orders", "--payload", "later", "--delay", "1s"]);
    assert!(delayed[0]["delayed_id"].is_string(), "{delayed:?}");
    let later =
        cli.json(&["consume", "orders", "--group", "g", "--count", "1", "--timeout", "90s"]);
    assert_eq!(later[0]["payload"], "later");
    assert!(started.elapsed() >= Duration::from_secs(1));
}

fn groups(cli: &CliFixture) {
    let list = cli.json(&["group", "list", "orders"]);
    assert_eq!(
        (&list[0]["group"], &list[0]["lag"], &list[0]["pending"]),
        (&json!("g"), &json!(0), &json!(0))
    );
    cli.fails(&["group", "describe", "orders", "nobody"], 1);

    let dry = &cli.json(&["group", "reset", "orders", "g", "--to", "beginning", "--dry-run"])[0];
    assert_eq!((&dry["again"]["count"], &dry["is_done"]), (&json!(5), &json!(false)));
    let message = cli.fails(&["group", "reset", "orders", "g", "--to", "yesterday", "--yes"], 2);
    assert!(message.contains("expected `beginning`, `end`, an entry id such as"), "{message}");
    let done =
        &cli.json(&["group", "reset", "orders", "g", "--to", "beginning", "--yes", "--force"])[0];
    assert_eq!(done["is_done"], true);
    assert_eq!(cli.json(&["group", "describe", "orders", "g"])[0]["lag"], 5);

    let pending = cli.json(&["pending", "orders", "--group", "g"]);
    assert!(pending.is_empty(), "{pending:?}");
    let trimmed = &cli.json(&["topic", "trim", "orders", "--count", "0", "--yes"])[0];
    assert_eq!((&trimmed["removed"], &trimmed["held_back"]), (&json!(0), &json!(true)));
    let trimmed = &cli.json(&["topic", "trim", "orders", "--count", "0", "--yes", "--force"])[0];
    assert_eq!(trimmed["removed"], 5);
}

fn dead_letters(cli: &CliFixture) {
    cli.json(&["topic", "create", "jobs", "--max-retries", "0"]);
    // The good message comes last and ends the command.
    for (key, payload) in [("b", "bad"), ("c", "bad"), ("a", "good")] {
        cli.json(&["produce", "jobs", "--key", key, "--payload", payload]);
    }
    let script = r#"read -r line; echo "$HEADWATER_KEY $HEADWATER_ATTEMPT $line" >> seen; [ "$line" = good ] || { echo "no $line" >&2; exit 7; }"#;
    let verb =
        ["consume", "jobs", "--group", "g", "--count", "1", "--timeout", "90s", "--exec", script];
    let output = cli.run(&verb, "");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let seen = std::fs::read_to_string(cli.dir.path().join("seen")).unwrap();
    assert_eq!(seen, "b 1 bad\nc 1 bad\na 1 good\n");

    let letters = cli.json(&["dlq", "list", "jobs"]);
    assert_eq!(letters.len(), 2, "{letters:?}");
    assert!(letters[0]["reason"].as_str().unwrap().contains("no bad"), "{letters:?}");
    assert_eq!(cli.json(&["dlq", "list", "jobs", "--key", "c"]).len(), 1);
    let id = letters[0]["id"].as_str().unwrap();
    let shown = &cli.json(&["dlq", "show", "jobs", id])[0];
    assert_eq!((&shown["payload"], &shown["key"]), (&json!("bad"), &json!("b")));

    cli.fails(&["dlq", "replay", "jobs"], 2);
    let dry = &cli.json(&["dlq", "replay", "jobs", "--all", "--dry-run"])[0];
    assert_eq!((&dry["replayed"], &dry["is_done"]), (&json!(2), &json!(false)));
    assert_eq!(cli.json(&["dlq", "replay", "jobs", id])[0]["replayed"], 1);
    let back = cli.json(&["consume", "jobs", "--group", "g", "--count", "1", "--timeout", "90s"]);
    assert_eq!((&back[0]["payload"], &back[0]["key"]), (&json!("bad"), &json!("b")));
    cli.fails(&["dlq", "purge", "jobs", "--all"], 2);
    cli.json(&["dlq", "purge", "jobs", "--all", "--yes"]);
    assert!(cli.json(&["dlq", "list", "jobs"]).is_empty());
}

fn watching(cli: &CliFixture) {
    let lines = cli.json(&["top", "--once", "--every", "100ms"]);
    let topic =
        lines.iter().find(|line| line["topic"] == "jobs" && line["group"].is_null()).unwrap();
    assert_eq!((&topic["partitions"], &topic["length"]), (&json!(1), &json!(4)), "{lines:?}");
    assert!(topic["in_per_second"].is_f64(), "{topic}");
    let group = lines.iter().find(|line| line["topic"] == "jobs" && line["group"] == "g").unwrap();
    assert_eq!((&group["lag"], &group["pending"]), (&json!(0), &json!(0)), "{group}");
    let table = cli.stdout(&["top", "jobs", "--once", "--every", "100ms"]);
    assert!(table.contains("\n\nTOPIC  PARTITIONS  LENGTH"), "{table}");
    assert!(table.starts_with("health "), "{table}");
    assert!(!table.contains('\u{1b}'), "{table}");
}

#[test]
fn completion_scripts_are_valid() {
    let dir = ServerDir::new().unwrap();
    let checked = dir.run(&["completion", "bash"]).unwrap();
    let script = dir.path().join("headwater.bash");
    std::fs::write(&script, &checked.stdout).unwrap();
    let status = std::process::Command::new("bash").arg("-n").arg(&script).status().unwrap();
    assert!(status.success());
}

#[test]
fn settings_are_printed_with_their_source() {
    let dir = ServerDir::new().unwrap();
    let output = dir.run(&["config", "--json", "--stream-url", "embedded:here"]).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("embedded:here"));
}

/// Starts a command in its own process group.
fn start(cli: &CliFixture, verb: &[&str]) -> std::process::Child {
    let to: Vec<&str> = cli.args.iter().map(String::as_str).collect();
    cli.dir.command(&[verb, &to].concat()).process_group(0).spawn().unwrap()
}

#[test]
fn a_killed_http_consumer_loses_nothing_and_counts_one_delivery() {
    let cli = CliFixture::with_server();
    cli.json(&["topic", "create", "jobs"]);
    cli.json(&["produce", "jobs", "--key", "k", "--payload", "precious"]);
    let script = "touch started; sleep 600";
    let mut child = start(&cli, &["consume", "jobs", "--group", "g", "--exec", script]);
    let started = cli.dir.path().join("started");
    wait_until("the command to start", LIMIT, || started.exists()).unwrap();
    let pending = cli.json(&["pending", "jobs", "--group", "g"]);
    assert_eq!(pending.len(), 1, "{pending:?}");
    let group = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process_group(group, Signal::KILL).unwrap();
    child.wait().unwrap();

    let again = cli.json(&["consume", "jobs", "--group", "g", "--count", "1", "--timeout", "90s"]);
    assert_eq!((&again[0]["payload"], &again[0]["attempt"]), (&json!("precious"), &json!(1)));
    assert_eq!(again[0]["deliveries"], 2);
    assert!(cli.json(&["pending", "jobs", "--group", "g"]).is_empty());
}

#[test]
fn consumers_over_one_server_compete_for_messages() {
    let cli = CliFixture::with_server();
    cli.json(&["topic", "create", "pairs", "--partitions", "2"]);
    let url = format!("http://{}", cli.server().address);
    let verb = ["consume", "pairs", "--group", "g", "--count", "1", "--url", &url];
    let consumers: Vec<_> = (0..2)
        .map(|_| cli.dir.command(&verb).stdout(std::process::Stdio::piped()).spawn().unwrap())
        .collect();
    for partition in ["0", "1"] {
        cli.json(&["produce", "pairs", "--partition", partition, "--payload", partition]);
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
fn without_a_server_consumers_own_partitions_and_handle_them_in_order() {
    let cli = CliFixture::redis();
    cli.json(&["topic", "create", "pairs", "--partitions", "2"]);
    let script = "cat >> seen-$HEADWATER_PARTITION; echo >> seen-$HEADWATER_PARTITION";
    let verb = ["consume", "pairs", "--group", "g", "--exec", script];
    let consumers: Vec<_> = (0..2).map(|_| start(&cli, &verb)).collect();
    // The group exists once a consumer has joined.
    let owners = || {
        let output = cli.run(&["group", "describe", "pairs", "g", "--json"], "");
        let group: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let holder = |number: usize| group["partitions"][number]["owner"]["holder"].clone();
        [holder(0), holder(1)]
    };
    wait_until("each to have a partition", LIMIT * 2, || {
        let [first, second] = owners();
        first.is_string() && second.is_string() && first != second
    })
    .unwrap();
    let lines = (0..20).map(|number| format!("{number}\n")).collect::<String>();
    for partition in ["0", "1"] {
        let verb = ["produce", "pairs", "--partition", partition, "--payload", "-"];
        assert_eq!(cli.json_of(&verb, &lines).len(), 20);
    }
    let seen = |partition: usize| {
        std::fs::read_to_string(cli.dir.path().join(format!("seen-{partition}")))
            .unwrap_or_default()
    };
    wait_until("all to be handled", LIMIT, || seen(0).len() + seen(1).len() >= 2 * lines.len())
        .unwrap();
    assert_eq!([seen(0), seen(1)], [lines.clone(), lines]);
    for mut consumer in consumers {
        let process = Pid::from_raw(i32::try_from(consumer.id()).unwrap()).unwrap();
        kill_process(process, Signal::TERM).unwrap();
        assert!(consumer.wait().unwrap().success());
    }
}

/// A misspelt topic must not swallow messages.
fn an_unknown_topic_is_rejected(cli: &CliFixture) {
    cli.json(&["topic", "create", "orders"]);
    let error = cli.fails(&["produce", "order", "--payload", "x"], 1);
    for word in
        ["`order` does not exist", "did you mean `orders`?", "topic create order", "--create"]
    {
        assert!(error.contains(word), "lacks {word}: {error}");
    }
    cli.fails(&["topic", "describe", "order"], 1);
    cli.json(&["produce", "order", "--payload", "x", "--create"]);
    cli.json(&["produce", "order", "--payload", "y"]);
    let verb = ["consume", "order", "--group", "g", "--count", "2", "--timeout", "60s"];
    assert_eq!(cli.json(&verb).len(), 2);
    let output = cli.run(&["consume", "nowhere", "--group", "g", "--timeout", "100ms"], "");
    assert!(text(&output.stderr).contains("`nowhere` does not exist yet"), "{output:?}");
}

#[test]
fn an_unknown_topic_is_rejected_on_embedded_streams() {
    an_unknown_topic_is_rejected(&CliFixture::embedded());
}

#[test]
fn an_unknown_topic_is_rejected_over_a_server() {
    an_unknown_topic_is_rejected(&CliFixture::with_server());
}

#[test]
fn an_owned_mode_over_a_server_is_a_usage_error() {
    let cli = CliFixture::with_server();
    let error = cli.fails(&["consume", "jobs", "--group", "g", "--mode", "owned"], 2);
    assert!(error.contains("leave out --url"), "{error}");
}

#[test]
fn a_stopped_http_consumer_releases_its_deliveries_without_an_attempt() {
    let cli = CliFixture::with_server();
    cli.json(&["topic", "create", "jobs"]);
    cli.json(&["produce", "jobs", "--payload", "first"]);
    cli.json(&["produce", "jobs", "--payload", "second"]);
    // The command for the first message waits for a file; the second message is in flight.
    let script = "touch started; until [ -e go ]; do sleep 0.05; done";
    let verb = ["consume", "jobs", "--group", "g", "--exec", script];
    let mut child = start(&cli, &verb);
    let file = |name: &str| cli.dir.path().join(name);
    wait_until("the command to start", LIMIT, || file("started").exists()).unwrap();
    let process = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(process, Signal::TERM).unwrap();
    std::fs::write(file("go"), "").unwrap();
    assert!(child.wait().unwrap().success());

    let verb = ["consume", "jobs", "--group", "g", "--count", "1", "--timeout", "90s"];
    let rest = &cli.json(&verb)[0];
    assert_eq!((&rest["payload"], &rest["attempt"]), (&json!("second"), &json!(1)));
    let group = &cli.json(&["group", "list", "jobs"])[0];
    assert_eq!((&group["lag"], &group["pending"]), (&json!(0), &json!(0)));
}

#[test]
fn every_command_on_embedded_streams() {
    every_verb(&CliFixture::embedded());
}

#[test]
fn every_command_on_redis() {
    every_verb(&CliFixture::redis());
}

#[test]
fn every_command_over_a_server() {
    every_verb(&CliFixture::with_server());
}

#[test]
fn invalid_arguments_are_exit_code_2_with_usage_and_hint() {
    let cli = CliFixture::embedded();
    for (verb, hint) in [
        (&["topic", "cretae", "x"][..], "Usage"),
        (&["topic", "create"][..], "Usage"),
        (&["produce", "orders", "--delay", "soon", "--payload", "x"][..], "such as 5s"),
        (&["produce", "orders", "--header", "x", "--payload", "x"][..], "NAME=VALUE"),
        (&["consume", "orders"][..], "--group"),
        (&["topic", "trim", "orders"][..], "--count"),
        (&["tail", "orders", "--from", "yesterday"][..], "such as"),
    ] {
        let message = cli.fails(verb, 2);
        assert!(message.contains(hint), "{verb:?}: {message}");
    }
}

#[test]
fn every_bench_workload_counts_arrivals() {
    for cli in [CliFixture::embedded(), CliFixture::redis()] {
        for workload in ["produce", "produce-bulk", "consume", "latency", "record", "claim"] {
            let line = &cli.json(&["bench", workload, "--count", "200", "--partitions", "3"])[0];
            assert_eq!(
                (&line["workload"], &line["count"]),
                (&json!(workload), &json!(200)),
                "{line}"
            );
            assert_eq!((&line["lost"], &line["duplicated"]), (&json!(0), &json!(0)), "{line}");
            assert!(line["per_second"].as_f64().unwrap() > 0.0, "{line}");
            assert!(line["cpu_us"].as_f64().unwrap() > 0.0, "{line}");
        }
        // The topics of the runs are deleted.
        assert!(cli.json(&["topic", "list"]).is_empty());
    }
}

#[test]
fn the_doctor_gives_advice() {
    let cli = CliFixture::redis();
    let redis = cli.redis.as_ref().unwrap();
    redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    let output = cli.run(&["doctor", "--json"], "");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let message = text(&output.stdout);
    assert!(message.contains("set `maxmemory-policy noeviction`"), "{message}");

    redis.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).unwrap();
    let to = ["--stream-url", &redis.url(), "--database-url", "sqlite:other.db"];
    cli.run_at(&["ticket", "new", "--title", "t", "--content", "c"], &to, "");
    let output = cli.run_at(&["doctor", "--consistency"], &to, "");
    let message = text(&output.stdout);
    assert_eq!(output.status.code(), Some(4), "{message}");
    assert!(message.contains("workers: no active worker"), "{message}");
    assert!(message.contains("audit: every event is accounted for"), "{message}");
    assert!(message.contains("synchronous is"), "{message}");

    // The test PostgreSQL runs without fsync.
    let output = cli.run(&["doctor"], "");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("set `fsync = on`"));

    let lines = lines_of(&cli.run(&["doctor", "--json"], ""));
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
    fine("clock", "of the database clock");
    fine("clock", "of the streams clock");
    fine("quarantine", "no quarantined issues");

    redis.stop().unwrap();
    let output = cli.run(&["doctor"], "");
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stdout));
}

/// The JSON lines of a command that may end with warnings.
fn lines_of(output: &std::process::Output) -> Vec<Value> {
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_doctor_of_a_server_checks_its_backends() {
    let cli = CliFixture::embedded().start_server();
    let mut found = String::new();
    // The server listens before its worker is registered.
    wait_until("its worker to be active", LIMIT, || {
        let lines = lines_of(&cli.run(&["doctor", "--json", "--consistency"], ""));
        let each = lines.iter().map(|line| format!("{} {}\n", line["subject"], line["found"]));
        found = each.collect();
        found.contains("1 active")
    })
    .unwrap();
    for words in ["embedded", "sqlite", "journal_mode is wal", "every event is accounted for"] {
        assert!(found.contains(words), "{words}: {found}");
    }
    assert!(cli.stdout(&["doctor"]).contains("ok"));
}

#[test]
fn a_rate_limited_command_waits_for_retry_after() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&["--http-rate-per-second", "1", "--http-rate-burst", "1"]).unwrap();
    let url = format!("http://{}", server.address);
    for _ in 0..3 {
        let output = dir.run(&["topic", "list", "--url", &url]).unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
}

#[test]
fn reserved_topics_cannot_be_created_or_deleted() {
    let dir = ServerDir::new().unwrap();
    for name in ["ticket_events", "issue_work"] {
        for words in [
            &["topic", "create", name][..],
            &["topic", "grow", name, "--partitions", "3"],
            &["topic", "delete", name, "--yes"],
        ] {
            let output = dir.run(words).unwrap();
            let message = text(&output.stderr);
            assert!(!output.status.success(), "{words:?}");
            assert!(
                message.contains(name) && message.contains("is reserved for the server"),
                "{message}"
            );
        }
    }
}

#[test]
fn a_tail_of_a_missing_topic_says_so_and_waits() {
    let cli = CliFixture::with_server();
    let url = format!("http://{}", cli.server().address);
    let mut command = cli.dir.command(&["tail", "later", "--count", "1", "--url", &url]);
    let mut tail = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut message = std::io::BufReader::new(tail.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut message, &mut line).unwrap();
    assert!(line.contains("topic `later` does not exist yet; waiting"), "{line}");
    // The tail may not have started yet: one of these messages comes after.
    let mut ended = None;
    wait_until("the end of the tail", LIMIT, || {
        cli.json(&["produce", "later", "--payload", "x", "--create"]);
        ended = tail.try_wait().unwrap();
        ended.is_some()
    })
    .unwrap();
    assert!(ended.unwrap().success());
}

#[test]
fn a_wrong_url_is_distinguished_from_a_missing_object() {
    let cli = CliFixture::embedded().start_server();
    let address = cli.server().address;
    for (url, code, words) in [
        (format!("http://{address}"), 1, "topic `nothing` does not exist"),
        (format!("http://{address}/api/v1"), 1, "no Headwater API at"),
        (format!("https://{address}"), 3, "uses http, not https"),
    ] {
        let output = cli.run_at(&["topic", "describe", "nothing"], &["--url", &url], "");
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{url}: {message}");
        assert!(message.contains(words), "{url}: {message}");
    }
}

#[test]
fn a_sender_chooses_the_partitioner() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "spread", "--partitions", "4"]);
    let partitions = |partitioner: &str| {
        let verb = ["produce", "spread", "--key", "k0", "--partitioner", partitioner];
        let sent = cli.json_of(&verb, &"x\n".repeat(200));
        let mut counts = [0; 4];
        for message in &sent {
            counts[usize::try_from(message["partition"].as_u64().unwrap()).unwrap()] += 1;
        }
        counts
    };
    // The hash of `k0` is 3365.
    assert_eq!(partitions("hash"), [0, 200, 0, 0]);
    assert_eq!(partitions("round-robin"), [50; 4]);
    assert_eq!(partitions("consistent").iter().filter(|count| **count == 200).count(), 1);
    // All 200 miss one of four partitions once in 10^24 runs.
    let random = partitions("random");
    assert!(random.iter().all(|count| *count > 0) && random.iter().sum::<i32>() == 200);
    let message = cli.fails(&["produce", "spread", "--payload", "x", "--partitioner", "best"], 2);
    assert!(message.contains("consistent"), "{message}");
}
