//! `headwater assign` of the real binary: fail-over after `kill -9`, failed commands, release by an operator, the routes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};

use headwater_testkit::{Redis, is_alive, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::cli::CliFixture;
use support::{LIMIT, Server, ServerDir, text};

/// A consumer process, killed with -9 when dropped.
struct AssignConsumer(Child);

impl AssignConsumer {
    fn start(cli: &CliFixture, name: &str, script: &str) -> Self {
        let verb =
            ["assign", "run", "orders", "--name", name, "--heartbeat", "1s", "--exec", script];
        let direct: Vec<&str> = cli.direct_args.iter().map(String::as_str).collect();
        let mut command = cli.dir.command(&[&verb[..], &direct].concat());
        let log = std::fs::File::create(cli.dir.path().join(format!("{name}.log"))).unwrap();
        command.stdout(Stdio::null()).stderr(log).process_group(0);
        Self(command.spawn().unwrap())
    }

    fn kill9(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn terminate(&mut self) {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        let mut status = None;
        wait_until("the consumer to end", LIMIT, || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        })
        .unwrap();
        assert!(status.unwrap().success(), "{status:?}");
    }
}

impl Drop for AssignConsumer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Redis and commands that open it, without a database.
fn fixture(redis: &Redis) -> CliFixture {
    let mut cli = CliFixture::embedded();
    cli.direct_args = vec!["--stream-url".to_owned(), redis.url()];
    cli.args = cli.direct_args.clone();
    cli
}

fn lines(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn wait_for_lines(path: &Path, count: usize) -> Vec<String> {
    let what = format!("{count} lines in {}", path.display());
    wait_until(&what, LIMIT, || lines(path).len() >= count).unwrap();
    lines(path)
}

fn describe(cli: &CliFixture, stream: &str) -> Value {
    cli.json(&["assign", "describe", "orders", stream]).remove(0)
}

#[test]
fn a_command_gets_the_stream_and_completes_it() {
    let redis = Redis::start().unwrap();
    let cli = fixture(&redis);
    let seen = cli.dir.path().join("seen");
    let script = r#"echo "$HEADWATER_SERVICE $HEADWATER_STREAM $HEADWATER_OWNERS $HEADWATER_INFO $(cat)" >> seen"#;
    let mut consumer = AssignConsumer::start(&cli, "ada", script);
    let added =
        cli.json(&["assign", "add", "orders", "clicks:berlin", "--info", r#"{"tenant":"acme"}"#]);
    assert_eq!(added[0]["stream"], "clicks:berlin");
    // As the original client adds one.
    let input = r#"{"DataStreamName": "clicks:paris"}"#;
    redis.command(&["xadd", "orders-input", "*", "lbs-input", input]).unwrap().ok().unwrap();

    let mut found = wait_for_lines(&seen, 2);
    found.sort();
    assert_eq!(
        found,
        [
            r#"orders clicks:berlin 1 {"tenant":"acme"} {"tenant":"acme"}"#,
            "orders clicks:paris 1  ",
        ]
    );
    let all_done = || cli.json(&["assign", "list", "orders"]).is_empty();
    wait_until("both streams to be done", LIMIT, all_done).unwrap();
    consumer.terminate();
    for key in ["mutex:clicks:berlin", "mutex:clicks:paris"] {
        assert_eq!(redis.command(&["exists", key]).unwrap().int(), Some(0), "{key}");
    }
    let service = cli.json(&["assign", "describe", "orders"]).remove(0);
    assert_eq!((&service["assigned"], &service["members"]), (&json!(0), &json!([])));
}

#[test]
fn a_killed_consumer_is_replaced_and_its_command_killed() {
    let redis = Redis::start().unwrap();
    let cli = fixture(&redis);
    let seen = cli.dir.path().join("seen");
    let blocked = r#"echo "$$ ada $HEADWATER_OWNERS" >> seen; exec sleep 600"#;
    let first = AssignConsumer::start(&cli, "ada", blocked);
    cli.json(&["assign", "add", "orders", "s"]);
    let pid: u32 = wait_for_lines(&seen, 1)[0].split(' ').next().unwrap().parse().unwrap();
    let owned = describe(&cli, "s");
    assert_eq!(owned["state"], "owned");
    assert!(owned["holder"].as_str().unwrap().starts_with("ada:"), "{owned}");

    first.kill9();
    let _second = AssignConsumer::start(
        &cli,
        "bob",
        r#"echo "$$ bob $HEADWATER_OWNERS" >> seen; exec sleep 600"#,
    );

    let found = wait_for_lines(&seen, 2);
    assert!(found[1].ends_with(" bob 2"), "{found:?}");
    wait_until("the command of the killed consumer to end", LIMIT, || !is_alive(pid)).unwrap();
    let next = describe(&cli, "s");
    assert!(next["epoch"].as_u64() > owned["epoch"].as_u64(), "{next}");
}

#[test]
fn a_failed_command_releases_its_stream_and_counts_no_death() {
    let redis = Redis::start().unwrap();
    let cli = fixture(&redis);
    let seen = cli.dir.path().join("seen");
    // Fails until the file exists.
    let script = r#"echo "$HEADWATER_OWNERS" >> seen; test -e fixed || { echo no such tenant >&2; exit 3; }"#;
    let _consumer = AssignConsumer::start(&cli, "ada", script);
    cli.json(&["assign", "add", "orders", "s"]);

    let found = wait_for_lines(&seen, 2);
    assert!(found.iter().all(|owners| owners == "1"), "{found:?}");
    let log = std::fs::read_to_string(cli.dir.path().join("ada.log")).unwrap();
    assert!(log.contains("exit status: 3: no such tenant"), "{log}");
    std::fs::write(cli.dir.path().join("fixed"), "").unwrap();
    wait_until("the stream to be done", LIMIT, || {
        cli.json(&["assign", "list", "orders"]).is_empty()
    })
    .unwrap();
}

#[test]
fn an_operator_takes_a_stream_from_a_live_consumer() {
    let redis = Redis::start().unwrap();
    let cli = fixture(&redis);
    let seen = cli.dir.path().join("seen");
    let script = r#"echo "$$ $HEADWATER_OWNERS" >> seen; exec sleep 600"#;
    let _ada = AssignConsumer::start(&cli, "ada", script);
    cli.json(&["assign", "add", "orders", "s"]);
    let pid: u32 = wait_for_lines(&seen, 1)[0].split(' ').next().unwrap().parse().unwrap();
    let _bob = AssignConsumer::start(&cli, "bob", script);

    assert!(cli.fails(&["assign", "release", "orders", "s"], 2).contains("--yes"));
    let released = cli.json(&["assign", "release", "orders", "s", "--yes"]).remove(0);

    assert!(released["former_holder"].as_str().unwrap().starts_with("ada:"), "{released}");
    let found = wait_for_lines(&seen, 2);
    assert!(found[1].ends_with(" 1"), "counts no death: {found:?}");
    wait_until("the command of the former owner to end", LIMIT, || !is_alive(pid)).unwrap();
    assert!(cli.fails(&["assign", "release", "orders", "t", "--yes"], 1).contains("never added"));
}

#[test]
fn sigterm_lets_commands_end_and_completes_their_streams() {
    let redis = Redis::start().unwrap();
    let cli = fixture(&redis);
    let seen = cli.dir.path().join("seen");
    let script =
        r#"echo begun >> seen; until [ -e finish ]; do sleep 0.02; done; echo ended >> seen"#;
    let mut consumer = AssignConsumer::start(&cli, "ada", script);
    cli.json(&["assign", "add", "orders", "s"]);
    wait_for_lines(&seen, 1);
    let pid = Pid::from_raw(i32::try_from(consumer.0.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    // A stream that is added now is not acquired.
    cli.json(&["assign", "add", "orders", "t"]);
    std::fs::write(cli.dir.path().join("finish"), "").unwrap();

    let mut status = None;
    wait_until("the consumer to end", LIMIT, || {
        status = consumer.0.try_wait().unwrap();
        status.is_some()
    })
    .unwrap();
    assert!(status.unwrap().success());
    assert!(lines(&seen).contains(&"ended".to_owned()));
    assert!(cli.fails(&["assign", "describe", "orders", "s"], 1).contains("it is done"));
}

#[test]
fn run_with_a_server_is_a_usage_error_and_reading_creates_nothing() {
    let redis = Redis::start().unwrap();
    let cli = fixture(&redis);
    let verb = ["assign", "run", "orders", "--exec", "true"];
    let output = cli.run_at(&verb, &["--url", "http://127.0.0.1:1"], "");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("leave out --url"));

    assert_eq!(cli.json(&["assign", "list", "orders"]), [] as [Value; 0]);
    cli.json(&["assign", "describe", "orders"]);
    assert_eq!(redis.command(&["exists", "orders-input"]).unwrap().int(), Some(0));
}

#[tokio::test]
async fn the_routes_add_list_describe_and_release() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&[]).unwrap();
    let base = "/api/v1/assignments/orders";
    let (status, added) = server
        .post(&format!("{base}/streams"), &json!({"stream": "a/b", "info": {"n": 1.5}}))
        .await
        .unwrap();
    assert_eq!((status, &added["stream"]), (200, &json!("a/b")), "{added}");
    let (status, listed) = server.get(&format!("{base}/streams?limit=1")).await.unwrap();
    assert_eq!((status, &listed["streams"][0]["state"]), (200, &json!("waiting")), "{listed}");
    let (status, found) = server.get(&format!("{base}/streams/a%2Fb")).await.unwrap();
    assert_eq!((status, &found["info"]), (200, &json!({"n": 1.5})), "{found}");
    assert_eq!(found["entry_id"], added["entry_id"]);
    let (status, service) = server.get(base).await.unwrap();
    assert_eq!((status, &service["waiting"]), (200, &json!(1)), "{service}");

    for (path, expected) in [("a%2Fb", 409), ("never", 404)] {
        let path = format!("{base}/streams/{path}/release");
        let (status, refused) = server.post(&path, &json!({})).await.unwrap();
        assert_eq!(status, expected, "{refused}");
    }
    let wrong = [json!({}), json!({"stream": ""}), json!({"stream": "s", "inf": 1})];
    for body in wrong {
        let (status, refused) = server.post(&format!("{base}/streams"), &body).await.unwrap();
        assert_eq!((status, &refused["error"]["code"]), (400, &json!("invalid")), "{body}");
    }
    let (status, _) = server.get(&format!("{base}/streams?cursor=x")).await.unwrap();
    assert_eq!(status, 400);
}

#[tokio::test]
async fn only_the_role_admin_takes_a_stream_from_its_owner() {
    let settings = r#"
        [[token]]
        name = "writer"
        role = "write"
        token = "0123456789abcdef"
    "#;
    let dir = ServerDir::new().unwrap().settings(settings).unwrap();
    let server: Server = dir.serve(&[]).unwrap();
    let path = server.url("/api/v1/assignments/orders/streams/s/release");
    let request = server.client.post(path).bearer_auth("0123456789abcdef").json(&json!({}));
    assert_eq!(request.send().await.unwrap().status(), 403);
}
