//! Every screen with data, empty, with a failing dependency, and without scripts.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use headwater_testkit::BrowserScripts;

use crate::fixture::{ConsoleData, ConsoleFixture, Reader};
use crate::support::{Server, ServerDir};

/// Each screen, and text that it shows with data.
pub(crate) fn with_data(data: &ConsoleData) -> Vec<(String, Vec<String>)> {
    let text = |parts: &[&str]| parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>();
    let issue = data.quarantined.to_string();
    vec![
        (
            "/console".to_owned(),
            text(&[
                "3 issues are quarantined",
                "1 reply was given up",
                "4 dead letters wait",
                "Consumer lag",
                "Events in and runs done, per minute",
                "95 % within",
                "Failures, per minute",
                "Of all processes.",
            ]),
        ),
        ("/console?range=15m".to_owned(), text(&["The last 15 minutes", "15 minutes"])),
        ("/console?range=48h".to_owned(), text(&["The last 48 hours"])),
        (
            "/console/tickets".to_owned(),
            text(&["Router blinks red", "ann", "open", "headwater ticket list"]),
        ),
        (
            format!("/console/tickets/{}", data.ticket),
            text(&[
                "Since yesterday.",
                "Assistant",
                "Send reply",
                "Why",
                "How each answer came about",
                "Run 1 done",
                "1 event",
                "tokens",
            ]),
        ),
        (
            "/console/issues".to_owned(),
            text(&["acme/shop#1", "quarantined", "refused by the bank"]),
        ),
        (
            format!("/console/issues/{issue}"),
            text(&[
                "Release",
                "Why",
                "quarantined",
                "refused by the bank",
                "Timeline",
                "No run has ended yet.",
            ]),
        ),
        ("/console/sessions".to_owned(), text(&[&data.session, "open"])),
        (
            format!("/console/sessions/{}", data.session),
            text(&["Steps", "Compare", "headwater session replay"]),
        ),
        (
            format!("/console/sessions/{}/steps/{}", data.session, data.step),
            text(&["Step 1 of ", "State after this step", "Next step", "Fork"]),
        ),
        ("/console/sessions?issue=1".to_owned(), text(&[&data.session, "--issue 1"])),
        (
            format!("/console/sessions/{0}/compare?with={0}", data.session),
            text(&["Both have the same"]),
        ),
        (
            "/console/assignment".to_owned(),
            text(&["Service", "headwater assign add", "orders / billing", "no members"]),
        ),
        ("/console/assignment?topic=orders".to_owned(), text(&["orders / billing"])),
        (
            "/console/assignment/cameras".to_owned(),
            text(&["camera-1", "waiting", "No owner", "headwater assign list cameras"]),
        ),
        (
            "/console/tail?topic=orders&topic=payments".to_owned(),
            text(&["customer-5", "cannot be shown"]),
        ),
        ("/console/reports".to_owned(), text(&["headwater report"])),
        ("/console/sql?query=SELECT%201%20AS%20events".to_owned(), text(&["events", "1 row."])),
        ("/console/sql?query=DROP%20TABLE%20events".to_owned(), text(&["SELECT"])),
        ("/console/consistency?check=1".to_owned(), text(&["Consistent: ", "Came in"])),
        (
            "/console/webhooks".to_owned(),
            text(&["/webhooks/github/code", "rejected", "X-Hub-Signature-256 is missing"]),
        ),
        ("/console/topics".to_owned(), text(&["orders", "billing"])),
        (
            "/console/topics/orders".to_owned(),
            text(&[
                "billing",
                "Dead letters (4)",
                "Policies",
                "Add partitions",
                "Remove the oldest messages",
                "Delete topic…",
            ]),
        ),
        (
            "/console/topics/orders/messages".to_owned(),
            text(&["customer-5", "\"order\":5", "headwater message list orders"]),
        ),
        (
            "/console/topics/orders/messages?key=customer-5&text=ORDER".to_owned(),
            text(&["customer-5", "Scanned 6 of 6 messages.", "--key customer-5 --text ORDER"]),
        ),
        (
            "/console/topics/orders/messages?header=none".to_owned(),
            text(&["None of the messages that were looked at matches.", "Scanned 6 of 6"]),
        ),
        (
            format!("/console/topics/orders/messages/{}", data.message),
            text(&[
                "customer-5",
                "\"order\": 5",
                "Why",
                "in group",
                "Same key",
                "none near it",
                "headwater message why orders",
            ]),
        ),
        (
            "/console/topics/orders/dead-letters".to_owned(),
            text(&["has no address", "Replay selected…", "Purge all that match…"]),
        ),
        (
            format!("/console/topics/orders/dead-letters/{}", data.letter),
            text(&["Reason", "Payload", "Replay…", "Edit and replay"]),
        ),
        (
            "/console/topics/orders/groups/billing".to_owned(),
            text(&["Lag", "Partitions", "Delete group…"]),
        ),
        (
            "/console/failures".to_owned(),
            text(&[
                "order # has no address",
                "connection refused by #",
                "payment # refused by the bank",
                "status #",
            ]),
        ),
        ("/console/plans".to_owned(), text(&["paused", "dead letters of orders", "Settled"])),
        (
            "/console/plans/1".to_owned(),
            text(&[
                "is paused",
                "Settled by their group",
                "Failed again",
                "Resume",
                "Cancel plan…",
            ]),
        ),
        ("/console/outbox".to_owned(), text(&["status 403", "Retry all…", "Dead replies"])),
        ("/console/outbox?status=any".to_owned(), text(&["delivered", "dead", "--status any"])),
        ("/console/issues?error=BANK".to_owned(), text(&["acme/shop#1", "--error BANK"])),
        (
            format!("/console/outbox/{}", data.dead_reply),
            text(&["was given up after", "status 403", "Retry delivery", "headwater outbox why"]),
        ),
        ("/console/processes".to_owned(), text(&["alive"])),
        ("/console/doctor".to_owned(), text(&["Check again", "What to do"])),
        (
            "/console/settings".to_owned(),
            text(&["stream.url", "database.url", "No token is configured"]),
        ),
        ("/console/audit".to_owned(), text(&["POST /api/v1/tickets", "local"])),
        ("/console/search?q=router".to_owned(), text(&["Router blinks red", "names of 1 topics"])),
        (
            "/console/search?q=customer-5".to_owned(),
            text(&["topic orders, partition", "keys and headers"]),
        ),
        ("/console/search?q=billing".to_owned(), text(&["group of topic orders"])),
        (format!("/console/search?q={}", data.session), text(&["session", "entries"])),
        (format!("/console/search?q={}", data.dead_reply), text(&["Outbox row", "dead of issue"])),
        (format!("/console/search?q={issue}"), text(&[&format!("Issue {issue}")])),
        ("/console/help".to_owned(), text(&["Search", "Roles"])),
    ]
}

fn must_show(path: &str, shown: &str, wanted: &[String]) -> Result<()> {
    for part in wanted {
        ensure!(shown.contains(part.as_str()), "{path} does not show {part:?}:\n{shown}");
    }
    Ok(())
}

#[tokio::test]
async fn every_screen_shows_its_data_and_is_accessible_in_light_dark_and_narrow() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let reader = Reader::start(&fixture.server, BrowserScripts::On).await?;
    for (index, (path, wanted)) in with_data(&data).into_iter().enumerate() {
        let name = format!("{index:02}-{}", path.split(['/', '?']).nth(2).unwrap_or("overview"));
        must_show(&path, &reader.open(&path).await?, &wanted)?;
        reader.must_be_accessible(&path).await?;
        reader.picture(&name).await?;
        reader.browser.set_color_scheme("dark").await?;
        reader.must_be_accessible(&path).await?;
        reader.picture(&format!("{name}-dark")).await?;
        reader.browser.resize(320, 700).await?;
        reader.must_fit(&path).await?;
        reader.picture(&format!("{name}-narrow")).await?;
        reader.browser.resize(1280, 900).await?;
        reader.browser.set_color_scheme("light").await?;
        reader.must_be_clean(&[]).await?;
    }
    reader.browser.quit().await
}

async fn html(server: &Server, path: &str) -> Result<String> {
    Ok(server.client.get(server.url(path)).send().await?.text().await?)
}

/// Charts of the overview: marks, gaps, a read-out for each step, and their data as a table, with and without scripts.
#[tokio::test]
async fn charts_show_gaps_and_marks_and_have_their_data_as_a_table() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    fixture.fill().await?;
    for scripts in [BrowserScripts::On, BrowserScripts::Off] {
        let reader = Reader::start(&fixture.server, scripts).await?;
        reader.open("/console").await?;
        let page = html(&fixture.server, "/console").await?;
        ensure!(page.matches("role=\"img\"").count() == 5, "{page}");
        // The minute without a row interrupts the line; the first such path is the legend.
        let path =
            page.split("class=\"line-a\" d=\"").nth(2).and_then(|rest| rest.split('"').next());
        ensure!(path.is_some_and(|path| path.matches('M').count() == 2), "{path:?}");
        ensure!(page.contains("worker-&lt;b&gt;2&lt;/b&gt; started, version 1.2.3"), "{page}");
        reader.find(".time-chart summary").await?.click().await?;
        let table = reader.find(".time-chart details table").await?.text().await?;
        ensure!(table.contains("Time (UTC)") && table.contains("events in"), "{table}");
        ensure!(table.lines().count() >= 29, "{table}");
        if scripts == BrowserScripts::On {
            reader.must_be_accessible("/console").await?;
        }
        reader.must_be_clean(&[]).await?;
        reader.browser.quit().await?;
    }
    Ok(())
}

#[tokio::test]
async fn every_screen_is_readable_without_scripts() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let reader = Reader::start(&fixture.server, BrowserScripts::Off).await?;
    for (path, wanted) in with_data(&data) {
        must_show(&path, &reader.open(&path).await?, &wanted)?;
        let state = reader.driver().find("#live-state").await?.text().await?;
        ensure!(state.is_empty(), "scripts run: {state}");
    }
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}

#[tokio::test]
async fn an_empty_server_says_how_to_begin_on_every_screen() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let reader = Reader::start(&server, BrowserScripts::On).await?;
    let shown = reader.open("/").await?;
    ensure!(reader.path().await? == "/console", "`/` leads to the console");
    must_show("/console", &shown, &["All is well.".to_owned()])?;
    // Half an hour that has not ended has no point; the test may run while one ends.
    let half_hour = || SystemTime::now().duration_since(UNIX_EPOCH).map(|now| now.as_secs() / 1800);
    let before = half_hour()?;
    let shown = reader.open("/console?range=48h").await?;
    ensure!(
        shown.contains("There is no history of this time yet") || half_hour()? != before,
        "{shown}"
    );
    reader.must_be_accessible("/console?range=48h").await?;
    for (path, wanted) in [
        ("/console/tickets", "headwater ticket new"),
        ("/console/issues", "An issue is created by its first event"),
        ("/console/topics", "headwater topic create"),
        ("/console/assignment", "No group reads a topic."),
        ("/console/outbox?status=pending", "No reply or event is in this state."),
        ("/console/reports", "headwater report"),
        ("/console/sql", "SELECT"),
        ("/console/drafts", "headwater draft"),
        ("/console/settings", "stream.url"),
        ("/console/help", "Keys"),
        ("/console/failures", "Nothing has failed"),
        ("/console/plans", "headwater plan create TOPIC --dry-run"),
        ("/console/outbox", "No delivery has failed"),
        ("/console/sessions", "headwater ticket new"),
        ("/console/assignment/none", "headwater assign add none"),
        ("/console/tail", "Name one to four topics"),
        ("/console/webhooks", "No integration receives webhooks"),
        ("/console/consistency?check=1", "Consistent: "),
        ("/console/processes", "alive"),
        ("/console/doctor", "Check again"),
        ("/console/audit", "Nothing has been changed"),
        ("/console/search", "Type the number of an issue"),
        ("/console/search?q=nothing-here", "Nothing was found."),
    ] {
        must_show(path, &reader.open(path).await?, &[wanted.to_owned()])?;
        reader.must_be_accessible(path).await?;
        reader.must_be_clean(&[]).await?;
    }
    for path in [
        "/console/no-such-page",
        "/console/tickets/nonsense",
        "/console/issues/999",
        "/console/topics/none",
        "/console/sessions/none",
        "/console/reports/none",
    ] {
        let shown = reader.open(path).await?;
        ensure!(shown.contains("Code") && shown.contains("request"), "{path}: {shown}");
        reader.must_be_accessible(path).await?;
        reader.must_be_clean(&["status of 404", "status of 400"]).await?;
    }
    reader.browser.quit().await
}

#[tokio::test]
async fn without_redis_or_postgres_the_screens_say_what_is_wrong_and_show_the_rest() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let reader = Reader::start(&fixture.server, BrowserScripts::On).await?;

    fixture.redis.kill9()?;
    reader.open("/console").await?;
    reader.until_shown("The stream backend").await?;
    reader.until_shown("3 issues are quarantined").await?;
    reader.must_be_accessible("/console").await?;
    reader.picture("90-overview-without-redis").await?;
    for path in [
        "/console/topics",
        "/console/topics/orders",
        "/console/topics/orders/messages",
        "/console/topics/orders/groups/billing",
    ] {
        let shown = reader.open(path).await?;
        ensure!(
            shown.contains("cannot be shown") && shown.contains("Open Doctor"),
            "{path}: {shown}"
        );
        reader.must_be_accessible(path).await?;
    }
    must_show(
        "tickets",
        &reader.open("/console/tickets").await?,
        &["Router blinks red".to_owned()],
    )?;
    let failures = ["not read".to_owned(), "payment # refused by the bank".to_owned()];
    must_show("failures", &reader.open("/console/failures").await?, &failures)?;
    let found = ["not searched".to_owned(), "Router blinks red".to_owned()];
    must_show("search", &reader.open("/console/search?q=router").await?, &found)?;
    let plans = ["paused".to_owned(), "dead letters of orders".to_owned()];
    must_show("plans", &reader.open("/console/plans").await?, &plans)?;
    fixture.redis.restart()?;
    reader.open("/console/topics").await?;
    reader.until_shown("orders").await?;

    fixture.postgres.stop()?;
    reader.open("/console").await?;
    reader.until_shown("The database").await?;
    for path in [
        "/console/tickets",
        "/console/issues",
        "/console/plans",
        "/console/plans/1",
        "/console/outbox",
        "/console/processes",
        "/console/audit",
    ] {
        let shown = reader.open(path).await?;
        ensure!(
            shown.contains("cannot be shown") && shown.contains("Open Doctor"),
            "{path}: {shown}"
        );
        reader.must_be_accessible(path).await?;
    }
    let ticket = reader.open(&format!("/console/tickets/{}", data.ticket)).await?;
    ensure!(ticket.contains("cannot be shown"), "{ticket}");
    must_show("topics", &reader.open("/console/topics").await?, &["orders".to_owned()])?;
    fixture.postgres.restart()?;
    reader.open("/console/tickets").await?;
    reader.until_shown("Router blinks red").await?;
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}
