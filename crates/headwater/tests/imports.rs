//! Imports of sessions, against the real binary: one that ends early leaves nothing behind and its id free, and a long one
//! may take its time.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::cli::CliFixture;
use support::{LIMIT, ServerDir, Server, answer, text};
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

/// One byte more of a CRC-32 (IEEE).
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

/// An import whose lines come one by one.
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

    /// The answer, which comes when the body has ended, or before.
    async fn answer(mut self) -> String {
        // The server may have closed its side.
        let _ = self.connection.write_all(b"0\r\n\r\n").await;
        let mut answer = Vec::new();
        let _ = self.connection.read_to_end(&mut answer).await;
        text(&answer)
    }
}

/// Waits until an import has taken its id.
async fn is_filling(server: &Server, session: &str) {
    let path = format!("/api/v1/sessions/{session}");
    server.until(&path, |_, shown| shown["stage"] == "filling").await.unwrap();
}

/// Waits until nothing is left of an import, and makes the session.
async fn can_be_imported(server: &Server, session: &str, file: &str) {
    server.until(&format!("/api/v1/sessions/{session}"), |status, _| status == 404).await.unwrap();
    let (status, made) = import(server, session, file.to_owned()).await;
    assert_eq!((status, &made["stage"]), (201, &json!("open")), "{made}\n{}", server.log());
}

async fn however_an_import_ends_early_its_id_is_free(cli: &CliFixture) {
    let server = cli.server();
    let (all, file) = (lines(3), joined(&lines(3)));

    // The caller hangs up.
    let mut import_in_progress = SlowImport::begin(server, "hung-up").await;
    import_in_progress.send(joined(&all[..2]).as_bytes()).await;
    is_filling(server, "hung-up").await;
    drop(import_in_progress);
    can_be_imported(server, "hung-up", &file).await;

    // A line is no text, or not the line it should be, or the last one is missing.
    let odd = [joined(&all[..2]).as_bytes(), b"\xff\n"].concat();
    let wrong = joined(&all[..2]) + "{}\n";
    for (name, body) in [("odd", odd), ("wrong", wrong.into()), ("torn", joined(&all[..3]).into())]
    {
        let (status, refused) = import(server, name, body).await;
        assert_eq!((status, &refused["error"]["code"]), (400, &json!("invalid")), "{name}");
        can_be_imported(server, name, &file).await;
    }

    // There is one already, and it stays as it is.
    let (status, refused) = import(server, "odd", file.clone()).await;
    assert_eq!((status, &refused["error"]["code"]), (409, &json!("conflict")));
    let (_, shown) = server.get("/api/v1/sessions/odd").await.unwrap();
    assert_eq!((&shown["stage"], &shown["length"]), (&json!("open"), &json!(3)));
}

#[tokio::test]
async fn however_an_import_ends_early_its_id_is_free_on_embedded_streams() {
    however_an_import_ends_early_its_id_is_free(&CliFixture::embedded().start_server()).await;
}

#[tokio::test]
async fn however_an_import_ends_early_its_id_is_free_on_redis() {
    however_an_import_ends_early_its_id_is_free(&CliFixture::with_server()).await;
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
async fn an_import_whose_lines_stop_coming_ends_and_leaves_its_id() {
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
async fn an_import_with_too_many_bytes_is_refused_and_leaves_its_id() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&["--http-import-bytes-max", "2048"]).unwrap();
    let (small, large) = (joined(&lines(3)), joined(&lines(200)));
    assert!(small.len() < 2048 && large.len() > 4096);
    let is_refused = |status: u16, refused: &Value| {
        assert_eq!((status, &refused["error"]["code"]), (413, &json!("too_large")), "{refused}");
        assert!(refused["error"]["message"].as_str().unwrap().contains("2048"), "{refused}");
    };
    // One that says how long it is, and one that does not.
    let (status, refused) = import(&server, "large", large.clone()).await;
    is_refused(status, &refused);
    let pieces = vec![Ok::<_, std::io::Error>(large.clone()), Ok(large)];
    let body = reqwest::Body::wrap_stream(futures_util::stream::iter(pieces));
    let (status, refused) = import(&server, "large", body).await;
    is_refused(status, &refused);
    can_be_imported(&server, "large", &small).await;
}

#[tokio::test]
async fn a_stop_of_the_process_leaves_nothing_of_an_import() {
    let dir = ServerDir::new().unwrap();
    let mut server = dir.serve(&[]).unwrap();
    let all = lines(3);
    let mut import_in_progress = SlowImport::begin(&server, "stopped").await;
    import_in_progress.send(joined(&all[..2]).as_bytes()).await;
    is_filling(&server, "stopped").await;
    server.signal(Signal::TERM).unwrap();
    let mut answer = Vec::new();
    let _ = import_in_progress.connection.read_to_end(&mut answer).await;
    let answer = text(&answer);
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("import it again"), "{answer}");
    assert!(server.wait(LIMIT).unwrap().success(), "{}", server.log());

    let server = dir.serve(&[]).unwrap();
    let (status, _) = server.get("/api/v1/sessions/stopped").await.unwrap();
    assert_eq!(status, 404);
    can_be_imported(&server, "stopped", &joined(&all)).await;
}

/// The verb opens the streams itself, and is told to stop half way.
#[test]
fn a_verb_that_is_stopped_leaves_nothing_of_an_import() {
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
    while !cli.json(&["session", "list"]).iter().any(|one| one["stage"] == "filling") {
        assert!(Instant::now() < deadline, "the import does not begin");
    }
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(1), "{}", text(&ended.stderr));
    assert!(text(&ended.stderr).contains("stopped before its end"), "{}", text(&ended.stderr));
    drop(input);
    let message = cli.fails(&["session", "show", "interrupted"], 1);
    assert!(message.contains("no session"), "{message}");
}

/// The verb opens the streams itself, and is killed half way: nobody removes what it stored.
#[test]
fn an_import_that_was_killed_can_be_repeated_at_once() {
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
    while !cli.json(&["session", "list"]).iter().any(|one| one["stage"] == "filling") {
        assert!(Instant::now() < deadline, "the import does not begin");
    }
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    child.wait_with_output().unwrap();

    let (child, mut input) = import();
    input.write_all(joined(&all).as_bytes()).unwrap();
    drop(input);
    let ended = child.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let shown = &cli.json(&["session", "list"])[0];
    assert_eq!((&shown["stage"], &shown["length"]), (&json!("open"), &json!(3)), "{shown}");
}

#[tokio::test]
async fn an_import_that_comes_byte_by_byte_is_ended_and_leaves_its_id() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&["--http-read-timeout", "2s"]).unwrap();
    let file = joined(&lines(3));
    let import_in_progress = SlowImport::begin(&server, "slow").await;
    let (mut reading, mut writing) = import_in_progress.connection.into_split();
    // Each byte comes in time, and all of them would take for ever.
    let sending = tokio::spawn(async move {
        while writing.write_all(b"1\r\n \r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let mut answer = Vec::new();
    let reading = tokio::time::timeout(LIMIT, reading.read_to_end(&mut answer)).await;
    sending.abort();
    assert!(reading.is_ok(), "it goes on");
    let answer = text(&answer);
    assert!(
        answer.starts_with("HTTP/1.1 408") && answer.contains("bytes came a second"),
        "{answer}"
    );
    can_be_imported(&server, "slow", &file).await;
}
