//! Every screen with data, empty, with a failing dependency, and without scripts.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::json;

use crate::fixture::{ConsoleData, ConsoleFixture, DeskData, Reader};
use crate::support::{Server, ServerDir};
use crate::topic_history::{consume_orders, topic_charts_are_shown};

/// A report whose rows are in the database, so that it needs no analytics.
const REPORT: &str = "/console/reports/tokens-and-cost";

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
                "Failures by cause, per minute",
                "Oldest wait",
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
            text(&[
                "Service",
                "headwater assign add",
                "orders / billing",
                "no members",
                "Moves of the last hour",
            ]),
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
        (
            REPORT.to_owned(),
            text(&["Tokens and cost of all model runs", "scripted", "Download CSV"]),
        ),
        ("/console/sql?query=SELECT%201%20AS%20events".to_owned(), text(&["events", "1 row."])),
        ("/console/sql?query=DROP%20TABLE%20events".to_owned(), text(&["SELECT"])),
        ("/console/consistency?check=1".to_owned(), text(&["Consistent: ", "Came in"])),
        (
            "/console/webhooks".to_owned(),
            text(&["/webhooks/github/code", "rejected", "X-Hub-Signature-256 is missing"]),
        ),
        ("/console/topics".to_owned(), text(&["orders", "billing", "In/s", "Settled/s"])),
        (
            "/console/topics/orders".to_owned(),
            text(&[
                "billing",
                "Dead letters (4)",
                "Policies",
                "The last hour",
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
            text(&["Lag", "Partitions", "Oldest pending", "The last hour", "Delete group…"]),
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
        (
            format!("/console/failures/{}", data.cause),
            text(&[
                "order # has no address",
                "dead letters",
                "Samples",
                "Replay plan…",
                "Replay 3 dead letters…",
                "Purge 3 dead letters…",
                "Export",
                &format!("headwater failure show {}", data.cause),
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
            text(&[
                "stream.url",
                "database.url",
                "No token is configured",
                "headwater process settings",
            ]),
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

/// Screens with work for people, and text that they show.
pub(crate) fn with_desk_data(data: &DeskData) -> Vec<(String, Vec<String>)> {
    let text = |parts: &[&str]| parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>();
    let [first, second] = data.drafts;
    vec![
        (
            "/console/drafts".to_owned(),
            text(&[
                &format!("Draft {first}"),
                &format!("Draft {second}"),
                "rule 1",
                "Approve and post",
                "Reason, for the model",
                "headwater draft list --status pending",
            ]),
        ),
        (
            "/console/tickets?status=handed_over".to_owned(),
            text(&["handed over", "headwater ticket list --handed-over"]),
        ),
        (
            format!("/console/tickets/{}", data.handed_over),
            text(&["the user asked for a person", "nobody", "Take ticket", "Return to the desk"]),
        ),
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
    let screens = [with_data(&data), with_desk_data(&fixture.fill_desk().await?)].concat();
    fixture.until_left().await?;
    let reader = Reader::start(&fixture.server, BrowserScripts::On).await?;
    for (index, (path, wanted)) in screens.into_iter().enumerate() {
        let name = format!("{index:02}-{}", path.split(['/', '?']).nth(2).unwrap_or("overview"));
        reader.open_whole(&path, &wanted).await?;
        must_look_right(&reader, &path, &name).await?;
    }
    // Confirmations, without and with a name to type.
    for (path, button, wanted) in [
        (
            "/console/topics/orders/dead-letters",
            "Purge all that match…",
            [
                "Purge 4 dead letters?",
                "Groups of the topic: billing.",
                "headwater dlq purge orders --all --yes",
            ],
        ),
        (
            "/console/topics/orders/groups/billing",
            "Delete group…",
            [
                "Type billing to confirm",
                "This cannot be undone.",
                "headwater group delete orders billing --yes",
            ],
        ),
    ] {
        reader.open(path).await?;
        reader.click(button).await?;
        reader.until_shown("This cannot be undone.").await?;
        must_show(button, &reader.text().await?, &wanted.map(str::to_owned))?;
        must_look_right(&reader, button, "70-confirmation").await?;
    }
    report_has_a_chart_and_a_file(&reader, &fixture.server).await?;
    an_inconsistent_issue_is_named(&reader, &fixture, data.quarantined).await?;
    reader.browser.quit().await
}

/// An issue whose row does not agree with its events.
async fn an_inconsistent_issue_is_named(
    reader: &Reader,
    fixture: &ConsoleFixture,
    issue: i64,
) -> Result<()> {
    let path = "/console/consistency?check=1";
    let broken = format!("UPDATE issues SET pending_events = 3 WHERE id = {issue}");
    fixture.database.query(&broken)?;
    reader.until_reopened(path, "1 issue is inconsistent.").await?;
    let shown = reader.text().await?;
    let wanted = ["Inconsistent issues", "pending_events is 3, but 0 event logs are unprocessed"];
    must_show(path, &shown, &wanted.map(str::to_owned))?;
    ensure!(!shown.contains("Consistent: "), "{shown}");
    must_look_right(reader, path, "71-inconsistent").await?;
    let rows =
        "return [...document.querySelectorAll('main tbody th')].map(cell => cell.innerText).join()";
    let rows = reader.driver().execute(rows).await?;
    let number = issue.to_string();
    ensure!(rows == number.as_str(), "{rows}");
    reader.click(&number).await?;
    reader.until_shown("refused by the bank").await?;
    ensure!(reader.path().await? == format!("/console/issues/{issue}"));
    let repaired = format!("UPDATE issues SET pending_events = 0 WHERE id = {issue}");
    fixture.database.query(&repaired)?;
    reader.until_reopened(path, "Consistent: ").await
}

/// The page that is open is accessible in light, dark and narrow, and nothing went wrong.
async fn must_look_right(reader: &Reader, path: &str, name: &str) -> Result<()> {
    reader.must_be_accessible(path).await?;
    reader.picture(name).await?;
    reader.browser.set_color_scheme("dark").await?;
    reader.must_have_contrast(path).await?;
    reader.picture(&format!("{name}-dark")).await?;
    reader.browser.resize(320, 700).await?;
    reader.must_fit(path).await?;
    reader.picture(&format!("{name}-narrow")).await?;
    reader.browser.resize(1280, 900).await?;
    reader.browser.set_color_scheme("light").await?;
    reader.must_be_clean(&[]).await
}

async fn report_has_a_chart_and_a_file(reader: &Reader, server: &Server) -> Result<()> {
    reader.open(REPORT).await?;
    let is_drawn = "const chart = document.querySelector('img.chart'); return chart.complete && chart.naturalWidth > 0";
    ensure!(reader.driver().execute(is_drawn).await? == true, "the chart is not drawn");
    reader.must_be_clean(&[]).await?;
    let file = async |name: &str| {
        let response = server.client.get(server.url(&format!("{REPORT}/{name}"))).send().await?;
        ensure!(response.status() == 200, "{name}: {response:?}");
        let kind = response.headers()["content-type"].to_str()?.to_owned();
        anyhow::Ok((kind, response.text().await?))
    };
    let (kind, chart) = file("chart.svg").await?;
    ensure!(kind == "image/svg+xml" && chart.starts_with("<svg"), "{kind}: {chart}");
    ensure!(chart.contains("tokens_in") && chart.contains("tokens_out"), "{chart}");
    let (kind, rows) = file("data.csv").await?;
    ensure!(kind == "text/csv; charset=utf-8", "{kind}");
    let (head, rows) = rows.split_once('\n').context("a head")?;
    ensure!(
        head.trim() == "day,integration,model,runs,unanswered,tokens_in,tokens_out,cost",
        "{head}"
    );
    ensure!(rows.contains(",desk,scripted,"), "{rows}");
    Ok(())
}

async fn html(server: &Server, path: &str) -> Result<String> {
    Ok(server.client.get(server.url(path)).send().await?.text().await?)
}

/// Charts of the overview: marks, gaps, a read-out for each step, and their data as a table, with and without scripts.
#[tokio::test]
async fn charts_show_gaps_and_marks_and_have_their_data_as_a_table() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    // What comes after the first measurement is counted.
    let has_measured = |_: u16, moves: &serde_json::Value| moves["since"].is_string();
    fixture.server.until("/api/v1/assignment/moves", has_measured).await?;
    fixture.fill().await?;
    let dir = ServerDir::new()?;
    let _consumer = consume_orders(&dir, &fixture.redis)?;
    for scripts in [BrowserScripts::On, BrowserScripts::Off] {
        let reader = Reader::start(&fixture.server, scripts).await?;
        reader.open("/console").await?;
        let page = html(&fixture.server, "/console").await?;
        ensure!(page.matches("role=\"img\"").count() == 6, "{page}");
        // A minute of the fixture has two runs of 5 to 10 ms, five of up to 25 ms and one of up to 50 ms.
        for part in ["heat map; its data follows", "UTC: 5 took 10 ms to 25 ms", "class=\"heat-5\""]
        {
            ensure!(page.contains(part), "{part}: {page}");
        }
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
        topic_charts_are_shown(&reader, &fixture.server, scripts).await?;
        reader.must_be_clean(&[]).await?;
        reader.browser.quit().await?;
    }
    Ok(())
}

/// The path in the line that says how programs read what a screen shows.
fn request_of(shown: &str) -> Option<&str> {
    let (_, address) = shown.split_once("\"$HEADWATER_URL")?;
    address.split('"').next()
}

#[tokio::test]
async fn every_screen_is_readable_without_scripts() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let screens = [with_data(&data), with_desk_data(&fixture.fill_desk().await?)].concat();
    fixture.until_left().await?;
    let reader = Reader::start(&fixture.server, BrowserScripts::Off).await?;
    for (path, wanted) in screens {
        let shown = reader.open_whole(&path, &wanted).await?;
        // Every screen that reads something says how programs read it.
        let has_request = shown.contains("curl -s -H \"Authorization: Bearer");
        ensure!(has_request == (path != "/console/help"), "{path}: {shown}");
        if let Some(request) = request_of(&shown) {
            let (status, answer) = fixture.server.get(request).await?;
            let expected = if path.contains("query=DROP") { 400 } else { 200 };
            ensure!(status == expected, "{path} shows {request}: {status} {answer}");
        }
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
    // A topic without anything.
    let topic = json!({"name": "empty", "partitions": 1});
    ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201);
    for (path, wanted) in [
        ("/console/topics/empty", "No group reads this topic."),
        ("/console/topics/empty/messages", "headwater produce empty"),
        ("/console/topics/empty/messages?key=none", "None of the messages that were looked at"),
        ("/console/topics/empty/dead-letters", "No dead letter matches."),
        ("/console/assignment?topic=empty", "No group reads a topic."),
        ("/console/tail?topic=empty", "No message is stored."),
    ] {
        must_show(path, &reader.open(path).await?, &[wanted.to_owned()])?;
        reader.must_be_accessible(path).await?;
        reader.must_be_clean(&[]).await?;
    }
    for (path, reason) in [
        ("/console/no-such-page", "there is no such page"),
        ("/console/tickets/nonsense", ""),
        ("/console/issues/999", ""),
        ("/console/topics/none", ""),
        ("/console/topics/empty/dead-letters/1-0", "kept until they are replayed or purged"),
        ("/console/sessions/none", "it may have expired: `retention.sessions`"),
        ("/console/reports/none", ""),
    ] {
        let shown = reader.open(path).await?;
        ensure!(shown.contains("Code") && shown.contains("request"), "{path}: {shown}");
        ensure!(shown.contains(reason), "{path}: {shown}");
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

    reader.open("/console/topics").await?;
    reader.open("/console").await?;
    fixture.redis.kill9()?;
    reader.until_shown("The stream backend").await?;
    reader.until_shown("3 issues are quarantined").await?;
    // What Redis said last, with its age.
    let tile = reader.find("ul.tiles a[href='/console/topics']").await?.text().await?;
    ensure!(tile.contains("Consumer lag") && tile.contains("as of "), "{tile}");
    let database = reader.find("ul.tiles a[href='/console/issues?status=queued']").await?;
    ensure!(!database.text().await?.contains("as of "), "the database answers");
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
        // This page was open before.
        let is_last = shown.contains("It is shown as of ") && shown.contains("billing");
        ensure!(is_last == (path == "/console/topics"), "{path}: {shown}");
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
