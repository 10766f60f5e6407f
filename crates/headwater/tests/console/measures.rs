//! The measures of the console: bytes, first paint, time of each screen, scrolling, live changes, viewers, and the cost of the history of
//! runs. Times depend on the machine, so nothing here is part of the ordinary tests: `cargo xtask bench console` runs it, one test after
//! another, and each prints a table. With full data (`HEADWATER_MEASURES=full`) a test fails at its end if a measure was missed; without,
//! there is little data, and it only shows that it works. `HEADWATER_MEASURE_BINARY` names the program that is measured, a release build;
//! without it, it is the one of the tests.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures_util::StreamExt;
use futures_util::future::try_join_all;
use headwater_testkit::bench::{median, percentile, processor_seconds};
use headwater_testkit::{BrowserScripts, Postgres};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::fixture::Reader;
use crate::measured_data::{
    Amounts, MeasuredDatabase, MeasuredServer, answer_tickets, bench, limited_screens,
    measured_dir, migrate, ok, unlimited_screens,
};
use crate::support::{LIMIT, Server, ServerDir};

/// Live pages that are open in the comparison with viewers.
const VIEWERS: usize = 50;

/// Prints the measures, and counts those that did not reach what they have to.
struct MeasureTable {
    missed: usize,
}

impl MeasureTable {
    fn begin() -> Self {
        println!("\n| what | measured | to reach | reached |\n|---|---|---|---|");
        Self { missed: 0 }
    }

    fn line(&mut self, what: &str, found: &str, wanted: &str, is_reached: bool) {
        self.missed += usize::from(!is_reached);
        println!("| {what} | {found} | {wanted} | {} |", if is_reached { "yes" } else { "**no**" });
    }

    /// A measure without anything to reach.
    fn line_without_limit(&self, what: &str, found: &str) {
        println!("| {what} | {found} | no limit: reads everything | |");
    }

    /// Fails if a measure was missed; little data proves nothing.
    fn end(self, amounts: &Amounts) -> Result<()> {
        println!("\n{} measures missed", self.missed);
        ensure!(!amounts.is_full || self.missed == 0, "{} measures missed", self.missed);
        Ok(())
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", milliseconds(time))
}

fn middle(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Values with something and without it, round by round. The two of a round are measured one after another, in turns, so that the state of
/// the machine affects both.
#[derive(Default)]
struct Comparison {
    with: Vec<f64>,
    without: Vec<f64>,
}

impl Comparison {
    fn add(&mut self, is_with: bool, value: f64) {
        match is_with {
            true => self.with.push(value),
            false => self.without.push(value),
        }
    }

    /// How much lower rates with something are than those without it: the median, the least and the most, in percent.
    fn line(&self, table: &mut MeasureTable, what: &str, percent_max: f64, note: &str) {
        let rounds = self.with.iter().zip(&self.without);
        let mut costs: Vec<f64> =
            rounds.map(|(with, without)| (1.0 - with / without) * 100.0).collect();
        costs.sort_by(f64::total_cmp);
        let cost = middle(&costs);
        let found = format!(
            "{cost:.1} % ({:.0} with, {:.0} without; single rounds {:.1} to {:.1} %, {} rounds{note})",
            middle(&self.with),
            middle(&self.without),
            costs[0],
            costs[costs.len() - 1],
            costs.len()
        );
        table.line(what, &found, &format!("{percent_max} %"), cost <= percent_max);
    }
}

/// The compressed bytes of the scripts and styles of the page that has the most of them.
async fn asset_bytes(table: &mut MeasureTable, server: &Server) -> Result<()> {
    let addresses = |text: &str| -> Vec<String> {
        let rest = text.split("\"/console/assets/").skip(1);
        let names = rest.filter_map(|rest| rest.split('"').next());
        names.map(|name| format!("/console/assets/{name}")).collect()
    };
    let mut most = (0, String::new());
    for path in limited_screens(server).await? {
        let page = server.client.get(server.url(&path)).send().await?.text().await?;
        let (mut open, mut known, mut bytes) = (addresses(&page), BTreeSet::new(), 0);
        while let Some(address) = open.pop() {
            let is_counted = address.ends_with(".js") || address.ends_with(".css");
            if !is_counted || !known.insert(address.clone()) {
                continue;
            }
            let get = || server.client.get(server.url(&address));
            open.extend(addresses(&get().send().await?.text().await?));
            let compressed = get().header("accept-encoding", "gzip").send().await?;
            ensure!(compressed.headers()["content-encoding"] == "gzip", "{address}");
            bytes += compressed.bytes().await?.len();
        }
        ensure!(known.len() >= 2, "{path} has neither scripts nor styles");
        most = most.max((bytes, path));
    }
    let (bytes, path) = most;
    let found = format!("{:.1} kB ({path})", bytes as f64 / 1000.0);
    table.line("scripts and styles of a page, gzip", &found, "25 kB", bytes <= 25_000);
    Ok(())
}

/// Times of each screen. Rounds are more than a second apart, so that nothing is answered from memory, and begin with another screen
/// each, so that each is the first to read what several show.
async fn times_of(server: &Server, paths: &[String], rounds: usize) -> Result<Vec<Vec<Duration>>> {
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); paths.len()];
    for number in 0..rounds {
        let round = Instant::now();
        for index in (0..paths.len()).map(|index| (index + number) % paths.len()) {
            let (path, times) = (&paths[index], &mut times[index]);
            let began = Instant::now();
            let response = server.client.get(server.url(path)).send().await?;
            let status = response.status();
            let page = response.text().await?;
            times.push(began.elapsed());
            // A part that was not read took no time.
            let is_whole = ["cannot be shown", ">not read<", ">not searched<"];
            let is_whole = is_whole.iter().all(|part| !page.contains(part));
            ensure!(status == 200 && is_whole, "{path}: {status} {page}");
        }
        tokio::time::sleep(Duration::from_millis(1100).saturating_sub(round.elapsed())).await;
    }
    Ok(times)
}

/// A path with `ID` instead of ids, which differ from run to run.
fn without_ids(path: &str) -> String {
    let is_id = |part: &str| {
        part.len() > 12 && part.contains(|c: char| c.is_ascii_digit()) && !part.contains('%')
    };
    let parts = path.split_inclusive(['/', '=']).map(|part| {
        let name = part.trim_end_matches(['/', '=']);
        if is_id(name) { part.replacen(name, "ID", 1) } else { part.to_owned() }
    });
    parts.collect()
}

async fn server_times(
    table: &mut MeasureTable,
    name: &str,
    server: &Server,
    amounts: &Amounts,
) -> Result<()> {
    let found = |times: &[Duration]| {
        let p95 = percentile(times, 95);
        (p95, format!("{}, p50 {}", ms(p95), ms(median(times))))
    };
    let paths = limited_screens(server).await?;
    let all = times_of(server, &paths, amounts.rounds).await?;
    for (path, times) in paths.iter().zip(&all) {
        let (p95, found) = found(times);
        let what = format!("{name}: {}, p95", without_ids(path));
        table.line(&what, &found, "30 ms", milliseconds(p95) <= 30.0);
    }
    let paths = unlimited_screens(server).await?;
    let all = times_of(server, &paths, amounts.unlimited_rounds).await?;
    for (path, times) in paths.iter().zip(&all) {
        let what = format!("{name}: {}, p95", without_ids(path));
        table.line_without_limit(&what, &found(times).1);
    }
    let (title, times) = confirmation_times(server, amounts).await?;
    let what = format!("{name}: confirmation `{title}`, p95");
    table.line_without_limit(&what, &found(&times).1);
    Ok(())
}

/// The title of the page that asks whether to purge all dead letters, and times until it is there: it counts them.
async fn confirmation_times(server: &Server, amounts: &Amounts) -> Result<(String, Vec<Duration>)> {
    let (mut title, mut times) = (String::new(), Vec::new());
    for _ in 0..amounts.unlimited_rounds {
        let began = Instant::now();
        let path = server.url("/console/do/topics/orders/dead-letters/purge");
        let request = server.client.post(path).header("origin", server.url(""));
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        let response = request.body("select=matching").send().await?;
        let status = response.status();
        let page = response.text().await?;
        times.push(began.elapsed());
        ensure!(status == 200 && page.contains("name=\"confirm\""), "{status} {page}");
        let heading = page.split("<h1><bdi>").nth(1).and_then(|rest| rest.split('<').next());
        title = heading.context("a title")?.to_owned();
    }
    ensure!(title.starts_with("Purge "), "{title}");
    Ok((title, times))
}

/// First paint, scrolling, and how long a change takes until it is seen.
async fn in_the_browser(
    table: &mut MeasureTable,
    server: &Server,
    amounts: &Amounts,
) -> Result<()> {
    let reader = Reader::start(server, BrowserScripts::On).await?;
    for (factor, wanted) in [(1, 250), (4, 800)] {
        reader.browser.throttle_processor(factor).await?;
        let mut paints = Vec::new();
        for _ in 0..amounts.pages {
            reader.open("/console").await?;
            let paint = "return Math.round(performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1)";
            reader
                .until("return performance.getEntriesByName('first-contentful-paint').length > 0")
                .await?;
            paints.push(Duration::from_millis(u64::try_from(reader.number(paint).await?)?));
        }
        let what = match factor {
            1 => "first paint of the overview".to_owned(),
            _ => format!("first paint of the overview, processor {factor}x slower"),
        };
        let found = median(&paints);
        table.line(
            &format!("{what}, median of {}", paints.len()),
            &ms(found),
            &format!("{wanted} ms"),
            found <= Duration::from_millis(wanted),
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
    table.line(
        &format!("{} rows scrolled end to end: rows in the page", amounts.letters),
        &format!("{most}, in {:.0} s", began.elapsed().as_secs_f64()),
        "400",
        most <= 400,
    );
    // The browser reports only those over 50 ms.
    let found = if count == 0 { "none".to_owned() } else { format!("{count}, up to {longest} ms") };
    table.line("tasks over 50 ms while scrolling", &found, "none", count == 0);

    // A change, from its confirmation to the page.
    reader.open("/console/tickets").await?;
    reader.until_shown("Live").await?;
    let mut delays = Vec::new();
    for n in 0..amounts.pages {
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
    let p95 = percentile(&delays, 95);
    let found = format!("{}, p50 {}", ms(p95), ms(median(&delays)));
    table.line("a change is visible, p95", &found, "1500 ms", p95 <= Duration::from_millis(1500));
    reader.browser.quit().await
}

/// An open live page, and how many changes it has received.
struct LiveViewer {
    changes: Arc<AtomicUsize>,
    reading: JoinHandle<Result<()>>,
}

impl LiveViewer {
    /// Opens the overview.
    async fn open(client: &reqwest::Client, server: &Server) -> Result<Self> {
        let response = client.get(server.url("/console/live?of=%2Fconsole")).send().await?;
        ensure!(response.status() == 200, "a viewer is refused: {response:?}");
        let changes = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&changes);
        let reading = tokio::spawn(async move {
            let mut chunks = response.bytes_stream();
            while let Some(chunk) = chunks.next().await {
                // Each event is one chunk of the response, of which a large one arrives in several parts.
                if chunk?.starts_with(b"event:") {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            }
            anyhow::Ok(())
        });
        Ok(Self { changes, reading })
    }

    /// Opens so many, and waits until each has received the whole page.
    async fn open_all(count: usize, server: &Server) -> Result<Vec<Self>> {
        // Without the time limit of other requests.
        let client = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build()?;
        let viewers = try_join_all((0..count).map(|_| Self::open(&client, server))).await?;
        let deadline = Instant::now() + LIMIT;
        while viewers.iter().any(|viewer| viewer.changes.load(Ordering::Relaxed) == 0) {
            ensure!(Instant::now() < deadline, "a viewer receives nothing");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(viewers)
    }

    /// Closes it and returns how many changes it received. Fails if the server has closed it.
    async fn close(self) -> Result<usize> {
        if self.reading.is_finished() {
            self.reading.await??;
            bail!("the server has closed a live page");
        }
        self.reading.abort();
        Ok(self.changes.load(Ordering::Relaxed))
    }
}

/// Answers per second with and without viewers of the overview, and the processor time of the server for each answer.
async fn viewers(table: &mut MeasureTable, server: &Server, amounts: &Amounts) -> Result<()> {
    let (mut rates, mut processor, mut changes) = (Comparison::default(), Comparison::default(), 0);
    let process = Some(server.pid());
    answer_tickets(server, amounts.answers, "Warm-up").await?;
    for round in 0..amounts.comparisons {
        // Each comes first in every other round.
        for is_watched in [round % 2 == 0, round % 2 == 1] {
            let word = format!("Round {round} {is_watched}");
            let open = if is_watched { VIEWERS } else { 0 };
            let open = LiveViewer::open_all(open, server).await?;
            let before = processor_seconds(process)?;
            let rate = answer_tickets(server, amounts.answers, &word).await?;
            let spent = processor_seconds(process)? - before;
            rates.add(is_watched, rate);
            processor.add(is_watched, spent * 1000.0 / amounts.answers as f64);
            for viewer in open {
                changes += viewer.close().await?;
            }
        }
    }
    let note = format!(
        "; processor time of the server per ticket {:.2} ms with, {:.2} ms without; the viewers received {changes} changes",
        middle(&processor.with),
        middle(&processor.without)
    );
    let what = format!("{VIEWERS} live viewers: fewer runs per second");
    rates.line(table, &what, 2.0, &note);
    Ok(())
}

/// Runs per second with and without the rows of `issue_runs`. `prepare` switches them on or off.
async fn cost_of_runs(
    table: &mut MeasureTable,
    name: &str,
    (dir, database): (&ServerDir, &MeasuredDatabase),
    amounts: &Amounts,
    prepare: impl AsyncFn(bool) -> Result<()>,
) -> Result<()> {
    let url = database.url();
    let arguments = ["--stream-url", "embedded:memory", "--database-url", &url];
    let measure = async |has_rows: bool| {
        prepare(has_rows).await?;
        let before = database.runs().await?;
        let line = bench(dir, "claim", amounts.runs, &arguments)?;
        let added = usize::try_from(database.runs().await? - before)?;
        let is_right = if has_rows { added >= amounts.runs } else { added == 0 };
        ensure!(is_right, "{name}: {added} rows were written, with rows: {has_rows}");
        line["per_second"].as_f64().context("a rate")
    };
    let mut rates = Comparison::default();
    measure(true).await?;
    for round in 0..amounts.comparisons {
        for has_rows in [round % 2 == 0, round % 2 == 1] {
            rates.add(has_rows, measure(has_rows).await?);
        }
    }
    rates.line(table, &format!("`issue_runs` on {name}: fewer runs per second"), 3.0, "");
    Ok(())
}

/// Without the rows: a trigger skips their insertion.
async fn cost_of_runs_on_sqlite(table: &mut MeasureTable, amounts: &Amounts) -> Result<()> {
    const WITH: &str = "DROP TRIGGER IF EXISTS skip";
    const WITHOUT: &str = "DROP TRIGGER IF EXISTS skip;
        CREATE TRIGGER skip BEFORE INSERT ON issue_runs BEGIN SELECT RAISE(IGNORE); END";
    let dir = measured_dir()?;
    let database = MeasuredDatabase::sqlite(&dir);
    migrate(&dir, &database.url())?;
    let prepare = async |has_rows: bool| {
        database.execute(if has_rows { WITH } else { WITHOUT }).await?;
        // Writes of earlier rounds are not written back in this one.
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").await
    };
    cost_of_runs(table, "SQLite", (&dir, &database), amounts, prepare).await
}

/// Without the rows: the function has no statement that writes them.
async fn cost_of_runs_on_postgres(table: &mut MeasureTable, amounts: &Amounts) -> Result<()> {
    const WHOLE: &str =
        include_str!("../../../headwater-issue/src/postgres/functions/complete_runs.sql");
    let (before, rest) = WHOLE.split_once("WITH ended AS (").context("the insert")?;
    let (_, after) = rest.split_once(")\n    UPDATE issues i SET").context("the update")?;
    let without = format!("{before}UPDATE issues i SET{after}");
    let dir = measured_dir()?;
    let postgres = Postgres::start()?;
    let database = MeasuredDatabase::Postgres(postgres.database()?);
    migrate(&dir, &database.url())?;
    let prepare = async |has_rows: bool| {
        database.execute(if has_rows { WHOLE } else { &without }).await?;
        database.execute("CHECKPOINT").await
    };
    cost_of_runs(table, "PostgreSQL", (&dir, &database), amounts, prepare).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "times need a release build and a quiet machine; run by `cargo xtask bench console`"]
async fn measures_of_the_console_on_sqlite_and_embedded_streams() -> Result<()> {
    let amounts = Amounts::chosen();
    let measured = MeasuredServer::on_sqlite(&amounts).await?;
    let mut table = MeasureTable::begin();
    asset_bytes(&mut table, &measured.server).await?;
    server_times(&mut table, "SQLite, embedded", &measured.server, &amounts).await?;
    table.end(&amounts)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "times need a release build and a quiet machine; run by `cargo xtask bench console`"]
async fn measures_of_the_console_on_postgres_and_redis() -> Result<()> {
    let amounts = Amounts::chosen();
    let measured = MeasuredServer::on_postgres(&amounts).await?;
    let mut table = MeasureTable::begin();
    asset_bytes(&mut table, &measured.server).await?;
    server_times(&mut table, "PostgreSQL, Redis", &measured.server, &amounts).await?;
    table.end(&amounts)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "times need a release build and a quiet machine; run by `cargo xtask bench console`"]
async fn measures_of_the_console_in_a_browser_and_with_live_viewers() -> Result<()> {
    let amounts = Amounts::chosen();
    let measured = MeasuredServer::on_postgres(&amounts).await?;
    let mut table = MeasureTable::begin();
    in_the_browser(&mut table, &measured.server, &amounts).await?;
    viewers(&mut table, &measured.server, &amounts).await?;
    table.end(&amounts)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "times need a release build and a quiet machine; run by `cargo xtask bench console`"]
async fn measures_of_the_console_and_the_cost_of_issue_runs() -> Result<()> {
    let amounts = Amounts::chosen();
    let mut table = MeasureTable::begin();
    cost_of_runs_on_sqlite(&mut table, &amounts).await?;
    cost_of_runs_on_postgres(&mut table, &amounts).await?;
    table.end(&amounts)
}
