//! Clients that hold connections, send too much, or forge the Host header, against the real binary.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_testkit::Postgres;
use sqlx::{Connection, PgConnection};

use crate::support::sender::{github, github_issues, integrations, send};
use crate::support::{LIMIT, Server, ServerDir};

/// More than the default connection limit.
const SOCKETS: usize = 1_500;

/// Longer than a test, so that no test passes because of these timeouts.
const LONG_TIMEOUTS: [&str; 4] = ["--http-read-timeout", "10m", "--http-request-timeout", "10m"];

/// Open sockets that have sent only the start of a request.
fn slow_sockets(server: &Server, begin: &str) -> Vec<TcpStream> {
    let open = |_| {
        let mut socket = TcpStream::connect(server.address).expect("a connection");
        // The server may close it at once.
        let _ = socket.write_all(begin.as_bytes());
        socket
    };
    (0..SOCKETS).map(open).collect()
}

/// Sends a request over a new connection from this address.
async fn ask(server: &Server, from: [u8; 4], path: &str) -> Result<(u16, String)> {
    let client = reqwest::Client::builder().local_address(std::net::IpAddr::from(from));
    let client = client.no_proxy().timeout(LIMIT / 4).build()?;
    let response = client.get(server.url(path)).send().await?;
    Ok((response.status().as_u16(), response.text().await?))
}

async fn all_are_answered(server: &Server) -> Result<()> {
    for probe in 0..8 {
        let (status, _) = ask(server, [127, 0, 0, 1], "/health/live")
            .await
            .with_context(|| format!("probe {probe} of /health/live"))?;
        assert_eq!(status, 200, "probe {probe}");
    }
    let (status, body) = ask(server, [127, 0, 0, 2], "/api/v1/topics").await?;
    assert_eq!(status, 200, "another client: {body}");
    Ok(())
}

#[tokio::test]
async fn clients_with_slow_headers_do_not_block_probes_or_other_clients() -> Result<()> {
    support::client();
    let dir = ServerDir::new()?;
    let server = dir.serve(&LONG_TIMEOUTS)?;
    let _sockets =
        slow_sockets(&server, "GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Slow: ");
    all_are_answered(&server).await
}

#[tokio::test]
async fn silent_clients_do_not_block_probes_or_other_clients() -> Result<()> {
    support::client();
    let dir = ServerDir::new()?;
    let server = dir.serve(&LONG_TIMEOUTS)?;
    let _sockets = slow_sockets(&server, "");
    all_are_answered(&server).await
}

/// These requests are in progress, so none of their connections may be closed.
#[tokio::test]
async fn clients_with_slow_bodies_do_not_block_probes_or_other_clients() -> Result<()> {
    support::client();
    let dir = ServerDir::new()?.settings(&integrations())?;
    let server = dir.serve(&[&LONG_TIMEOUTS[..], &["--http-rate-burst", "100000"]].concat())?;
    let begin = "POST /webhooks/github/shop HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
                 Content-Length: 1000\r\n\r\n{";
    let _sockets = slow_sockets(&server, begin);
    all_are_answered(&server).await
}

/// Whether the server closes the connection; received data is skipped.
fn is_ended(socket: &mut TcpStream) -> bool {
    let mut buffer = [0; 4096];
    socket.set_read_timeout(Some(LIMIT)).expect("a time limit");
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

#[tokio::test]
async fn headers_and_idle_connections_have_a_deadline() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--http-read-timeout", "500ms"])?;
    let connect = || TcpStream::connect(server.address);
    let mut silent = connect()?;
    let mut idle = connect()?;
    idle.write_all(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let mut dripping = connect()?;
    dripping.write_all(b"GET /health/live HTTP/1.1\r\nX-Slow: ")?;
    let mut drips = dripping.try_clone()?;
    // Single bytes do not extend the deadline; this ends when the server closes the connection.
    let drip = std::thread::spawn(move || {
        while drips.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    for (name, socket) in
        [("silent", &mut silent), ("idle", &mut idle), ("dripping", &mut dripping)]
    {
        assert!(is_ended(socket), "the {name} connection is still open");
    }
    drip.join().expect("no panic");
    Ok(())
}

#[tokio::test]
async fn a_client_that_does_not_read_its_responses_is_disconnected() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--http-read-timeout", "10m", "--http-request-timeout", "1s"])?;
    let mut socket = TcpStream::connect(server.address)?;
    socket.set_write_timeout(Some(LIMIT))?;
    // Requests until both directions are full; then the next write waits for the server.
    let request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let error = loop {
        if let Err(error) = socket.write_all(request) {
            break error.kind();
        }
    };
    assert!(matches!(error, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
    Ok(())
}

fn raw(address: SocketAddr, request: &str) -> Result<String> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(LIMIT))?;
    socket.write_all(request.as_bytes())?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer)
}

#[tokio::test]
async fn a_host_with_a_loopback_prefix_is_rejected() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    for (host, status) in [
        ("127.0.0.1:80", "200"),
        ("127.0.0.1:x@evil.example", "403"),
        ("127.0.0.1:80@evil.example", "403"),
        ("localhost@evil.example", "403"),
    ] {
        let request =
            format!("GET /api/v1/topics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        let answer = raw(server.address, &request)?;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{host}: {answer}");
    }
    Ok(())
}

/// Peak memory of the process in MiB.
fn peak_mib(server: &Server) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid()))?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).context("VmHWM")?;
    let kib: u64 = line.split_whitespace().nth(1).context("a number")?.parse()?;
    Ok(kib / 1024)
}

/// Concurrent requests.
const BOMBS: u64 = 24;
/// Small objects in one body of 420 KB; decoded they take a hundred times as much.
const OBJECTS: usize = 60_000;

/// The database does not answer, so decoded requests stay in memory.
#[tokio::test(flavor = "multi_thread")]
async fn decoded_bodies_stay_within_the_memory_budget() -> Result<()> {
    let dir = ServerDir::new()?.settings(&integrations())?;
    let database = Postgres::shared()?.database()?;
    let server = dir.serve(&["--database-url", &database.url()])?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    let mut locked = PgConnection::connect(&database.url()).await?;
    sqlx::query("BEGIN").execute(&mut locked).await?;
    sqlx::query("LOCK TABLE issues, event_logs IN ACCESS EXCLUSIVE MODE")
        .execute(&mut locked)
        .await?;
    let before = peak_mib(&server)?;

    let bomb = format!(",\"bomb\":[{}]}}", vec!["{\"\":0}"; OBJECTS].join(","));
    let mut sending = Vec::new();
    for number in 0..BOMBS {
        let body = github_issues("opened", number, "Where is it?").to_string();
        let body = body.strip_suffix('}').context("an object")?.to_owned() + bomb.as_str();
        let delivery = format!("bomb-{number}");
        sending.push(tokio::spawn(send(github(&server, "issues", &delivery, body.as_bytes()))));
    }
    let mut statuses = Vec::new();
    for one in sending {
        statuses.push(one.await??.0);
    }
    let peak = peak_mib(&server)?;
    println!("peak {before} MiB before, {peak} MiB after: {statuses:?}");
    assert!(statuses.iter().all(|status| *status == 503), "{statuses:?}");
    // The budget is 256 MiB; the rest covers buffers and heap fragmentation.
    assert!(peak - before < 512, "the peak rose from {before} to {peak} MiB");

    // Reservations are released, and a body that can never fit is rejected permanently.
    sqlx::query("ROLLBACK").execute(&mut locked).await?;
    let body = github_issues("opened", 1, "Where is it?").to_string();
    let (status, answer) = send(github(&server, "issues", "last", body.as_bytes())).await?;
    assert_eq!((status, answer["status"].as_str()), (200, Some("ok")), "{answer}");
    let endless = format!("{{\"messages\":[{}]}}", vec!["{}"; 340_000].join(","));
    let request = server.client.post(server.url("/api/v1/topics/jobs/messages"));
    let request = request.header("content-type", "application/json").body(endless);
    let (status, answer) = send(request).await?;
    assert_eq!((status, answer["error"]["code"].as_str()), (413, Some("too_large")), "{answer}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_bodies_use_only_one_clients_share_and_get_retry_after() -> Result<()> {
    let dir = ServerDir::new()?.settings(&integrations())?;
    let server = dir.serve(&["--http-body-memory-bytes-max", "16777216"])?;
    // One client holds 8 bodies of almost a megabyte: its share of 16 MiB.
    let head = "POST /webhooks/github/shop HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
                Content-Length: 1048576\r\n\r\n";
    let mut held = Vec::new();
    for _ in 0..8 {
        let mut socket = TcpStream::connect(server.address)?;
        socket.write_all(head.as_bytes())?;
        socket.write_all(&vec![b' '; 1024 * 1024 - 1])?;
        held.push(socket);
    }
    let body = format!("{{\"zen\":\"{}\"}}", "x".repeat(1_000_000));
    let request = || github(&server, "ping", "1", body.as_bytes());
    let refused = loop {
        // Until the server has read all unfinished bodies.
        let response = request().send().await?;
        if response.status() == 503 {
            break response;
        }
    };
    assert!(refused.headers().contains_key("retry-after"), "{refused:?}");
    // Another client has the other half.
    let other = reqwest::Client::builder().no_proxy().timeout(LIMIT);
    let other = other.local_address(std::net::IpAddr::from([127, 0, 0, 2])).build()?;
    let (_, request) = (drop(refused), request().build()?);
    assert_eq!(other.execute(request).await?.status(), 200);
    drop(held);
    Ok(())
}
