//! The measures of the console: bytes, first paint, time of each screen, scrolling, live changes, viewers, and the cost of the history of
//! runs. Times depend on the machine, so nothing here is part of the ordinary tests: `cargo xtask bench console` runs it on a release
//! build and prints a table; without `HEADWATER_MEASURES=full` it has little data and only shows that it works.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use futures_util::future::try_join_all;
use headwater_testkit::bench::{median, percentile};
use headwater_testkit::{BrowserScripts, Postgres, Redis};
use serde_json::{Value, json};

use crate::fixture::Reader;
use crate::support::{LIMIT, Server, ServerDir, text};

/// How much data there is, and how often something is measured.
struct Amounts {
    issues: usize,
    messages: usize,
    letters: usize,
    tickets: usize,
    rounds: usize,
}

impl Amounts {
    fn chosen() -> Self {
        match std::env::var("HEADWATER_MEASURES").as_deref() {
            Ok("full") => Self {
                issues: 100_000,
                messages: 1_000_000,
                letters: 100_000,
                tickets: 500,
                rounds: 20,
            },
            _ => Self { issues: 600, messages: 2000, letters: 600, tickets: 20, rounds: 3 },
        }
    }
}

fn line(what: &str, found: &str, wanted: &str) {
    println!("| {what} | {found} | {wanted} |");
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}

/// Runs `headwater bench` on these backends and returns its line.
fn bench(dir: &ServerDir, workload: &str, count: usize, arguments: &[&str]) -> Result<Value> {
    let count = count.to_string();
    let output = dir.run(&[&["bench", workload, "--count", &count], arguments].concat())?;
    ensure!(output.status.success(), "{}", text(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

async fn ok(server: &Server, path: &str, body: &Value) -> Result<Value> {
    let (status, answer) = server.post(&format!("/api/v1{path}"), body).await?;
    ensure!(status == 200 || status == 201, "{path}: {status} {answer}");
    Ok(answer)
}

/// Messages and dead letters of `orders`, and some tickets.
async fn fill(server: &Server, amounts: &Amounts) -> Result<()> {
    ok(server, "/topics", &json!({"name": "orders", "partitions": 4})).await?;
    let message = |n: usize| json!({"key": format!("customer-{}", n % 1000), "payload": format!("{{\"order\":{n}}}")});
    let send = async |from: usize, to: usize| {
        for start in (from..to).step_by(1000) {
            let messages: Vec<Value> = (start..to.min(start + 1000)).map(message).collect();
            ok(server, "/topics/orders/messages", &json!({"messages": messages})).await?;
        }
        anyhow::Ok(())
    };
    send(0, amounts.letters).await?;
    let mut dead = 0;
    while dead < amounts.letters {
        let wanted = json!({"max": 100, "wait_ms": 2000, "lease_ms": 60000});
        let pulled = ok(server, "/topics/orders/groups/billing/pull", &wanted).await?;
        let messages = pulled["messages"].as_array().context("messages")?;
        let letter = |message: &Value| json!({"lease": message["lease"], "outcome": "dead_letter", "reason": format!("order {} has no address", message["id"])});
        let settlements: Vec<Value> = messages.iter().map(letter).collect();
        dead += settlements.len();
        if !settlements.is_empty() {
            ok(
                server,
                "/topics/orders/groups/billing/settle",
                &json!({"settlements": settlements}),
            )
            .await?;
        }
    }
    send(amounts.letters, amounts.messages.max(amounts.letters)).await?;
    answer_tickets(server, amounts.tickets, "Router").await.map(drop)
}

/// Opens tickets and waits until all are answered; returns the answers per second.
async fn answer_tickets(server: &Server, count: usize, word: &str) -> Result<f64> {
    let began = Instant::now();
    let open = |n: usize| async move {
        let new = json!({"title": format!("{word} {n} blinks red"), "content": "Since yesterday.", "user_id": "ann"});
        ok(server, "/tickets", &new).await
    };
    let opening = futures_util::stream::iter((0..count).map(open)).buffer_unordered(32);
    opening.for_each(|opened| async move { drop(opened) }).await;
    let deadline = Instant::now() + LIMIT * 5;
    loop {
        let (_, overview) = server.get("/api/v1/overview").await?;
        let issues = &overview["issues"];
        if issues["queued"] == 0 && issues["processing"] == 0 {
            return Ok(count as f64 / began.elapsed().as_secs_f64());
        }
        ensure!(Instant::now() < deadline, "{overview}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Screens whose time is measured, with the ids that they need.
async fn screens(server: &Server) -> Result<Vec<String>> {
    let first = async |path: &str, list: &str, name: &str| -> Result<String> {
        let (_, page) = server.get(&format!("/api/v1{path}")).await?;
        let value = &page[list][0][name];
        Ok(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
    };
    let ticket = first("/tickets", "tickets", "ticket_id").await?;
    let issue = first("/issues?limit=1", "issues", "id").await?;
    let letter = first("/topics/orders/dead-letters?limit=1", "dead_letters", "id").await?;
    let message = first("/topics/orders/messages?limit=1", "messages", "id").await?;
    let session = first("/sessions", "sessions", "session").await?;
    let cause = first("/failures", "clusters", "id").await?;
    let mut paths: Vec<String> = [
        "/console",
        "/console/tickets",
        "/console/issues",
        "/console/issues?status=queued",
        "/console/issues?quarantined=true",
        "/console/drafts",
        "/console/sessions",
        "/console/topics",
        "/console/topics/orders",
        "/console/topics/orders/messages",
        "/console/topics/orders/dead-letters",
        "/console/topics/orders/groups/billing",
        "/console/assignment",
        "/console/tail?topic=orders",
        "/console/failures",
        "/console/plans",
        "/console/outbox",
        "/console/outbox?status=delivered",
        "/console/reports",
        "/console/processes",
        "/console/webhooks",
        "/console/settings",
        "/console/audit",
        "/console/search?q=router",
        "/console/help",
    ]
    .map(str::to_owned)
    .to_vec();
    paths.extend([
        format!("/console/tickets/{ticket}"),
        format!("/console/issues/{issue}"),
        format!("/console/topics/orders/dead-letters/{letter}"),
        format!("/console/topics/orders/messages/{message}"),
        format!("/console/sessions/{session}"),
        format!("/console/failures/{cause}"),
    ]);
    Ok(paths)
}

/// The time of each screen. Rounds are more than a second apart, so that nothing is answered from memory.
async fn server_times(name: &str, server: &Server, rounds: usize) -> Result<()> {
    let paths = screens(server).await?;
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); paths.len()];
    for _ in 0..rounds {
        let round = Instant::now();
        for (path, times) in paths.iter().zip(&mut times) {
            let began = Instant::now();
            let response = server.client.get(server.url(path)).send().await?;
            let status = response.status();
            let page = response.text().await?;
            times.push(began.elapsed());
            ensure!(status == 200 && !page.contains("cannot be shown"), "{path}: {status} {page}");
        }
        tokio::time::sleep(Duration::from_millis(1100).saturating_sub(round.elapsed())).await;
    }
    for (path, times) in paths.iter().zip(&times) {
        // Ids differ from run to run.
        let is_id =
            |part: &&str| part.len() > 12 && part.contains(|letter: char| letter.is_ascii_digit());
        let shown: Vec<&str> =
            path.split('/').map(|part| if is_id(&part) { "ID" } else { part }).collect();
        let shown = shown.join("/");
        let found = format!("{}, p50 {}", ms(percentile(times, 95)), ms(median(times)));
        line(&format!("{name}: {shown}, p95"), &found, "30 ms");
    }
    Ok(())
}

/// First paint, scrolling, and how long a change takes until it is seen.
async fn in_the_browser(server: &Server, amounts: &Amounts) -> Result<()> {
    let reader = Reader::start(server, BrowserScripts::On).await?;
    for (factor, wanted) in [(1, "250 ms"), (4, "800 ms")] {
        reader.browser.throttle_processor(factor).await?;
        let mut paints = Vec::new();
        for _ in 0..amounts.rounds.max(3) {
            reader.open("/console").await?;
            let paint = "return Math.round(performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1)";
            reader
                .until("return performance.getEntriesByName('first-contentful-paint').length > 0")
                .await?;
            paints.push(Duration::from_millis(u64::try_from(reader.number(paint).await?)?));
        }
        line(
            &format!(
                "first paint of the overview, median of {}, processor {factor}x slower",
                paints.len()
            ),
            &ms(median(&paints)),
            wanted,
        );
    }
    reader.browser.throttle_processor(1).await?;

    // All dead letters, from one end to the other.
    reader.open("/console/topics/orders/dead-letters").await?;
    let watch = "window.long = []; new PerformanceObserver(list => list.getEntries().forEach(task => window.long.push(Math.round(task.duration)))).observe({entryTypes: ['longtask']});
        window.most = 0; window.seen = new Set();
        window.scroller = setInterval(() => { const rows = document.querySelectorAll('main tbody tr[data-key]');
            window.most = Math.max(window.most, rows.length); rows.forEach(row => window.seen.add(row.dataset.key));
            scrollTo(0, document.documentElement.scrollHeight); }, 20);";
    reader.driver().execute(watch).await?;
    let (began, mut seen, mut since) = (Instant::now(), 0, Instant::now());
    while usize::try_from(seen)? < amounts.letters {
        let now = reader.number("return window.seen.size").await?;
        since = if now > seen { Instant::now() } else { since };
        seen = now;
        ensure!(since.elapsed() < LIMIT, "stopped at {seen} of {} rows", amounts.letters);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let most = reader.number("clearInterval(window.scroller); return window.most").await?;
    let longest = reader.number("return Math.max(0, ...window.long)").await?;
    let count = reader.number("return window.long.length").await?;
    ensure!(most <= 400, "{most} rows were in the page");
    let what = format!("{} rows scrolled end to end", amounts.letters);
    line(
        &what,
        &format!("{:.0} s, at most {most} rows in the page", began.elapsed().as_secs_f64()),
        "400 rows",
    );
    line("longest task while scrolling", &format!("{longest} ms; {count} over 50 ms"), "50 ms");

    // A change, from its confirmation to the page.
    reader.open("/console/tickets").await?;
    reader.until_shown("Live").await?;
    let mut delays = Vec::new();
    for n in 0..amounts.rounds.max(3) {
        let title = format!("Seen soon {n}");
        let script = format!("window.seenAt = 0; window.watching?.disconnect(); window.watching = new MutationObserver(() => {{ if (!window.seenAt && document.querySelector('main').textContent.includes('{title}')) window.seenAt = Date.now(); }});
            window.watching.observe(document.querySelector('main'), {{childList: true, subtree: true, characterData: true}});");
        reader.driver().execute(&script).await?;
        ok(server, "/tickets", &json!({"title": title, "content": "Hello."})).await?;
        let stored =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_millis();
        reader.until("return window.seenAt > 0").await?;
        let seen = u128::try_from(reader.number("return window.seenAt").await?)?;
        delays.push(Duration::from_millis(u64::try_from(seen.saturating_sub(stored))?));
    }
    line("a change is visible, p95", &ms(percentile(&delays, 95)), "1500 ms");
    reader.browser.quit().await
}

/// Answers per second without and with 50 viewers of the overview, in turns.
async fn viewers(server: &Server, amounts: &Amounts) -> Result<()> {
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for round in 0..5 {
        without.push(answer_tickets(server, amounts.tickets, &format!("Alone {round}")).await?);
        let open =
            (0..50).map(|_| server.client.get(server.url("/console/live?of=%2Fconsole")).send());
        let viewers: Vec<_> = try_join_all(open)
            .await?
            .into_iter()
            .map(|viewer| tokio::spawn(viewer.bytes_stream().for_each(|_| async {})))
            .collect();
        with.push(answer_tickets(server, amounts.tickets, &format!("Watched {round}")).await?);
        viewers.iter().for_each(tokio::task::JoinHandle::abort);
    }
    let middle = |rates: &mut Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let (without, with) = (middle(&mut without), middle(&mut with));
    let cost = (1.0 - with / without) * 100.0;
    line(
        "50 viewers: runs per second",
        &format!("{with:.0} of {without:.0}, {cost:.1} % less"),
        "2 % less",
    );
    Ok(())
}

/// Runs per second with and without the row of `issue_runs`, in turns.
fn cost_of_runs(dir: &ServerDir, amounts: &Amounts) -> Result<()> {
    const WHOLE: &str =
        include_str!("../../../headwater-issue/src/postgres/functions/complete_runs.sql");
    let postgres = Postgres::start()?;
    let database = postgres.database()?;
    let url = database.url();
    let arguments = ["--stream-url", "embedded:memory", "--database-url", &url];
    let migrated = dir.run(&["migrate", "--database-url", &url])?;
    ensure!(migrated.status.success(), "{}", text(&migrated.stderr));
    // The function without the statement that writes the row.
    let (before, rest) = WHOLE.split_once("WITH ended AS (").context("the insert")?;
    let (_, after) = rest.split_once(")\n    UPDATE issues i SET").context("the update")?;
    let without = format!("{before}UPDATE issues i SET{after}");
    let count = amounts.issues.min(30_000);
    let (mut with_rows, mut without_rows) = (Vec::new(), Vec::new());
    for round in 0..amounts.rounds.min(7) {
        for (sql, rates) in [(WHOLE, &mut with_rows), (without.as_str(), &mut without_rows)] {
            database.query(sql)?;
            let found = bench(dir, "claim", count, &arguments)?;
            // The first round warms up.
            if round > 0 {
                rates.push(found["per_second"].as_f64().context("a rate")?);
            }
        }
    }
    with_rows.sort_by(f64::total_cmp);
    without_rows.sort_by(f64::total_cmp);
    let (with, without) = (with_rows[with_rows.len() / 2], without_rows[without_rows.len() / 2]);
    let cost = (1.0 - with / without) * 100.0;
    line(
        "`issue_runs`, PostgreSQL: runs per second",
        &format!("{with:.0} with, {without:.0} without: {cost:.1} % less"),
        "3 % less",
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "times need a release build and a quiet machine; run by `cargo xtask bench console`"]
async fn measures_of_the_console() -> Result<()> {
    let amounts = Amounts::chosen();
    println!("\n| what | measured | to reach |\n|---|---|---|");
    let quick = ["--issue-quiet", "0s", "--issue-max-wait", "0s"];

    // SQLite and embedded streams.
    let dir = ServerDir::new()?;
    bench(
        &dir,
        "claim",
        amounts.issues,
        &["--stream-url", "embedded:memory", "--database-url", "sqlite:headwater.db"],
    )?;
    let server = dir.serve(&[&quick[..], &["--database-url", "sqlite:headwater.db"]].concat())?;
    fill(&server, &amounts).await?;
    server_times("SQLite, embedded", &server, amounts.rounds).await?;
    drop(server);

    // PostgreSQL and Redis.
    let (redis, postgres) = (Redis::start()?, Postgres::start()?);
    let database = postgres.database()?;
    let backends = ["--stream-url", &redis.url(), "--database-url", &database.url()];
    let dir = ServerDir::new()?;
    let migrated = dir.run(&["migrate", "--database-url", &database.url()])?;
    ensure!(migrated.status.success(), "{}", text(&migrated.stderr));
    bench(&dir, "claim", amounts.issues, &backends)?;
    let server = dir.serve(&[&quick[..], &backends].concat())?;
    fill(&server, &amounts).await?;
    server_times("PostgreSQL, Redis", &server, amounts.rounds).await?;
    in_the_browser(&server, &amounts).await?;
    viewers(&server, &amounts).await?;
    drop(server);
    cost_of_runs(&dir, &amounts)
}
