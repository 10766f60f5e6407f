//! Everything by keyboard: every control is reached with Tab, and actions are done with Enter and Space.

use anyhow::{Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::Value;

use crate::fixture::{ConsoleData, ConsoleFixture, Reader};
use crate::screens::{with_data, with_desk_data};

const TAB: char = '\u{e004}';
const ENTER: char = '\u{e007}';
const SPACE: &str = " ";
const ESCAPE: &str = "\u{e00c}";

/// Controls of a page at most, so that one round with Tab ends.
const CONTROLS_MAX: usize = 400;

/// Screens whose addresses have a query.
const WITH_QUERY: [&str; 4] = [
    "/console/tickets?status=handed_over",
    "/console/tail?",
    "/console/consistency?",
    "/console/search?q=router",
];

/// Presses Tab until the page has been gone through once; returns the controls that were not reached.
async fn unreached(reader: &Reader) -> Result<Vec<String>> {
    let begin = "window.reached = new Set(); document.activeElement?.blur(); scrollTo(0, 0);
        document.addEventListener('focusin', event => window.reached.add(event.target));
        window.controls = () => [...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, textarea, summary')]
            .filter(it => !it.disabled && it.checkVisibility({visibilityProperty: true}));
        return window.controls().length + document.querySelectorAll('[tabindex=\"0\"]').length";
    let count = usize::try_from(reader.number(begin).await?)?;
    ensure!(count > 0 && count < CONTROLS_MAX, "{count} controls");
    let tabs: String = std::iter::repeat_n(TAB, count + 40).collect();
    reader.driver().press(&tabs).await?;
    let left = "return window.controls().filter(it => !window.reached.has(it)).map(it => it.outerHTML.slice(0, 200))";
    Ok(serde_json::from_value(reader.driver().execute(left).await?)?)
}

/// Fails if a control of the open page is not reached with Tab. The page is paused: what appears after Tab has passed is not reached.
async fn must_be_reached(reader: &Reader, path: &str) -> Result<()> {
    reader.driver().press("p").await?;
    reader.until_shown("Paused").await?;
    let open = "document.querySelectorAll('details').forEach(it => { it.open = true })";
    reader.driver().execute(open).await?;
    let left = unreached(reader).await?;
    ensure!(left.is_empty(), "{path}: not reached with Tab: {left:#?}");
    Ok(())
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

/// `j` on items that are no rows of a table; Esc; and, on the page of help, the choices of this browser.
async fn items_and_preferences(reader: &Reader, data: &ConsoleData) -> Result<()> {
    let choose = "const choice = document.getElementById('theme'); choice.value = 'dark'; choice.dispatchEvent(new Event('change'));
        document.getElementById('no-keys').click()";
    reader.driver().execute(choose).await?;
    for path in ["/console/help", "/console/outbox"] {
        reader.open(path).await?;
        let theme =
            reader.driver().execute("return document.documentElement.dataset.theme").await?;
        ensure!(theme == "dark", "{path}: {theme}");
        reader.driver().press("/").await?;
        let focused = reader.driver().execute("return document.activeElement.id").await?;
        ensure!(focused != "search", "single keys are off");
        let is_hidden = "return !document.getElementById('pause').checkVisibility()";
        let is_hidden = reader.driver().execute(is_hidden).await? == true;
        ensure!(is_hidden == (path == "/console/help"), "{path}: only a live page is paused");
    }
    reader.driver().execute("localStorage.clear()").await?;

    for (path, item) in [
        (format!("/console/sessions/{}", data.session), "details.item > summary"),
        ("/console/tail?topic=orders".to_owned(), ".line a"),
        ("/console/drafts".to_owned(), "section.item a"),
    ] {
        reader.open(&path).await?;
        reader.driver().press("j").await?;
        let first =
            format!("return document.activeElement === document.querySelector('main {item}')");
        ensure!(reader.driver().execute(&first).await? == true, "{path}: `j` moves to {item}");
    }
    reader.driver().press("/").await?;
    reader.until("return document.activeElement.id === 'search'").await?;
    reader.driver().press(ESCAPE).await?;
    reader.until("return document.activeElement === document.body").await?;

    // Back from the page cache, a form that was sent can be sent again.
    let sent = "const form = document.querySelector('main form.stacked');
        form.addEventListener('submit', event => event.preventDefault());
        window.button = form.querySelector('button'); window.button.click()";
    reader.driver().execute(sent).await?;
    reader.until("return window.button.disabled").await?;
    let back = "dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true})); return window.button.disabled";
    ensure!(reader.driver().execute(back).await? == false, "the button stays disabled");
    Ok(())
}

#[tokio::test]
async fn every_control_is_reached_with_tab_and_actions_are_done_by_keyboard() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let reader = Reader::start(&fixture.server, BrowserScripts::On).await?;
    let screens = [with_data(&data), with_desk_data(&fixture.fill_desk().await?)].concat();
    // A screen with another filter has the same controls.
    let is_chosen = |path: &String| {
        !path.contains('?') || WITH_QUERY.iter().any(|query| path.starts_with(query))
    };
    let others = ["/console/issues?quarantined=true", "/console/sql"].map(str::to_owned);
    let paths = screens.into_iter().map(|(path, _)| path).filter(is_chosen).chain(others);
    for path in paths {
        reader.open(&path).await?;
        must_be_reached(&reader, &path).await?;
    }
    for (path, button) in [
        ("/console/topics/orders/dead-letters", "Purge all that match…"),
        ("/console/topics/orders/groups/billing", "Delete group…"),
    ] {
        reader.open(path).await?;
        reader.click(button).await?;
        reader.until_shown("This cannot be undone.").await?;
        must_be_reached(&reader, button).await?;
    }

    // Copy the command with `y`. The page is not live, so what it says stays.
    reader.open("/console/topics/orders/dead-letters").await?;
    let watch = "const write = navigator.clipboard.writeText.bind(navigator.clipboard);
        navigator.clipboard.writeText = async text => { await write(text); window.copied = text; };";
    reader.driver().execute(watch).await?;
    reader.driver().press("y").await?;
    reader.until_shown("Command copied").await?;
    let copied = reader.driver().execute("return window.copied").await?;
    ensure!(copied == "headwater dlq list orders --newest-first", "{copied}");

    // Move with `j` and `k`, which stop at the ends; select with `x`, purge with Enter, confirm with Space.
    let active = "return [...document.querySelectorAll('main tbody tr')].findIndex(row => row.hasAttribute('data-active'))";
    for (keys, expected) in [("j", 0), ("jj", 2), ("k", 1), ("kkk", 0), ("jjjjjjj", 3), ("kk", 1)] {
        reader.driver().press(keys).await?;
        let row = reader.number(active).await?;
        ensure!(row == expected, "after `{keys}`, row {row} is active and not {expected}");
    }
    reader.driver().press("x").await?;
    ensure!(reader.driver().count("tbody input:checked").await? == 1, "`x` selects the row");
    reader.find("tbody tr:nth-child(2) input:checked").await?;
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
    items_and_preferences(&reader, &data).await?;
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}
