//! Every action through the browser, without scripts, and what the API reports afterwards.

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::{Value, json};

use crate::fixture::{ConsoleFixture, Reader};
use crate::support::Server;

async fn count(server: &Server, path: &str, list: &str) -> Result<usize> {
    let (status, page) = server.get(path).await?;
    ensure!(status == 200, "{page}");
    Ok(page[list].as_array().context("a list")?.len())
}

#[tokio::test]
async fn every_action_works_without_scripts_and_is_audited_once() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let server = &fixture.server;
    let reader = Reader::start(server, BrowserScripts::Off).await?;

    // Tickets: reply, close, reopen.
    let ticket = format!("/console/tickets/{}", data.ticket);
    reader.open(&ticket).await?;
    reader.fill("content", "A person answers: <b>unplug</b> it.").await?;
    reader.click("Send reply").await?;
    reader.until_shown("The reply is stored.").await?;
    reader.until_shown("<b>unplug</b>").await?;
    reader.click("Close ticket").await?;
    reader.until_shown("The ticket is closed.").await?;
    reader.click("Reopen ticket").await?;
    reader.until_shown("The ticket is open again.").await?;

    // Issues: release one, then all that match after a dry run.
    reader.open(&format!("/console/issues/{}", data.quarantined)).await?;
    reader.click("Release").await?;
    reader.until_shown("The issue has no pending events.").await?;
    reader.open("/console/issues?quarantined=true").await?;
    reader.click("Release all that match…").await?;
    reader.until_shown("Release 2 issues?").await?;
    reader.until_shown("headwater issue release --all").await?;
    ensure!(
        count(server, "/api/v1/issues?quarantined=true", "issues").await? == 2,
        "a dry run changes nothing"
    );
    reader.click("Release 2 issues").await?;
    reader.until_shown("2 The quarantine has ended.").await?;
    ensure!(count(server, "/api/v1/issues?quarantined=true", "issues").await? == 0);

    // A session: fork it after its first step, and compare.
    reader.open(&format!("/console/sessions/{}", data.session)).await?;
    reader.find("details.item summary").await?.click().await?;
    let field = reader.find("details.item input[name=session]").await?;
    field.clear().await?;
    field.send_keys("shorter").await?;
    reader.click("Fork").await?;
    reader.until_shown("The session was forked.").await?;
    reader.click("Compare").await?;
    reader.until_shown("The first 1 event is the same. What follows differs:").await?;
    reader.until_shown("No further event.").await?;

    // The outbox.
    reader.open("/console/outbox").await?;
    reader.click("Retry all…").await?;
    reader.until_shown("Retry 1 reply?").await?;
    reader.click("Retry 1 reply").await?;
    reader.until_shown("queued for delivery").await?;

    // One cause: three dead letters are replayed, the first of them with another payload, after a plan for them was
    // made, paused and cancelled.
    let (_, page) = server.get("/api/v1/topics/orders/dead-letters?reason=connection").await?;
    let letter = page["dead_letters"][0]["id"].as_str().context("a letter")?;
    let cause = "/console/failures";
    reader.open(&format!("/console/topics/orders/dead-letters/{letter}")).await?;
    reader.find("details.item summary").await?.click().await?;
    reader.fill("payload", "{\"order\": 0, \"host\": \"other\"}").await?;
    reader.click("Replay edited copy").await?;
    reader.until_shown("The edited copy was sent.").await?;
    reader.open(cause).await?;
    reader.click("order # has no address").await?;
    reader.click("Replay plan…").await?;
    reader.until_shown("Plan the replay of 3 dead letters?").await?;
    reader.until_shown("headwater plan create --failure").await?;
    reader.until_shown("The plan stops by itself when more than 5 % of a step fail again.").await?;
    ensure!(count(server, "/api/v1/plans", "plans").await? == 1, "a dry run makes no plan");
    reader.click("Plan the replay of 3 dead letters").await?;
    reader.until_shown("The replay plan is made and runs.").await?;
    let plan = "/api/v1/plans/2";
    server.until(plan, |_, plan| plan["sent"] == 3).await?;
    // What the console has read is shown for a second.
    let waits = "waits for the outcome of 3 letters";
    let deadline = std::time::Instant::now() + crate::support::LIMIT;
    while !reader.open("/console/plans/2").await?.contains(waits) {
        ensure!(std::time::Instant::now() < deadline, "{}", reader.text().await?);
    }
    reader.click("Pause").await?;
    reader.until_shown("The replay plan is paused.").await?;
    reader.click("Resume").await?;
    reader.until_shown("The replay plan runs again.").await?;
    reader.click("Cancel plan…").await?;
    reader.until_shown("Cancel 1 replay plan?").await?;
    reader.click("Cancel 1 replay plan").await?;
    reader.until_shown("The replay plan is cancelled.").await?;
    ensure!(server.get(plan).await?.1["state"] == "cancelled");
    // The three messages fail again, for the same cause.
    let mut dead = 0;
    while dead < 3 {
        let wanted = json!({"max": 1, "wait_ms": 5000, "lease_ms": 60000});
        let (_, pulled) = server.post("/api/v1/topics/orders/groups/billing/pull", &wanted).await?;
        let settlement = |message: &Value| match message["payload"].as_str() {
            Some(payload) if payload.contains("other") => {
                json!({"lease": message["lease"], "outcome": "done"})
            }
            _ => {
                json!({"lease": message["lease"], "outcome": "dead_letter", "reason": "order 7 has no address"})
            }
        };
        let messages = pulled["messages"].as_array().context("messages")?;
        let settlements: Vec<Value> = messages.iter().map(settlement).collect();
        dead += settlements.iter().filter(|one| one["outcome"] == "dead_letter").count();
        let body = json!({"settlements": settlements});
        ensure!(server.post("/api/v1/topics/orders/groups/billing/settle", &body).await?.0 == 200);
    }
    reader.open("/console/failures").await?;
    reader.click("order # has no address").await?;
    reader.click("Replay 3 dead letters…").await?;
    reader.until_shown("Replay 3 dead letters?").await?;
    reader.click("Replay 3 dead letters").await?;
    reader.until_shown("3 sent again.").await?;
    let letters = "/api/v1/topics/orders/dead-letters";
    ensure!(count(server, letters, "dead_letters").await? == 0);

    // Purge a selected one.
    let wanted = json!({"max": 1, "wait_ms": 5000, "lease_ms": 60000});
    let (_, pulled) = server.post("/api/v1/topics/orders/groups/billing/pull", &wanted).await?;
    let settlement =
        json!({"lease": pulled["messages"][0]["lease"], "outcome": "dead_letter", "reason": "r"});
    let body = json!({"settlements": [settlement]});
    ensure!(server.post("/api/v1/topics/orders/groups/billing/settle", &body).await?.0 == 200);
    reader.open("/console/topics/orders/dead-letters").await?;
    reader.find("input[name=id]").await?.click().await?;
    reader.click("Purge selected…").await?;
    reader.until_shown("This cannot be undone.").await?;
    reader.click("Purge 1 dead letter").await?;
    reader.until_shown("1 deleted permanently.").await?;
    ensure!(count(server, letters, "dead_letters").await? == 0);

    // Produce a message, and see it.
    reader.open("/console/topics/orders").await?;
    reader.find("details.item summary").await?.click().await?;
    reader.fill("key", "customer-9").await?;
    reader.fill("payload", "{\"order\": 99}").await?;
    reader.click("Produce message").await?;
    reader.until_shown("customer-9").await?;

    // Move a group, and delete it: its name must be typed.
    let group = "/console/topics/orders/groups/billing";
    reader.open(group).await?;
    reader.fill("to", "end").await?;
    reader.click("Reset…").await?;
    reader.until_shown("will be skipped.").await?;
    reader.open(group).await?;
    reader.click("Delete group…").await?;
    reader.fill("typed", "wrong").await?;
    reader.click("Delete 1 group").await?;
    reader.until_shown("The typed name is not the same.").await?;
    ensure!(server.get("/api/v1/topics/orders/groups/billing").await?.0 == 200);

    // Delete the topic.
    reader.open("/console/topics/orders").await?;
    reader.click("Delete topic…").await?;
    reader.until_shown("Groups that read it: billing.").await?;
    reader.fill("typed", "orders").await?;
    reader.click("Delete 1 topic").await?;
    reader.until_shown("Deleted.").await?;
    ensure!(server.get("/api/v1/topics/orders").await?.0 == 404);

    // Each change once, by name.
    let (_, audit) = server.get("/api/v1/audit?limit=500").await?;
    let paths: Vec<&str> = audit["entries"]
        .as_array()
        .context("entries")?
        .iter()
        .filter_map(|entry| entry["path"].as_str())
        .collect();
    let times = |end: &str| paths.iter().filter(|path| path.ends_with(end)).count();
    for (end, expected) in [
        ("/messages", 1),
        ("/close", 1),
        ("/reopen", 1),
        ("/fork", 1),
        ("/plans/2/pause", 1),
        ("/plans/2/resume", 1),
        ("/plans/2/cancel", 1),
        (&format!("/dead-letters/{letter}/replay"), 1),
        ("/api/v1/issues/release", 1),
        ("/api/v1/outbox/retry", 1),
        ("/topics/orders", 1),
    ] {
        ensure!(times(end) == expected, "{end} is {} times in {paths:#?}", times(end));
    }
    ensure!(paths.iter().all(|path| !path.starts_with("/console")), "{paths:?}");
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}

#[tokio::test]
async fn a_confirmation_is_asked_again_if_the_number_has_changed() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let reader = Reader::start(&fixture.server, BrowserScripts::On).await?;
    reader.open("/console/topics/orders/dead-letters?reason=address").await?;
    reader.click("Replay all that match…").await?;
    reader.until_shown("Replay 3 dead letters?").await?;
    let purge = json!({"reason": "order 1 "});
    let (status, purged) =
        fixture.server.post("/api/v1/topics/orders/dead-letters/purge", &purge).await?;
    ensure!(status == 200 && purged["purged"] == 1, "{purged}");
    reader.click("Replay 3 dead letters").await?;
    reader.until_shown("The number has changed since.").await?;
    reader.click("Replay 2 dead letters").await?;
    reader.until_shown("2 sent again.").await?;

    // A reply that is sent twice is stored once.
    let page =
        fixture.server.client.get(fixture.server.url(&format!("/console/tickets/{}", data.ticket)));
    let page = page.send().await?.text().await?;
    let id =
        page.split("name=\"message_id\" value=\"").nth(1).and_then(|rest| rest.split('"').next());
    let id = id.context("an idempotency id")?;
    for _ in 0..2 {
        let form = format!("content=once&message_id={id}");
        let path = fixture.server.url(&format!("/console/do/tickets/{}/reply", data.ticket));
        let request = fixture.server.client.post(path).header("origin", fixture.server.url(""));
        let request =
            request.header("content-type", "application/x-www-form-urlencoded").body(form);
        ensure!(request.send().await?.status().as_u16() < 400);
    }
    let (_, ticket) = fixture.server.get(&format!("/api/v1/tickets/{}", data.ticket)).await?;
    let once = |message: &&Value| message["content"] == "once";
    ensure!(ticket["messages"].as_array().context("messages")?.iter().filter(once).count() == 1);
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}
