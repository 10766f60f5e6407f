//! Session imports of the real binary: a failed import leaves nothing behind and its id free, and a long one has no
//! timeout.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::time::{Duration, Instant};

use headwater_testkit::Redis;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::cli::CliFixture;
use support::{LIMIT, Server, ServerDir, answer, eventually, text};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The lines of a session with so many events.
fn lines(events: u64) -> Vec<String> {
    let head = json!({"headwater_session": {
        "format": 1, "session": "elsewhere", "beginning": "whole", "parent": null,
    }});
    let mut lines = vec![head.to_string()];
    let mut checksum = u32::MAX;
    for number in 1..=events {
        let entry = json!({"entry": {"id": format!("{number}-0"), "fields": [
            ["type", "test.event"], ["payload", json!({"number": number}).to_string()],
        ]}});
        lines.push(entry.to_string());
        checksum = entry.to_string().bytes().fold(checksum, crc32);
    }
    lines.push(json!({"end": {"entries": events, "crc32": !checksum}}).to_string());
    lines
}

/// Adds a byte to a CRC-32 (IEEE).
fn crc32(sum: u32, byte: u8) -> u32 {
    (0..8).fold(
        sum ^ u32::from(byte),
        |sum, _| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 },
    )
}

fn joined(lines: &[String]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

async fn import(server: &Server, session: &str, body: impl Into<reqwest::Body>) -> (u16, Value) {
    let request = server.client.post(server.url(&format!("/api/v1/sessions/{session}/import")));
    answer(request.body(body).send().await.unwrap()).await.unwrap()
}

/// An import whose lines are sent one by one.
struct SlowImport {
    connection: TcpStream,
}

impl SlowImport {
    async fn begin(server: &Server, session: &str) -> Self {
        let mut connection = TcpStream::connect(server.address).await.unwrap();
        let head = format!(
            "POST /api/v1/sessions/{session}/import HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\
             Transfer-Encoding: chunked\r\n\r\n",
            server.address
        );
        connection.write_all(head.as_bytes()).await.unwrap();
        Self { connection }
    }

    async fn send(&mut self, bytes: &[u8]) {
        let chunk = [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
        self.connection.write_all(&chunk).await.unwrap();
    }

    /// The response, after the body has ended or before.
    async fn answer(mut self) -> String {
        // The server may have closed its side.
        let _ = self.connection.write_all(b"0\r\n\r\n").await;
        let mut answer = Vec::new();
        let _ = self.connection.read_to_end(&mut answer).await;
        text(&answer)
    }
}

/// The streams of imports in progress.
fn imports(redis: &Redis) -> usize {
    redis.command(&["KEYS", "*:copy:*"]).unwrap().items().len()
}

/// Waits until an import has stored its first entry.
async fn has_begun(redis: &Redis) {
    eventually("an import in progress", || imports(redis) == 1).await.unwrap();
}

async fn can_be_imported(server: &Server, session: &str, file: &str) {
    let (status, _) = server.get(&format!("/api/v1/sessions/{session}")).await.unwrap();
    assert_eq!(status, 404);
    let (status, made) = import(server, session, file.to_owned()).await;
    assert_eq!((status, &made["stage"]), (201, &json!("open")), "{made}\n{}", server.log());
}

async fn a_failed_import_leaves_its_id_free(cli: &CliFixture) {
    let server = cli.server();
    let (all, file) = (lines(3), joined(&lines(3)));

    // The client disconnects.
    let mut import_in_progress = SlowImport::begin(server, "hung-up").await;
    import_in_progress.send(joined(&all[..2]).as_bytes()).await;
    if let Some(redis) = &cli.redis {
        has_begun(redis).await;
        let (status, _) = server.get("/api/v1/sessions/hung-up").await.unwrap();
        assert_eq!(status, 404, "a part of a session is never shown");
    }
    drop(import_in_progress);
    can_be_imported(server, "hung-up", &file).await;
    if let Some(redis) = &cli.redis {
        eventually("removal", || imports(redis) == 0).await.unwrap();
    }

    // A line is not UTF-8, or invalid, or the last one is missing.
    let odd = [joined(&all[..2]).as_bytes(), b"\xff\n"].concat();
    let wrong = joined(&all[..2]) + "{}\n";
    for (name, body) in [("odd", odd), ("wrong", wrong.into()), ("torn", joined(&all[..3]).into())]
    {
        let (status, refused) = import(server, name, body).await;
        assert_eq!((status, &refused["error"]["code"]), (400, &json!("invalid")), "{name}");
        can_be_imported(server, name, &file).await;
    }

    // The session exists and is not changed.
    let (status, refused) = import(server, "odd", file.clone()).await;
    assert_eq!((status, &refused["error"]["code"]), (409, &json!("conflict")));
    let (_, shown) = server.get("/api/v1/sessions/odd").await.unwrap();
    assert_eq!((&shown["stage"], &shown["length"]), (&json!("open"), &json!(3)));
}

#[tokio::test]
async fn a_failed_import_leaves_its_id_free_on_embedded_streams() {
    a_failed_import_leaves_its_id_free(&CliFixture::embedded().start_server()).await;
}

#[tokio::test]
async fn a_failed_import_leaves_its_id_free_on_redis() {
    a_failed_import_leaves_its_id_free(&CliFixture::with_server()).await;
}

#[tokio::test]
async fn an_import_may_take_longer_than_a_request() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&["--http-request-timeout", "100ms"]).unwrap();
    let all = lines(3);
    let mut import_in_progress = SlowImport::begin(&server, "slow").await;
    for line in &all {
        import_in_progress.send(format!("{line}\n").as_bytes()).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let answer = import_in_progress.answer().await;
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}\n{}", server.log());
}

#[tokio::test]
async fn a_stalled_import_times_out_and_leaves_its_id_free() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&["--http-read-timeout", "2s"]).unwrap();
    let all = lines(3);
    let mut import_in_progress = SlowImport::begin(&server, "silent").await;
    import_in_progress.send(joined(&all[..2]).as_bytes()).await;
    let mut answer = Vec::new();
    let _ = import_in_progress.connection.read_to_end(&mut answer).await;
    let answer = text(&answer);
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("\"timeout\""), "{answer}");
    can_be_imported(&server, "silent", &joined(&all)).await;
}

#[tokio::test]
async fn an_oversized_import_is_rejected_and_leaves_its_id_free() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&["--http-import-bytes-max", "2048"]).unwrap();
    let (small, large) = (joined(&lines(3)), joined(&lines(200)));
    assert!(small.len() < 2048 && large.len() > 4096);
    let is_refused = |status: u16, refused: &Value| {
        assert_eq!((status, &refused["error"]["code"]), (413, &json!("too_large")), "{refused}");
        assert!(refused["error"]["message"].as_str().unwrap().contains("2048"), "{refused}");
    };
    // One with a content length, and one without.
    let (status, refused) = import(&server, "large", large.clone()).await;
    is_refused(status, &refused);
    let pieces = vec![Ok::<_, std::io::Error>(large.clone()), Ok(large)];
    let body = reqwest::Body::wrap_stream(futures_util::stream::iter(pieces));
    let (status, refused) = import(&server, "large", body).await;
    is_refused(status, &refused);
    can_be_imported(&server, "large", &small).await;
}

#[tokio::test]
async fn shutdown_removes_an_unfinished_import() {
    let (dir, redis) = (ServerDir::new().unwrap(), Redis::start().unwrap());
    let mut server = dir.serve(&["--stream-url", &redis.url()]).unwrap();
    let all = lines(3);
    let mut import_in_progress = SlowImport::begin(&server, "stopped").await;
    import_in_progress.send(joined(&all[..2]).as_bytes()).await;
    has_begun(&redis).await;
    server.signal(Signal::TERM).unwrap();
    let mut answer = Vec::new();
    let _ = import_in_progress.connection.read_to_end(&mut answer).await;
    let answer = text(&answer);
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("repeat the import"), "{answer}");
    assert!(server.wait(LIMIT).unwrap().success(), "{}", server.log());

    assert_eq!(imports(&redis), 0);
    let server = dir.serve(&["--stream-url", &redis.url()]).unwrap();
    can_be_imported(&server, "stopped", &joined(&all)).await;
}

/// The command opens the streams itself and is interrupted during the import.
#[test]
fn an_interrupted_command_removes_its_import() {
    use std::io::Write;
    use std::process::Stdio;

    let cli = CliFixture::redis();
    let words = ["session", "import", "interrupted", "--json"];
    let direct: Vec<&str> = cli.direct_args.iter().map(String::as_str).collect();
    let mut command = cli.dir.command(&[&words[..], &direct].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(joined(&lines(3)[..2]).as_bytes()).unwrap();
    let deadline = Instant::now() + LIMIT;
    while imports(cli.redis.as_ref().unwrap()) == 0 {
        assert!(Instant::now() < deadline, "the import does not start");
    }
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(1), "{}", text(&ended.stderr));
    assert!(text(&ended.stderr).contains("was not imported"), "{}", text(&ended.stderr));
    drop(input);
    assert_eq!(imports(cli.redis.as_ref().unwrap()), 0);
    let message = cli.fails(&["session", "show", "interrupted"], 1);
    assert!(message.contains("no session"), "{message}");
}

/// The command opens the streams itself and is killed, so its entries remain under their temporary name.
#[test]
fn a_killed_import_can_be_repeated_at_once() {
    use std::io::Write;
    use std::process::Stdio;

    let cli = CliFixture::redis();
    let import = || {
        let words = ["session", "import", "killed", "--json"];
        let direct: Vec<&str> = cli.direct_args.iter().map(String::as_str).collect();
        let mut command = cli.dir.command(&[&words[..], &direct].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        (child, input)
    };
    let all = lines(3);
    let (child, mut input) = import();
    input.write_all(joined(&all[..2]).as_bytes()).unwrap();
    let deadline = Instant::now() + LIMIT;
    while imports(cli.redis.as_ref().unwrap()) == 0 {
        assert!(Instant::now() < deadline, "the import does not start");
    }
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    child.wait_with_output().unwrap();
    assert_eq!(cli.json(&["session", "list"]), Vec::<Value>::new());

    let (child, mut input) = import();
    input.write_all(joined(&all).as_bytes()).unwrap();
    drop(input);
    let ended = child.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let shown = &cli.json(&["session", "list"])[0];
    assert_eq!((&shown["stage"], &shown["length"]), (&json!("open"), &json!(3)), "{shown}");
}

#[tokio::test]
async fn an_import_below_the_minimum_rate_is_rejected_and_leaves_its_id_free() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&["--http-read-timeout", "2s"]).unwrap();
    let file = joined(&lines(3));
    let import_in_progress = SlowImport::begin(&server, "slow").await;
    let (mut reading, mut writing) = import_in_progress.connection.into_split();
    // Each byte arrives in time, but all of them would take too long.
    let sending = tokio::spawn(async move {
        while writing.write_all(b"1\r\n \r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let mut answer = Vec::new();
    let reading = tokio::time::timeout(LIMIT, reading.read_to_end(&mut answer)).await;
    sending.abort();
    assert!(reading.is_ok(), "the import is still running");
    let answer = text(&answer);
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("bytes per second"), "{answer}");
    can_be_imported(&server, "slow", &file).await;
}
