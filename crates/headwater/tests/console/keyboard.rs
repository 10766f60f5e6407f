//! Everything by keyboard: every control is reached with Tab, and actions are done with Enter and Space.

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::Value;

use crate::fixture::{ConsoleFixture, Reader};

const TAB: char = '\u{e004}';
const ENTER: char = '\u{e007}';
const SPACE: &str = " ";

/// Controls of a page at most, so that one round with Tab ends.
const CONTROLS_MAX: usize = 400;

/// Presses Tab until the page has been gone through once; returns the controls that were not reached.
async fn unreached(reader: &Reader) -> Result<Vec<String>> {
    let begin = "window.reached = new Set(); document.activeElement?.blur(); scrollTo(0, 0);
        document.addEventListener('focusin', event => window.reached.add(event.target));
        window.controls = () => [...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, textarea, summary')]
            .filter(it => !it.disabled && it.checkVisibility({visibilityProperty: true}));
        return window.controls().length";
    let count = usize::try_from(reader.number(begin).await?)?;
    ensure!(count > 0 && count < CONTROLS_MAX, "{count} controls");
    let tabs: String = std::iter::repeat_n(TAB, count + 40).collect();
    reader.driver().press(&tabs).await?;
    let left = "return window.controls().filter(it => !window.reached.has(it)).map(it => it.outerHTML.slice(0, 200))";
    Ok(serde_json::from_value(reader.driver().execute(left).await?)?)
}

/// Moves the focus with Tab to the control with this text, and presses a key on it.
async fn press_on(reader: &Reader, label: &str, key: &str) -> Result<()> {
    reader.driver().execute("document.activeElement?.blur(); scrollTo(0, 0)").await?;
    for _ in 0..CONTROLS_MAX {
        reader.driver().press(&TAB.to_string()).await?;
        let focused =
            reader.driver().execute("return document.activeElement.textContent.trim()").await?;
        if focused == label {
            return reader.driver().press(key).await;
        }
    }
    anyhow::bail!("`{label}` is not reached with Tab")
}

#[tokio::test]
async fn every_control_is_reached_with_tab_and_actions_are_done_by_keyboard() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let reader = Reader::start(&fixture.server, BrowserScripts::On).await?;
    let (_, failures) = fixture.server.get("/api/v1/failures").await?;
    let clusters = failures["clusters"].as_array().context("clusters")?;
    let letters = clusters.iter().find(|one| one["kind"] == "dead_letter").context("a cause")?;
    let cause = letters["id"].as_str().context("an id")?;
    for path in [
        "/console".to_owned(),
        format!("/console/tickets/{}", data.ticket),
        "/console/issues?quarantined=true".to_owned(),
        format!("/console/issues/{}", data.quarantined),
        format!("/console/sessions/{}", data.session),
        "/console/topics/orders".to_owned(),
        "/console/topics/orders/dead-letters".to_owned(),
        format!("/console/topics/orders/dead-letters/{}", data.letter),
        "/console/topics/orders/groups/billing".to_owned(),
        "/console/assignment".to_owned(),
        format!("/console/failures/{cause}"),
        "/console/plans/1".to_owned(),
        "/console/outbox".to_owned(),
        "/console/sql".to_owned(),
        "/console/help".to_owned(),
    ] {
        reader.open(&path).await?;
        // A live page may replace a control after it was reached.
        reader.driver().press("p").await?;
        reader
            .driver()
            .execute("document.querySelectorAll('details').forEach(it => { it.open = true })")
            .await?;
        let left = unreached(&reader).await?;
        ensure!(left.is_empty(), "{path}: not reached with Tab: {left:#?}");
    }

    // Select with `j` and `x`, purge with Enter, confirm with Space.
    reader.open("/console/topics/orders/dead-letters").await?;
    reader.driver().press("jjx").await?;
    ensure!(reader.driver().count("tbody input:checked").await? == 1, "`x` selects the row");
    press_on(&reader, "Purge selected…", &ENTER.to_string()).await?;
    reader.until_shown("Purge 1 dead letter?").await?;
    press_on(&reader, "Purge 1 dead letter", SPACE).await?;
    reader.until_shown("1 deleted permanently.").await?;
    let letters =
        |_: u16, page: &Value| page["dead_letters"].as_array().is_some_and(|all| all.len() == 3);
    fixture.server.until("/api/v1/topics/orders/dead-letters", letters).await?;

    // Open a row with `j` and Enter, pause a plan with Enter, help with `?`.
    reader.open("/console/plans").await?;
    reader.driver().press(&format!("j{ENTER}")).await?;
    reader.until_shown("is paused").await?;
    reader.driver().press("?").await?;
    reader.until_shown("Switch single keys off").await?;
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}
