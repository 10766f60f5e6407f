//! The history of metrics of the real binary: from a sample to SQL, the API and the command line, on both databases.

mod support;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Postgres, Redis};
use serde_json::Value;

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
