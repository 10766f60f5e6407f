//! Five tasks of a newcomer, from the overview: at most six clicks and sixty seconds each. Every click and every search that is sent
//! counts; a page that is not loaded yet is waited for.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use headwater_testkit::BrowserScripts;
use reqwest::header::{AUTHORIZATION, HeaderMap};
use serde_json::json;

use crate::fixture::{ConsoleFixture, Reader};
use crate::support::answer;

/// Two people: the one who looks, and one who has purged.
const TOKENS: &str = r#"
[[token]]
name = "day-shift"
role = "admin"
token = "token-of-the-day-shift"
[[token]]
name = "night-shift"
role = "admin"
token = "token-of-the-night-shift"
"#;
const DAY_TOKEN: &str = "token-of-the-day-shift";
const NIGHT_TOKEN: &str = "token-of-the-night-shift";

const CLICKS_MAX: u32 = 6;
const TIME_MAX: Duration = Duration::from_secs(60);

/// A client that sends a token.
fn client(token: &str) -> Result<reqwest::Client> {
    let headers = HeaderMap::from_iter([(AUTHORIZATION, format!("Bearer {token}").parse()?)]);
    // The server closes idle connections.
    Ok(reqwest::Client::builder().default_headers(headers).pool_max_idle_per_host(0).build()?)
}

/// A newcomer who begins at the overview. Every click and every submitted search counts.
struct Newcomer<'a> {
    reader: &'a Reader,
    clicks: Cell<u32>,
    began: Instant,
}

impl<'a> Newcomer<'a> {
    async fn begin(reader: &'a Reader) -> Result<Self> {
        let began = Instant::now();
        reader.open("/console").await?;
        Ok(Self { reader, clicks: Cell::new(0), began })
    }

    async fn click(&self, label: &str) -> Result<()> {
        self.clicks.set(self.clicks.get() + 1);
        self.reader.click(label).await
    }

    async fn click_css(&self, css: &str) -> Result<()> {
        self.clicks.set(self.clicks.get() + 1);
        self.reader.find(css).await?.click().await
    }

    async fn search(&self, words: &str) -> Result<()> {
        self.clicks.set(self.clicks.get() + 1);
        self.reader.find("#search").await?.send_keys(&format!("{words}\u{e007}")).await
    }

    fn end(self, task: &str) -> Result<()> {
        let (clicks, took) = (self.clicks.get(), self.began.elapsed());
        eprintln!("{task}: {clicks} clicks, {} ms", took.as_millis());
        ensure!(clicks <= CLICKS_MAX, "{task} takes {clicks} clicks");
        ensure!(took <= TIME_MAX, "{task} takes {took:?}");
        Ok(())
    }
}

#[tokio::test]
async fn five_tasks_take_a_newcomer_at_most_six_clicks_and_a_minute_each() -> Result<()> {
    let mut fixture = ConsoleFixture::start_with(TOKENS)?;
    fixture.server.client = client(DAY_TOKEN)?;
    let data = fixture.fill().await?;
    let purge = json!({"reason": "connection refused"});
    let path = fixture.server.url("/api/v1/topics/orders/dead-letters/purge");
    let (status, purged) =
        answer(client(NIGHT_TOKEN)?.post(path).json(&purge).send().await?).await?;
    ensure!(status == 200 && purged["purged"] == 1, "{purged}");
    let reader = Reader::start(&fixture.server, BrowserScripts::On).await?;
    reader.open("/console").await?;
    reader.fill("token", DAY_TOKEN).await?;
    reader.click("Log in").await?;
    reader.until_shown("Overview").await?;

    // Find a ticket by a word.
    let newcomer = Newcomer::begin(&reader).await?;
    newcomer.search("blinks").await?;
    reader.until_shown("Router blinks red").await?;
    newcomer.click("Router blinks red").await?;
    reader.until_shown("Since yesterday.").await?;
    newcomer.end("find a ticket by a word")?;

    // Say why an issue waits.
    let newcomer = Newcomer::begin(&reader).await?;
    newcomer.click("Issues").await?;
    newcomer.click("Quarantined").await?;
    newcomer.click(&data.quarantined.to_string()).await?;
    reader.until_shown("Why").await?;
    reader.until_shown("quarantined").await?;
    newcomer.end("say why an issue waits")?;

    // Replay one cluster of failures.
    let newcomer = Newcomer::begin(&reader).await?;
    newcomer.click("Failures").await?;
    newcomer.click("order # has no address").await?;
    newcomer.click("Replay 3 dead letters…").await?;
    newcomer.click("Replay 3 dead letters").await?;
    reader.until_shown("3 sent again.").await?;
    newcomer.end("replay one cluster")?;

    // Find who purged.
    let newcomer = Newcomer::begin(&reader).await?;
    newcomer.click("Audit").await?;
    reader.fill("path", "purge").await?;
    newcomer.click("Filter").await?;
    // The whole list has it, too.
    reader
        .until(
            "return location.search.includes('path=purge') && document.readyState === 'complete'",
        )
        .await?;
    reader.until_shown("/dead-letters/purge").await?;
    let found = "return [...document.querySelectorAll('main tbody tr')].map(row => row.querySelector('th').innerText).join()";
    let found = reader.driver().execute(found).await?;
    ensure!(found == "night-shift", "purged by {found}:\n{}", reader.text().await?);
    newcomer.end("find who purged")?;

    // Fork a run.
    let newcomer = Newcomer::begin(&reader).await?;
    newcomer.click("Sessions").await?;
    newcomer.click(&data.session).await?;
    newcomer.click_css("[data-live=steps] details.item summary").await?;
    newcomer.click("Fork").await?;
    reader.until_shown("The session was forked.").await?;
    newcomer.end("fork a run")?;

    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}
