//! The history of metrics of the real binary: from a sample to SQL, the API and the command line, on both databases.

mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Postgres, Redis};
use serde_json::{Value, json};

use crate::support::desk::{answered, open};
use crate::support::{LIMIT, Server, ServerDir, text};

const QUICK: [&str; 2] = ["--issue-quiet", "10ms"];

/// The sum of a series over all points.
fn sum(history: &Value, series: &str) -> u64 {
    let points = history["points"].as_array().map(Vec::as_slice).unwrap_or_default();
    points.iter().filter_map(|point| point["values"][series].as_u64()).sum()
}

/// Answers a ticket, and waits until a sample of ten seconds shows it.
async fn sampled(server: &Server) -> Result<Value> {
    let ticket = open(server, "Where is it?").await?;
    answered(server, ticket["ticket_id"].as_str().context("a ticket")?, 1).await?;
    let is_sampled =
        |_: u16, history: &Value| sum(history, "events") >= 1 && sum(history, "runs") >= 1;
    server.until("/api/v1/history?step=10s", is_sampled).await
}

#[tokio::test]
async fn a_sample_shows_what_happened_and_the_minute_of_a_stopped_process_is_stored() -> Result<()>
{
    let dir = ServerDir::new()?;
    let mut server = dir.serve(&QUICK)?;
    let history = sampled(&server).await?;
    ensure!(history["scope"] == "process" && history["step_ms"] == 10_000, "{history}");
    ensure!(history["problem"].is_null(), "{history}");
    let mark = &history["marks"][0];
    ensure!(mark["kind"] == "started" && mark["version"] == env!("CARGO_PKG_VERSION"), "{history}");
    let points = history["points"].as_array().context("points")?;
    let with_run = points.iter().find(|point| point["values"]["run_p95_ms"].is_number());
    ensure!(with_run.is_some(), "{history}");
    let process = mark["process"].as_str().context("a process")?.to_owned();
    assert!(server.stop()?.success(), "{}", server.log());

    // Another process finds it in the database, once its minute is over.
    let server = dir.serve(&QUICK)?;
    let is_stored = |_: u16, history: &Value| {
        let marks = history["marks"].as_array().map(Vec::as_slice).unwrap_or_default();
        let has_mark = marks.iter().any(|mark| mark["process"].as_str() == Some(&process));
        has_mark && sum(history, "events") >= 1
    };
    let deadline = Instant::now() + LIMIT + Duration::from_secs(20);
    loop {
        let (status, history) = server.get("/api/v1/history?series=events").await?;
        if status == 200 && is_stored(status, &history) {
            ensure!(history["scope"] == "all" && history["problem"].is_null(), "{history}");
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{history}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

const BILLING: &str = "/api/v1/topics/orders/groups/billing";

/// Pulls at most one message from `orders` at this server.
async fn pull(server: &Server, wait_ms: u64) -> Result<Option<Value>> {
    let wanted = json!({"max": 1, "wait_ms": wait_ms, "lease_ms": 60_000});
    let (status, pulled) = server.post(&format!("{BILLING}/pull"), &wanted).await?;
    ensure!(status == 200, "{pulled}");
    Ok(pulled["messages"].get(0).cloned())
}

/// Pulls from `orders` at this server until it got a message, and settles it.
async fn settle_one(server: &Server) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(message) = pull(server, 2000).await? {
            let done = json!({"settlements": [{"lease": message["lease"], "outcome": "done"}]});
            ensure!(server.post(&format!("{BILLING}/settle"), &done).await?.0 == 200);
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "no message: {}", server.log());
    }
}

async fn send(server: &Server, count: usize) -> Result<()> {
    let messages: Vec<Value> =
        (0..count).map(|n| json!({"key": n.to_string(), "payload": "x"})).collect();
    let body = json!({"messages": messages});
    let (status, sent) = server.post("/api/v1/topics/orders/messages", &body).await?;
    ensure!(status == 201, "{sent}");
    Ok(())
}

#[tokio::test]
async fn topics_have_rates_and_lag_and_partitions_that_move_are_noticed() -> Result<()> {
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    let first = dir.serve(&["--stream-url", &redis.url()])?;
    // A topic that exists at the first measurement has messages from unknown times.
    let moves = "/api/v1/assignment/moves?topic=orders";
    first.until(moves, |_, page| page["since"].is_string()).await?;
    let topic = json!({"name": "orders", "partitions": 4});
    ensure!(first.post("/api/v1/topics", &topic).await?.0 == 201);
    ensure!(pull(&first, 0).await?.is_none());
    let of_topic = "/api/v1/history?topic=orders&step=10s";
    let has_group = |_: u16, history: &Value| {
        let mut series = history["series"].as_array().into_iter().flatten();
        series.any(|one| one["name"] == "lag:billing")
    };
    first.until(of_topic, has_group).await?;
    send(&first, 40).await?;
    settle_one(&first).await?;

    let is_measured =
        |_: u16, history: &Value| sum(history, "added") == 40 && sum(history, "settled") == 1;
    let history = first.until(of_topic, is_measured).await?;
    let names: Vec<_> = history["series"].as_array().context("series")?.iter().collect();
    ensure!(names.len() == 3 && names[2]["name"] == "lag:billing", "{history}");
    let point = history["points"].as_array().and_then(|points| points.last()).context("a point")?;
    ensure!(point["values"]["lag:billing"].as_u64() >= Some(1), "{history}");
    ensure!(history["scope"] == "process" && history["problem"].is_null(), "{history}");
    let path = format!("{of_topic}&group=billing");
    let (_, of_group) = first.get(&path).await?;
    ensure!(sum(&of_group, "settled") == 1, "{of_group}");
    let (_, unknown) = first.get("/api/v1/history?topic=none").await?;
    ensure!(unknown["problem"].is_string() && unknown["points"] == json!([]), "{unknown}");
    for query in ["topic=orders&series=events", "group=billing"] {
        let (status, refused) = first.get(&format!("/api/v1/history?{query}")).await?;
        ensure!(status == 400, "{query}: {refused}");
    }
    // Two reads: a message that is settled, or released, between them is in one.
    let agrees = |_: u16, group: &Value| {
        let partitions = group["partitions"].as_array().into_iter().flatten();
        let mut ages = partitions.map(|one| &one["oldest_pending"]["age_ms"]);
        group["pending"].as_u64().is_some_and(|pending| ages.any(Value::is_u64) == (pending > 0))
    };
    first.until("/api/v1/topics/orders/groups/billing", agrees).await?;

    // A consumer gets all partitions, and another one takes some of them over.
    let consume = ["consume", "orders", "--group", "shipping", "--stream-url", &*redis.url()];
    let _one = dir.start_soon(&consume)?;
    let of_shipping = |page: &Value| -> Vec<Value> {
        let moves = page["moves"].as_array().into_iter().flatten();
        moves.filter(|one| one["group"] == "shipping").cloned().collect()
    };
    let is_first = |_: u16, page: &Value| {
        of_shipping(page).iter().filter(|one| one["from"].is_null()).count() == 4
    };
    first.until(moves, is_first).await?;
    let _other = dir.start_soon(&consume)?;
    // Of each partition, the newest move says who owns it. Beside these there may be moves after a lease was lost.
    let took_over = |_: u16, page: &Value| {
        let (mut owners, mut counts) = (BTreeMap::new(), BTreeMap::<String, usize>::new());
        for one in of_shipping(page) {
            owners.entry(one["partition"].to_string()).or_insert_with(|| one["to"].to_string());
        }
        owners.into_values().for_each(|owner| *counts.entry(owner).or_default() += 1);
        counts.into_values().eq([2, 2])
    };
    let moved = first.until(moves, took_over).await?;
    ensure!(moved["complete"] == true && moved["since"].is_string(), "{moved}");
    let (_, none) = first.get("/api/v1/assignment/moves?group=other").await?;
    ensure!(none["moves"] == json!([]), "{none}");
    let is_marked = |_: u16, history: &Value| {
        let mut marks = history["marks"].as_array().into_iter().flatten();
        marks.any(|mark| mark["kind"] == "rebalance" && mark["group"] == "shipping")
    };
    first.until("/api/v1/history?step=10s", is_marked).await?;

    // The commands say the same.
    let url = first.url("");
    let run = |words: &[&str]| -> Result<String> {
        let output = dir.run(&[words, &["--url", &url]].concat())?;
        ensure!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        Ok(text(&output.stdout))
    };
    let table = run(&["history", "--topic", "orders"])?;
    ensure!(table.contains("in group shipping of topic orders"), "{table}");
    let table = run(&["history", "--topic", "orders", "--group", "billing", "--step", "10s"])?;
    ensure!(table.contains("SETTLED") && table.contains("PENDING"), "{table}");
    let table = run(&["group", "moves", "orders", "--group", "shipping"])?;
    ensure!(table.contains("EPOCH") && table.contains("shipping"), "{table}");
    let list = run(&["topic", "list", "--rates"])?;
    ensure!(list.contains("SETTLED/S") && list.contains("orders"), "{list}");
    for words in
        [&["group", "moves"][..], &["topic", "list", "--rates"], &["history", "--topic", "orders"]]
    {
        let output = dir.run(words)?;
        ensure!(output.status.code() == Some(2), "{words:?}: {}", text(&output.stderr));
    }
    let owners = run(&["group", "owners", "orders"])?;
    ensure!(!owners.contains("nobody"), "{owners}");
    Ok(())
}

/// Rows of another process in the last minutes: events 5, a gap, and events 7 with a start.
const ROWS: &str = "INSERT INTO metrics_history (minute, process, data)
    SELECT extract(epoch FROM now())::bigint / 60 - ago, 'other-1', data FROM (VALUES
        (4, '{\"n\": 6, \"events\": 5, \"queued\": 2, \"run\": [0, 0, 0, 0, 0, 4]}'),
        (2, '{\"n\": 6, \"events\": 7, \"started\": ' || (extract(epoch FROM now())::bigint - 130) * 1000 || ', \"version\": \"9.9\"}'),
        (5000, '{\"n\": 6, \"events\": 100}')) AS v (ago, data)";

#[tokio::test]
async fn minutes_of_all_processes_are_added_gaps_stay_and_an_outage_of_sql_blocks_nothing()
-> Result<()> {
    let (redis, postgres) = (Redis::start()?, Postgres::start()?);
    let database = postgres.database()?;
    let dir = ServerDir::new()?;
    let (streams, url) = (redis.url(), database.url());
    let backends = ["--stream-url", &*streams, "--database-url", &*url];
    let server = dir.serve(&[&backends[..], &QUICK, &["--retention-every", "200ms"]].concat())?;
    database.query(ROWS)?;

    let all = "/api/v1/history?series=events,queued,run_p50_ms";
    let is_complete = |_: u16, history: &Value| sum(history, "events") >= 12;
    let history = server.until(all, is_complete).await?;
    let points = history["points"].as_array().context("points")?;
    let others: Vec<_> =
        points.iter().filter(|point| point["values"]["events"].as_u64() > Some(0)).collect();
    ensure!(others.len() == 2, "a minute without a row is a gap: {history}");
    ensure!(others[0]["values"]["queued"] == 2 && others[0]["covered_ms"] == 60_000, "{history}");
    ensure!(others[0]["values"]["run_p50_ms"] == 37.5, "between 25 and 50 ms: {history}");
    ensure!(others[1]["values"]["queued"].is_null(), "an unknown size is not 0: {history}");
    let marks = history["marks"].as_array().context("marks")?;
    ensure!(marks.iter().any(|mark| mark["process"] == "other-1" && mark["version"] == "9.9"));

    for (query, part) in [
        ("series=nonsense", "known are events"),
        ("step=7s", "multiple of 10s"),
        ("from=yesterday", "invalid `from`"),
        ("from=2020-01-01T00:00:00Z&step=1m", "raise `step`"),
        ("nonsense=1", "unknown field"),
    ] {
        let (status, refused) = server.get(&format!("/api/v1/history?{query}")).await?;
        let message = refused["error"]["message"].as_str().unwrap_or_default();
        ensure!(status == 400 && message.contains(part), "{query}: {status} {refused}");
    }

    // The command has the same values, with the server and without.
    let server_url = server.url("");
    for how in [&["--url", &*server_url][..], &backends] {
        let verb = ["history", "--series", "events,run_p50_ms", "--json"];
        let output = dir.run(&[&verb[..], how].concat())?;
        ensure!(output.status.success(), "{}", text(&output.stderr));
        let lines = text(&output.stdout);
        let points: Vec<Value> =
            lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        let events = points.iter().filter_map(|point| point["values"]["events"].as_u64());
        ensure!(events.sum::<u64>() == 12, "{how:?}: {lines}");
        let output = dir.run(&[&["history"][..], how].concat())?;
        let table = text(&output.stdout);
        ensure!(table.contains("process other-1 started, version 9.9"), "{table}");
        ensure!(table.contains("RUN P50") && table.contains("37.5 ms"), "{table}");
    }

    // Retention removes what is older than `history.keep`.
    let deadline = Instant::now() + LIMIT;
    while database.query("SELECT count(*) FROM metrics_history WHERE data LIKE '%100}'")?.trim()
        != "0"
    {
        ensure!(Instant::now() < deadline, "an old row was not removed");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    postgres.stop()?;
    let is_alone = |status: u16, history: &Value| status == 200 && history["problem"].is_string();
    let history = server.until("/api/v1/history?series=events,queued", is_alone).await?;
    ensure!(sum(&history, "events") < 12, "only this process is included: {history}");
    // Sampling goes on: a sample that begins after the outage appears.
    let newest = |history: &Value| {
        let points = history["points"].as_array().and_then(|points| points.last().cloned());
        points.and_then(|point| Some(point["at"].as_str()?.to_owned())).unwrap_or_default()
    };
    let (_, before) = server.get("/api/v1/history?step=10s").await?;
    let since = newest(&before);
    let goes_on = |status: u16, history: &Value| status == 200 && newest(history) > since;
    server.until("/api/v1/history?step=10s", goes_on).await?;
    postgres.restart()?;
    server.until(all, is_complete).await?;
    Ok(())
}
