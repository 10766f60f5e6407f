//! Replay plans with the real binary: canary, ramp, automatic stop, pause, crashes and outages.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Persistence, Postgres, Redis};
use serde_json::{Value, json};
use support::{LIMIT, Server, ServerDir, client, eventually, text};
use tokio::task::JoinHandle;

const REASON: &str = "order 17 has no address";

/// Pulls messages of `orders` from whichever server runs, and settles them as told.
struct Consumer {
    /// The address of the server.
    url: Arc<Mutex<String>>,
    /// Deliveries by payload.
    handled: Arc<Mutex<BTreeMap<String, usize>>>,
    task: JoinHandle<()>,
}

/// What a consumer does with a message: `None` is success, else the reason of a dead letter.
type Verdict = fn(&str) -> Option<&'static str>;

impl Consumer {
    fn start(server: &Server, verdict: Verdict) -> Self {
        let url = Arc::new(Mutex::new(server.url("")));
        let handled: Arc<Mutex<BTreeMap<String, usize>>> = Arc::default();
        let (shared, seen) = (Arc::clone(&url), Arc::clone(&handled));
        let task = tokio::spawn(async move {
            let client = client();
            loop {
                let root = shared.lock().unwrap().clone();
                let group = format!("{root}/api/v1/topics/orders/groups/billing");
                let wanted = json!({"max": 50, "wait_ms": 300, "lease_ms": 2000});
                let pulled = client.post(format!("{group}/pull")).json(&wanted).send().await;
                let Ok(answer) = pulled else {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                };
                let answer: Value = answer.json().await.unwrap_or_default();
                let messages = answer["messages"].as_array().cloned().unwrap_or_default();
                let mut settlements = Vec::new();
                for message in &messages {
                    let payload = message["payload"].as_str().unwrap_or_default();
                    *seen.lock().unwrap().entry(payload.to_owned()).or_default() += 1;
                    settlements.push(match verdict(payload) {
                        None => json!({"lease": message["lease"], "outcome": "done"}),
                        Some(reason) => {
                            json!({"lease": message["lease"], "outcome": "dead_letter", "reason": reason})
                        }
                    });
                }
                if !settlements.is_empty() {
                    let body = json!({"settlements": settlements});
                    let _ = client.post(format!("{group}/settle")).json(&body).send().await;
                } else {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        });
        Self { url, handled, task }
    }

    fn turn_to(&self, server: &Server) {
        *self.url.lock().unwrap() = server.url("");
    }

    fn handled(&self) -> BTreeMap<String, usize> {
        self.handled.lock().unwrap().clone()
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn ok(server: &Server, path: &str, body: &Value) -> Result<Value> {
    let (status, answer) = server.post(&format!("/api/v1{path}"), body).await?;
    ensure!(status == 200 || status == 201, "{path}: {status} {answer}\n{}", server.log());
    Ok(answer)
}

/// Makes dead letters with one cause.
async fn dead_letters(server: &Server, count: usize) -> Result<()> {
    let topic = json!({"name": "orders", "partitions": 3});
    ok(server, "/topics", &topic).await?;
    let message = |n: usize| json!({"key": format!("k{n}"), "payload": format!("order-{n}")});
    let messages = json!({"messages": (0..count).map(message).collect::<Vec<_>>()});
    ok(server, "/topics/orders/messages", &messages).await?;
    let consumer = Consumer::start(server, |_| Some(REASON));
    let all = move |_: u16, topic: &Value| topic["dead_letters"] == count;
    server.until("/api/v1/topics/orders", all).await?;
    drop(consumer);
    // Messages whose settlement was cut off are pending until their lease ends.
    let none = |_: u16, group: &Value| group["pending"] == 0;
    server.until("/api/v1/topics/orders/groups/billing", none).await?;
    Ok(())
}

async fn plan_for_topic(server: &Server) -> Result<String> {
    let made = ok(server, "/plans", &json!({"topics": ["orders"]})).await?;
    Ok(format!("/api/v1/plans/{}", made["id"].as_i64().context("an id")?))
}

fn counters(plan: &Value) -> [u64; 6] {
    ["total", "sent", "settled", "failed", "skipped", "left"]
        .map(|name| plan[name].as_u64().unwrap_or(u64::MAX))
}

/// Every letter was sent once: the topic has each message twice, the first and its replay.
async fn must_be_sent_once(server: &Server, count: usize) -> Result<()> {
    let (_, topic) = server.get("/api/v1/topics/orders").await?;
    ensure!(topic["length"] == 2 * count && topic["dead_letters"] == 0, "{topic}");
    Ok(())
}

async fn all_are_settled(server: &Server, plan: &str, count: usize) -> Result<Value> {
    let ended = server.until(plan, |_, plan| plan["state"] != "running").await?;
    let count = count as u64;
    ensure!(ended["state"] == "done", "{ended:#}\n{}", server.log());
    ensure!(counters(&ended) == [count, count, count, 0, 0, 0], "{ended:#}");
    Ok(ended)
}

#[tokio::test]
async fn a_plan_replays_a_cause_and_counts_what_its_group_has_settled() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    dead_letters(&server, 20).await?;
    let (_, failures) = server.get("/api/v1/failures").await?;
    let cause = failures["clusters"][0]["id"].as_str().context("a cause")?;

    // A dry run counts and changes nothing.
    let request = json!({"failure": cause, "dry_run": true});
    let tried = ok(&server, "/plans", &request).await?;
    ensure!(tried["letters"] == 20 && tried["groups"] == json!(["billing"]), "{tried:#}");
    ensure!(tried["examples"].as_array().is_some_and(|all| all.len() == 10), "{tried:#}");
    ensure!(server.get("/api/v1/plans").await?.1["plans"] == json!([]));

    // The canary waits for its outcomes: nothing more is sent while no consumer runs.
    let made = ok(&server, "/plans", &json!({"failure": cause})).await?;
    ensure!(made["cause"] == "order # has no address" && made["total"] == 20, "{made:#}");
    let plan = format!("/api/v1/plans/{}", made["id"]);
    let waits = |_: u16, plan: &Value| plan["sent"] == 5 && plan["why"]["reason"] != "sending";
    let waiting = server.until(&plan, waits).await?;
    ensure!(waiting["awaited"] == 5 && waiting["step"]["kind"] == "canary", "{waiting:#}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (_, waiting) = server.get(&plan).await?;
    ensure!(counters(&waiting) == [20, 5, 0, 0, 0, 15], "{waiting:#}");

    let consumer = Consumer::start(&server, |_| None);
    let ended = all_are_settled(&server, &plan, 20).await?;
    ensure!(ended["why"]["sentence"].as_str().is_some_and(|why| why.contains("is done")));
    ensure!(consumer.handled().len() == 20, "{:?}", consumer.handled());
    must_be_sent_once(&server, 20).await?;

    // Plans are marks of the history, which ends with the last complete step.
    let is_marked = |_: u16, history: &Value| {
        let mut marks = history["marks"].as_array().into_iter().flatten();
        marks.any(|mark| mark["kind"] == "plan" && mark["plan"] == made["id"])
    };
    server.until("/api/v1/history?step=10s", is_marked).await?;
    Ok(())
}

#[tokio::test]
async fn a_cause_that_returns_stops_the_plan_and_a_resumed_one_begins_with_a_canary() -> Result<()>
{
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--stream-url", &redis.url()])?;
    dead_letters(&server, 30).await?;
    let consumer = Consumer::start(&server, |_| Some("order 99 has no address"));
    let plan = plan_for_topic(&server).await?;
    let is_over = |_: u16, plan: &Value| plan["state"] != "running" && plan["awaited"] == 0;
    let ended = server.until(&plan, is_over).await?;
    let failed = ended["failed"].as_u64().unwrap_or(0);
    ensure!(ended["state"] == "stopped" && ended["failed_same_cause"] == failed, "{ended:#}");
    ensure!((1..=5).contains(&failed), "only the canary was sent: {ended:#}");
    ensure!(counters(&ended) == [30, failed, 0, failed, 0, 30 - failed], "{ended:#}");
    let reason = ended["reason"].as_str().unwrap_or_default();
    ensure!(
        reason.contains("of the 5 letters of step 1 failed again, with the same cause"),
        "{reason}"
    );
    let why = ended["why"]["sentence"].as_str().unwrap_or_default();
    ensure!(why.contains("headwater plan resume"), "{why}");
    drop(consumer);

    // The cause is fixed. Letters that came back are newer than the plan: it does not take them again.
    let _consumer = Consumer::start(&server, |_| None);
    ok(&server, &format!("{}/resume", &plan["/api/v1".len()..]), &json!({})).await?;
    let ended = server.until(&plan, |_, plan| plan["state"] != "running").await?;
    ensure!(ended["state"] == "done", "{ended:#}");
    ensure!(counters(&ended) == [30, 30, 30 - failed, failed, 0, 0], "{ended:#}");
    ensure!(ended["step"]["number"].as_u64() > Some(2), "it began with a canary: {ended:#}");
    let (_, topic) = server.get("/api/v1/topics/orders").await?;
    ensure!(topic["dead_letters"] == failed, "{topic}");
    Ok(())
}

#[tokio::test]
async fn a_retried_message_is_settled_when_its_last_retry_is() -> Result<()> {
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--stream-url", &redis.url()])?;
    dead_letters(&server, 3).await?;
    let plan = plan_for_topic(&server).await?;
    server.until(&plan, |_, plan| plan["sent"] == 3).await?;
    // All three are retried: in the delay set, then in the stream again under new ids.
    let group = "/topics/orders/groups/billing";
    for after_ms in [3000, 0] {
        let mut settled = 0;
        while settled < 3 {
            let wanted = json!({"max": 3, "wait_ms": 1000, "lease_ms": 30000});
            let pulled = ok(&server, &format!("{group}/pull"), &wanted).await?;
            let messages = pulled["messages"].as_array().context("messages")?;
            let retry = |one: &Value| json!({"lease": one["lease"], "outcome": "retry", "after_ms": after_ms, "reason": "later"});
            let settlements: Vec<Value> = messages.iter().map(retry).collect();
            settled += settlements.len();
            if !settlements.is_empty() {
                ok(&server, &format!("{group}/settle"), &json!({"settlements": settlements}))
                    .await?;
            }
        }
        // Several observations, while the messages are delayed or wait for their next delivery.
        tokio::time::sleep(Duration::from_millis(2200)).await;
        let (_, waiting) = server.get(&plan).await?;
        ensure!(counters(&waiting)[..4] == [3, 3, 0, 0], "retried, not settled: {waiting:#}");
    }
    let _consumer = Consumer::start(&server, |_| None);
    all_are_settled(&server, &plan, 3).await?;
    Ok(())
}

#[tokio::test]
async fn letters_recorded_before_an_outage_and_a_pause_are_sent_after_both() -> Result<()> {
    let (redis, database) = (Redis::start()?, Postgres::shared()?.database()?);
    let dir = ServerDir::new()?;
    let arguments = ["--stream-url", &redis.url(), "--database-url", &database.url()];
    let server = dir.serve(&arguments)?;
    dead_letters(&server, 8).await?;
    // Letters are read and recorded, but Redis takes no writes.
    redis.command(&["CONFIG", "SET", "min-replicas-to-write", "1"])?;
    let plan = plan_for_topic(&server).await?;
    let short = plan["/api/v1".len()..].to_owned();
    server.until(&plan, |_, plan| plan["why"]["reason"] == "unavailable").await?;
    ok(&server, &format!("{short}/pause"), &json!({})).await?;
    redis.command(&["CONFIG", "SET", "min-replicas-to-write", "0"])?;
    // The paused plan has found out that they were not sent.
    let looked = "SELECT count(*) FROM replay_plans WHERE problem IS NULL";
    eventually("the problem to end", || database.query(looked).is_ok_and(|count| count == "1"))
        .await?;
    let _consumer = Consumer::start(&server, |_| None);
    ok(&server, &format!("{short}/resume"), &json!({})).await?;
    all_are_settled(&server, &plan, 8).await?;
    must_be_sent_once(&server, 8).await
}

#[tokio::test]
async fn a_paused_or_cancelled_plan_sends_nothing_after_a_second() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    dead_letters(&server, 60).await?;
    let _consumer = Consumer::start(&server, |_| None);
    let plan = plan_for_topic(&server).await?;
    let short = plan["/api/v1".len()..].to_owned();
    let sent = |plan: &Value| plan["sent"].as_u64().unwrap_or(0);
    let still = async || -> Result<u64> {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = sent(&server.get(&plan).await?.1);
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let after = sent(&server.get(&plan).await?.1);
        ensure!(before == after && after < 60, "{before} and {after} sent");
        Ok(after)
    };
    server.until(&plan, |_, plan| sent(plan) >= 10).await?;
    let paused = ok(&server, &format!("{short}/pause"), &json!({})).await?;
    ensure!(paused["state"] == "paused" && paused["changed"] == true, "{paused:#}");
    let again = ok(&server, &format!("{short}/pause"), &json!({})).await?;
    ensure!(again["changed"] == false, "{again:#}");
    let at_pause = still().await?;
    // What was sent is still observed.
    server.until(&plan, |_, plan| plan["settled"] == at_pause).await?;
    ok(&server, &format!("{short}/resume"), &json!({})).await?;
    server.until(&plan, |_, plan| sent(plan) > at_pause).await?;
    ok(&server, &format!("{short}/cancel"), &json!({})).await?;
    let at_end = still().await?;
    let ended = server.until(&plan, |_, plan| plan["settled"] == at_end).await?;
    ensure!(ended["state"] == "cancelled" && ended["left"] == 60 - at_end, "{ended:#}");
    let (status, refused) = server.post(&format!("{plan}/resume"), &json!({})).await?;
    ensure!(status == 409, "{refused}");
    let (_, topic) = server.get("/api/v1/topics/orders").await?;
    ensure!(topic["dead_letters"] == 60 - at_end, "{topic}");
    // Each change once.
    let (_, audit) = server.get("/api/v1/audit?limit=500").await?;
    let entries = audit["entries"].as_array().context("entries")?;
    for (verb, count) in [("pause", 2), ("resume", 2), ("cancel", 1)] {
        let path = format!("{plan}/{verb}");
        let found = entries.iter().filter(|entry| entry["path"] == *path).count();
        ensure!(found == count, "{path}: {found}");
    }
    Ok(())
}

/// Kills the process during the canary and during the ramp. `rivals`: another process takes over, else it is restarted.
async fn a_kill_loses_and_repeats_no_letter(arguments: &[&str], rivals: bool) -> Result<()> {
    const LETTERS: usize = 45;
    let dir = ServerDir::new()?;
    let other_dir = ServerDir::new()?;
    let mut server = dir.serve(arguments)?;
    dead_letters(&server, LETTERS).await?;
    let plan = plan_for_topic(&server).await?;
    let next = |server: &mut Server| -> Result<()> {
        let started = match rivals {
            true => Some(other_dir.serve(arguments)?),
            false => None,
        };
        server.kill9()?;
        *server = match started {
            Some(started) => started,
            None => dir.serve(arguments)?,
        };
        Ok(())
    };
    // During the canary: sent, without an outcome.
    server.until(&plan, |_, plan| plan["sent"].as_u64().is_some_and(|sent| sent >= 1)).await?;
    next(&mut server)?;
    let consumer = Consumer::start(&server, |_| None);
    // During the ramp, three times.
    for sent in [10, 20, 30] {
        let is_there = |_: u16, plan: &Value| plan["sent"].as_u64().is_some_and(|it| it >= sent);
        server.until(&plan, is_there).await?;
        next(&mut server)?;
        consumer.turn_to(&server);
    }
    all_are_settled(&server, &plan, LETTERS).await?;
    must_be_sent_once(&server, LETTERS).await?;
    ensure!(consumer.handled().len() == LETTERS, "{:?}", consumer.handled());
    Ok(())
}

#[tokio::test]
async fn a_kill_loses_and_repeats_no_letter_on_sqlite() -> Result<()> {
    let redis = Redis::start()?;
    a_kill_loses_and_repeats_no_letter(&["--stream-url", &redis.url()], false).await
}

#[tokio::test]
async fn a_kill_loses_and_repeats_no_letter_on_postgres() -> Result<()> {
    let redis = Redis::start()?;
    let database = Postgres::shared()?.database()?;
    let arguments = ["--stream-url", &redis.url(), "--database-url", &database.url()];
    a_kill_loses_and_repeats_no_letter(&arguments, true).await
}

#[tokio::test]
async fn a_plan_waits_for_redis_and_for_postgres_and_goes_on() -> Result<()> {
    let redis = Redis::builder().persistence(Persistence::Always).start()?;
    let postgres = Postgres::start()?;
    let database = postgres.database()?;
    let dir = ServerDir::new()?;
    let arguments = ["--stream-url", &redis.url(), "--database-url", &database.url()];
    let server = dir.serve(&arguments)?;
    dead_letters(&server, 40).await?;
    let consumer = Consumer::start(&server, |_| None);
    let plan = plan_for_topic(&server).await?;
    let sent = |count: u64| {
        move |_: u16, plan: &Value| plan["sent"].as_u64().is_some_and(|sent| sent >= count)
    };
    server.until(&plan, sent(8)).await?;
    redis.kill9()?;
    let waits = |_: u16, plan: &Value| plan["why"]["reason"] == "unavailable";
    let waiting = server.until(&plan, waits).await?;
    ensure!(waiting["state"] == "running" && waiting["problem"].is_string(), "{waiting:#}");
    redis.restart()?;
    let goes_on = |_: u16, plan: &Value| plan["problem"].is_null();
    server.until(&plan, goes_on).await?;
    server.until(&plan, sent(15)).await?;
    postgres.stop()?;
    ensure!(server.get(&plan).await?.0 == 503);
    server.wait_for_log("replay plans wait")?;
    postgres.restart()?;
    let ended = server.until(&plan, |status, plan| status == 200 && plan["state"] != "running");
    let ended = ended.await?;
    ensure!(ended["state"] == "done" && ended["sent"] == 40, "{ended:#}");
    ensure!(ended["settled"] == 40, "{ended:#}");
    drop(consumer);
    Ok(())
}

#[tokio::test]
async fn plans_are_bounded_and_bad_requests_have_no_effect() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    dead_letters(&server, 60).await?;
    for (body, status) in [
        (json!({}), 400),
        (json!({"topics": []}), 400),
        (json!({"topics": ["orders"], "failure": "0"}), 400),
        (json!({"failure": "0", "reason": "x"}), 400),
        (json!({"topics": vec!["orders"; 51]}), 400),
        (json!({"topics": ["orders"], "from": "yesterday"}), 400),
        (json!({"topics": ["none"]}), 404),
        (json!({"failure": "0123456789abcdef"}), 404),
        (json!({"topics": ["orders"], "reason": "another"}), 409),
    ] {
        let (found, answer) = server.post("/api/v1/plans", &body).await?;
        ensure!(found == status, "{body}: {found} {answer}");
    }
    ensure!(server.get("/api/v1/plans").await?.1["plans"] == json!([]));
    for verb in ["pause", "resume", "cancel"] {
        let (status, _) = server.post(&format!("/api/v1/plans/7/{verb}"), &json!({})).await?;
        ensure!(status == 404);
    }
    // A paused plan counts, too. Letters that another plan has sent are not counted again.
    for number in 1..=5 {
        ok(&server, "/plans", &json!({"topics": ["orders"]})).await?;
        ok(&server, &format!("/plans/{number}/pause"), &json!({})).await?;
    }
    let (status, refused) = server.post("/api/v1/plans", &json!({"topics": ["orders"]})).await?;
    ensure!(status == 409 && refused["error"]["code"] == "too_many_plans", "{refused}");
    ok(&server, "/plans/1/cancel", &json!({})).await?;
    ok(&server, "/plans", &json!({"topics": ["orders"]})).await?;
    Ok(())
}

#[tokio::test]
async fn an_edited_dead_letter_is_replayed_once() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    dead_letters(&server, 1).await?;
    let (_, page) = server.get("/api/v1/topics/orders/dead-letters").await?;
    let letter = page["dead_letters"][0]["id"].as_str().context("a letter")?.to_owned();
    let path = format!("/topics/orders/dead-letters/{letter}/replay");
    for bad in [json!({}), json!({"payload": "a", "payload_base64": "YQ=="})] {
        ensure!(server.post(&format!("/api/v1{path}"), &bad).await?.0 == 400);
    }
    let replayed = ok(&server, &path, &json!({"payload": "order-0 with an address"})).await?;
    ensure!(replayed["replayed"] == true, "{replayed}");
    let (status, _) = server.post(&format!("/api/v1{path}"), &json!({"payload": "again"})).await?;
    ensure!(status == 404, "the letter is gone");
    let consumer = Consumer::start(&server, |_| None);
    let deadline = Instant::now() + LIMIT;
    while consumer.handled().is_empty() {
        ensure!(Instant::now() < deadline, "{}", server.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let expected = BTreeMap::from([("order-0 with an address".to_owned(), 1)]);
    ensure!(consumer.handled() == expected, "{:?}", consumer.handled());
    let (_, stored) = server.get("/api/v1/topics/orders/messages").await?;
    let last = stored["messages"].as_array().and_then(|all| all.last()).context("a message")?;
    ensure!(last["key"] == "k0" && last["id"] == replayed["id"], "{last}");
    Ok(())
}

#[tokio::test]
async fn commands_make_show_pause_resume_and_cancel_plans() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    dead_letters(&server, 8).await?;
    let url = server.url("");
    let run = |arguments: &[&str]| -> Result<(bool, String, String)> {
        let output = dir.run(&[arguments, &["--url", &url]].concat())?;
        Ok((output.status.success(), text(&output.stdout), text(&output.stderr)))
    };
    let (is_ok, out, err) = run(&["plan", "create", "orders", "--dry-run"])?;
    ensure!(is_ok && out.contains("would replay 8 dead letters"), "{out}{err}");
    ensure!(out.contains("TOPIC") && out.contains(REASON), "{out}");
    let (is_ok, out, err) = run(&["plan", "create", "orders", "--reason", "no address"])?;
    ensure!(is_ok && out.contains("made replay plan 1 for 8 dead letters"), "{out}{err}");
    let (is_ok, out, err) = run(&["plan", "pause", "1"])?;
    ensure!(is_ok && out.contains("paused replay plan 1"), "{out}{err}");
    let (is_ok, out, err) = run(&["plan", "list", "--json"])?;
    let listed: Value = serde_json::from_str(out.trim())?;
    ensure!(is_ok && listed["state"] == "paused" && listed["total"] == 8, "{out}{err}");
    let (is_ok, out, err) = run(&["plan", "show", "1"])?;
    ensure!(is_ok && out.contains("headwater plan resume 1"), "{out}{err}");
    let (is_ok, out, err) = run(&["plan", "resume", "1"])?;
    ensure!(is_ok && out.contains("resumed replay plan 1"), "{out}{err}");
    let _consumer = Consumer::start(&server, |_| None);
    let waited = tokio::task::spawn_blocking({
        let command = dir.command(&["plan", "show", "1", "--wait", "--json", "--url", &url]);
        move || {
            let mut command = command;
            command.output()
        }
    });
    let waited = waited.await??;
    let plan: Value = serde_json::from_str(text(&waited.stdout).trim())?;
    ensure!(waited.status.success() && plan["settled"] == 8, "{waited:?}");
    let (is_ok, _, err) = run(&["plan", "cancel", "1"])?;
    ensure!(!is_ok && err.contains("replay plan 1 is done"), "{err}");
    Ok(())
}
