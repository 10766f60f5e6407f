//! Pull and settle over HTTP: servers and clients that are killed, and the commands and the Python client of
//! `docs/topics.md`. Needs `bash`, `curl` and `python3`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_testkit::{Cluster, Redis, unique, wait_until};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use support::{LIMIT, Server, ServerDir, text};

/// A block of the documentation in this language.
fn block(language: &str) -> String {
    let path = headwater_testkit::package_folder().join("../../docs/topics.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (_, section) = page.split_once("## Consume from any language").unwrap();
    let (_, rest) = section.split_once(&format!("```{language}\n")).unwrap();
    rest.split("```").next().unwrap().to_owned()
}

async fn ok(server: &Server, path: &str, body: Value) -> Result<Value> {
    let url = format!("/api/v1/topics/{path}");
    let (status, answer) = server.post(url.trim_end_matches('/'), &body).await?;
    assert!(status == 200 || status == 201, "{path}: {status} {answer}\n{}", server.log());
    Ok(answer)
}

async fn produce(server: &Server, topic: &str, payloads: &[&str]) -> Result<()> {
    let messages: Vec<Value> = payloads.iter().map(|text| json!({"payload": text})).collect();
    ok(server, &format!("{topic}/messages"), json!({"messages": messages})).await?;
    Ok(())
}

/// Pulls until there are so many messages.
async fn pull(server: &Server, topic: &str, count: usize, lease_ms: u64) -> Result<Vec<Value>> {
    let mut pulled = Vec::new();
    let deadline = tokio::time::Instant::now() + LIMIT;
    while pulled.len() < count {
        assert!(tokio::time::Instant::now() < deadline, "{pulled:?}\n{}", server.log());
        let body = json!({"max": count - pulled.len(), "lease_ms": lease_ms, "wait_ms": 2000});
        let mut answer = ok(server, &format!("{topic}/groups/g/pull"), body).await?;
        let Value::Array(messages) = answer["messages"].take() else { panic!("{answer}") };
        pulled.extend(messages);
    }
    Ok(pulled)
}

async fn settle(server: &Server, topic: &str, messages: &[Value], outcome: &str) -> Result<Value> {
    let settlement =
        |one: &Value| json!({"lease": one["lease"], "outcome": outcome, "reason": "r"});
    let settlements: Vec<Value> = messages.iter().map(settlement).collect();
    let body = json!({"settlements": settlements});
    Ok(ok(server, &format!("{topic}/groups/g/settle"), body).await?["results"].take())
}

async fn pending(server: &Server, topic: &str) -> Result<u64> {
    let (_, group) = server.get(&format!("/api/v1/topics/{topic}/groups/g")).await?;
    group["pending"].as_u64().context(group.to_string())
}

async fn what_a_killed_server_gave_is_settled_by_another(url: &str) -> Result<()> {
    let (dir, other_dir) = (ServerDir::new()?, ServerDir::new()?);
    let (mut first, second) =
        (dir.serve(&["--stream-url", url])?, other_dir.serve(&["--stream-url", url])?);
    let topic = &unique("orders");
    ok(&first, "", json!({"name": topic, "partitions": 3})).await?;
    produce(&first, topic, &["a", "b", "c", "d"]).await?;
    let pulled = pull(&first, topic, 4, 60_000).await?;
    // One more pull waits at the server that dies.
    let path = first.url(&format!("/api/v1/topics/{topic}/groups/g/pull"));
    let waiting = tokio::spawn(first.client.post(path).json(&json!({"wait_ms": 20_000})).send());
    first.kill9()?;
    assert!(waiting.await?.is_err());

    let leases: Vec<&Value> = pulled.iter().map(|one| &one["lease"]).collect();
    let path = format!("{topic}/groups/g/extend");
    let extended = ok(&second, &path, json!({"leases": leases})).await?;
    assert_eq!(extended["results"], json!(vec!["extended"; 4]));
    assert_eq!(settle(&second, topic, &pulled[..2], "done").await?, json!(["settled", "settled"]));
    assert_eq!(settle(&second, topic, &pulled[2..3], "retry").await?, json!(["settled"]));
    assert_eq!(settle(&second, topic, &pulled[3..], "release").await?, json!(["settled"]));
    // A repeated call is harmless.
    assert_eq!(settle(&second, topic, &pulled[..3], "done").await?, json!(vec!["expired"; 3]));

    let mut again = pull(&second, topic, 2, 60_000).await?;
    again.sort_by_key(|one| one["attempt"].as_u64());
    let payloads = again.iter().map(|one| (&one["payload"], &one["attempt"]));
    let expected = [(&pulled[3]["payload"], &json!(1)), (&pulled[2]["payload"], &json!(2))];
    assert!(payloads.eq(expected), "{again:?}");
    assert_eq!(settle(&second, topic, &again, "done").await?, json!(["settled", "settled"]));
    assert_eq!(pending(&second, topic).await?, 0);
    Ok(())
}

#[tokio::test]
async fn what_a_killed_server_gave_is_settled_by_another_on_redis() -> Result<()> {
    let redis = Redis::shared()?;
    what_a_killed_server_gave_is_settled_by_another(&redis.url()).await
}

#[tokio::test]
async fn what_a_killed_server_gave_is_settled_by_another_on_a_cluster() -> Result<()> {
    let cluster = Cluster::shared()?;
    what_a_killed_server_gave_is_settled_by_another(&cluster.url()).await
}

#[tokio::test]
async fn leases_survive_a_killed_server_on_embedded_streams() -> Result<()> {
    let dir = ServerDir::new()?;
    let mut server = dir.serve(&[])?;
    ok(&server, "", json!({"name": "orders", "partitions": 2})).await?;
    produce(&server, "orders", &["a", "b"]).await?;
    let pulled = pull(&server, "orders", 2, 3000).await?;
    server.kill9()?;
    let server = dir.serve(&[])?;
    assert_eq!(settle(&server, "orders", &pulled[..1], "done").await?, json!(["settled"]));
    // The other lease runs out, and its holder is fenced.
    let again = pull(&server, "orders", 1, 60_000).await?;
    assert_eq!((&again[0]["id"], &again[0]["deliveries"]), (&pulled[1]["id"], &json!(2)));
    assert_eq!(settle(&server, "orders", &pulled[1..], "retry").await?, json!(["expired"]));
    assert_eq!(settle(&server, "orders", &again, "dead_letter").await?, json!(["settled"]));
    assert_eq!(pending(&server, "orders").await?, 0);
    let (_, letters) = server.get("/api/v1/topics/orders/dead-letters").await?;
    assert_eq!(letters["dead_letters"][0]["reason"], "r", "{letters}");
    Ok(())
}

#[tokio::test]
async fn invalid_leases_and_too_many_are_rejected() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let path = "/api/v1/topics/orders/groups/g";
    let lease = json!({"lease": "bm8", "outcome": "done"});
    for (what, body) in [
        ("settle", json!({"settlements": [lease]})),
        ("settle", json!({"settlements": vec![lease.clone(); 1001]})),
        ("extend", json!({"leases": [""]})),
        ("extend", json!({"leases": vec!["bm8"; 1001]})),
        ("pull", json!({"max": 0})),
        ("pull", json!({"lease_ms": 1})),
        ("pull", json!({"wait_ms": 60_001})),
        ("pull", json!({"mode": "owned"})),
    ] {
        let (status, answer) = server.post(&format!("{path}/{what}"), &body).await?;
        assert_eq!(status, 400, "{what}: {answer}");
    }
    Ok(())
}

/// A client that is killed with its command on drop.
struct Client(Child);

impl Drop for Client {
    fn drop(&mut self) {
        let group = Pid::from_raw(self.0.id().cast_signed()).unwrap();
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.0.wait();
    }
}

fn python(dir: &Path, server: &Server, script: &str) -> Client {
    let mut command = Command::new("python3");
    command.args(["client.py", "jobs", "g", "sh", "-c", script]).current_dir(dir);
    command.env("HEADWATER_URL", server.url("")).env("LEASE_MS", "2000");
    Client(command.process_group(0).stdin(Stdio::null()).spawn().expect("python3 is installed"))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_client_of_the_documentation_works_and_may_be_killed() -> Result<()> {
    let code = block("python");
    assert!(code.lines().count() <= 50);
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--stream-url", &redis.url()])?;
    std::fs::write(dir.path().join("client.py"), code)?;
    ok(&server, "", json!({"name": "jobs", "partitions": 2, "max_retries": 1})).await?;
    let file = |name: &str| dir.path().join(name);
    let lines = |name: &str| {
        let text = std::fs::read_to_string(file(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };

    // Killed in the middle of its work.
    produce(&server, "jobs", &["precious\n"]).await?;
    let client = python(dir.path(), &server, "cat >> begun; sleep 600");
    wait_until("the work to begin", LIMIT, || lines("begun") == ["precious"])?;
    drop(client);

    // The work takes longer than the lease, which is extended; bad messages become dead letters.
    produce(&server, "jobs", &["bad\n", "good\n"]).await?;
    let script = "read -r job; echo $job >> seen; sleep 4; [ $job != bad ] && echo $job >> done";
    let clients = [(); 3].map(|()| python(dir.path(), &server, script));
    wait_until("all to be done", LIMIT * 2, || lines("done").len() == 2)?;
    let letters = "/api/v1/topics/jobs/dead-letters";
    let letters = server.until(letters, |_, page| page["dead_letters"][0].is_object()).await?;
    assert_eq!(letters["dead_letters"][0]["payload"], "bad\n", "{letters}");
    let group = "/api/v1/topics/jobs/groups/g";
    server.until(group, |_, group| group["pending"] == 0 && group["lag"] == 0).await?;
    drop(clients);
    let mut seen = lines("seen");
    seen.sort();
    assert_eq!(seen, ["bad", "bad", "good", "precious"], "each once, the bad one twice");
    Ok(())
}

#[test]
fn the_curl_commands_of_the_documentation_work() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let created = dir.run(&["topic", "create", "orders", "--url", &server.url("")])?;
    assert!(created.status.success(), "{}", text(&created.stderr));
    let script = format!("set -euo pipefail\n{}", block("bash"));
    let mut command = Command::new("bash");
    command
        .args(["-c", &script])
        .env("HEADWATER_URL", server.url(""))
        .env_remove("HEADWATER_TOKEN");
    let output = command.output().context("bash is installed")?;
    let (printed, problem) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{printed}\n{problem}");
    for words in ["flat white", r#"{"results":["extended"]}"#, r#"{"results":["settled"]}"#] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
    // A few seconds later the group is no longer active.
    let mut last = String::new();
    wait_until("the group to be inactive", Duration::from_secs(30), || {
        let url = server.url("");
        let words = ["group", "delete", "orders", "baristas", "--yes", "--url", &url];
        let output = dir.run(&words).unwrap();
        last = text(&output.stderr);
        output.status.success()
    })
    .context(last)
}
