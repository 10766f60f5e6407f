//! Every action through the browser, without scripts, and what the API reports afterwards.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::{Value, json};

use crate::fixture::{ConsoleData, ConsoleFixture, DeskData, Reader};
use crate::support::desk::{all_idle, by};
use crate::support::{LIMIT, Server};

async fn count(server: &Server, path: &str, list: &str) -> Result<usize> {
    let (status, page) = server.get(path).await?;
    ensure!(status == 200, "{page}");
    Ok(page[list].as_array().context("a list")?.len())
}

const LETTERS: &str = "/api/v1/topics/orders/dead-letters";

/// Pulls so many messages of `orders`, which fail for this reason.
async fn dead_letters(server: &Server, count: usize, reason: &str) -> Result<()> {
    let group = "/api/v1/topics/orders/groups/billing";
    let mut dead = 0;
    while dead < count {
        let wanted = json!({"max": 1, "wait_ms": 5000, "lease_ms": 60000});
        let (_, pulled) = server.post(&format!("{group}/pull"), &wanted).await?;
        let letter = |message: &Value| json!({"lease": message["lease"], "outcome": "dead_letter", "reason": reason});
        let messages = pulled["messages"].as_array().context("messages")?;
        let settlements: Vec<Value> = messages.iter().map(letter).collect();
        dead += settlements.len();
        let body = json!({"settlements": settlements});
        ensure!(server.post(&format!("{group}/settle"), &body).await?.0 == 200);
    }
    Ok(())
}

/// Hand-overs: taken, assigned, returned.
async fn hand_overs(reader: &Reader, server: &Server, ticket: &str) -> Result<()> {
    let path = format!("/api/v1/tickets/{ticket}");
    let assignee = async || anyhow::Ok(server.get(&path).await?.1["assignee"].clone());
    reader.open("/console/tickets?status=handed_over").await?;
    reader.find(&format!("tr[data-key='{ticket}'] a")).await?.click().await?;
    reader.click("Take ticket").await?;
    reader.until_shown("You have taken the ticket.").await?;
    ensure!(assignee().await? == "local");
    reader.fill("assignee", "grace").await?;
    reader.click("Assign").await?;
    reader.until_shown("The ticket has a new assignee.").await?;
    ensure!(assignee().await? == "grace");
    reader.click("Remove assignee").await?;
    reader.until_shown("The ticket is assigned to nobody.").await?;
    ensure!(assignee().await?.is_null());
    reader.click("Return to the desk").await?;
    reader.until_shown("The ticket is open again.").await?;
    ensure!(server.get(&path).await?.1["handed_over"] == false);
    Ok(())
}

/// Drafts: one is approved with another text, which is posted; the other one is rejected.
async fn drafts(reader: &Reader, server: &Server, [approved, rejected]: [i64; 2]) -> Result<()> {
    let button = async |number: i64, verb: &str| {
        let css = format!("section[aria-label='Draft {number}'] form[action$='/{verb}'] button");
        reader.find(&css).await?.click().await
    };
    let draft =
        async |number: i64| anyhow::Ok(server.get(&format!("/api/v1/drafts/{number}")).await?.1);
    reader.open("/console/drafts").await?;
    reader.fill(&format!("content-{approved}"), "It is approved.").await?;
    button(approved, "approve").await?;
    reader.until_shown("The draft is approved: it is posted").await?;
    let decided = draft(approved).await?;
    ensure!(decided["status"] == "approved" && decided["posted"] == "It is approved.", "{decided}");
    let ticket =
        format!("/api/v1/tickets/{}", decided["external_issue_id"].as_str().context("a ticket")?);
    server.until(&ticket, |_, ticket| by(ticket, "assistant") == ["It is approved."]).await?;

    reader.fill(&format!("reason-{rejected}"), "too short").await?;
    button(rejected, "reject").await?;
    reader.until_shown("The draft is rejected and is never posted.").await?;
    let decided = draft(rejected).await?;
    ensure!(
        decided["status"] == "rejected" && decided["decision_reason"] == "too short",
        "{decided}"
    );
    reader.until_shown("No draft has this status.").await
}

/// An issue that waits is retried, and those of one cause are released.
async fn issues(reader: &Reader, fixture: &ConsoleFixture, data: &ConsoleData) -> Result<()> {
    let server = &fixture.server;
    let (_, ticket) = server.get(&format!("/api/v1/tickets/{}", data.ticket)).await?;
    let issue = ticket["issue_id"].as_i64().context("an issue")?;
    // Its first event again, which is due in an hour.
    let waits = format!(
        "INSERT INTO event_logs (issue_id, integration_id, source, event_type, dedup_key, digest, payload, payload_bytes)
         SELECT issue_id, integration_id, source, event_type, dedup_key || '-again', digest, payload, payload_bytes
         FROM event_logs WHERE issue_id = {issue} ORDER BY id LIMIT 1;
         UPDATE issues SET processing_status = 'queued', pending_events = 1, first_pending_at = now(),
             not_before = now() + interval '1 hour' WHERE id = {issue}"
    );
    fixture.database.query(&waits)?;
    reader.open(&format!("/console/issues/{issue}")).await?;
    reader.click("Retry now").await?;
    reader.until_shown("The issue can be claimed now.").await?;
    let is_done = |_: u16, issue: &Value| {
        issue["processing_status"] == "idle" && issue["pending_events"] == 0
    };
    server.until(&format!("/api/v1/issues/{issue}"), is_done).await?;

    let stuck = "UPDATE issues SET quarantined_at = now(), last_error = 'shelf ' || external_issue_id || ' is empty'
        WHERE external_project_id = 'acme/shop'";
    fixture.database.query(stuck)?;
    reader.open("/console/failures").await?;
    reader.click("shelf # is empty").await?;
    reader.click("Release 3 issues…").await?;
    reader.until_shown("Release 3 issues?").await?;
    let quarantined = "/api/v1/issues?quarantined=true";
    ensure!(count(server, quarantined, "issues").await? == 3, "a dry run changes nothing");
    reader.click("Release 3 issues").await?;
    reader.until_shown("3 The quarantine has ended.").await?;
    ensure!(count(server, quarantined, "issues").await? == 0);
    Ok(())
}

/// One reply is retried by its row, two by their cause; all of them are delivered.
async fn replies(reader: &Reader, fixture: &ConsoleFixture, desk: &DeskData) -> Result<()> {
    let server = &fixture.server;
    // A target without a name is the answer to the ticket.
    let dead = format!(
        "INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, last_error)
         SELECT i.id, i.integration_id, 'reply', '', 'late-' || n, jsonb_build_object('content', 'Late answer ' || n), 'dead',
             now(), 'mailbox ' || n || ' is full'
         FROM issues i, generate_series(1, 3) AS n WHERE i.external_issue_id = '{}'
         RETURNING outbox.id",
        desk.handed_over
    );
    let rows = fixture.database.query(&dead)?;
    let first = rows.lines().next().context("a row")?;
    let state = async |row: &str| {
        let path = format!("/api/v1/outbox/{row}");
        server.until(&path, |_, row| row["status"] == "delivered").await
    };
    reader.open(&format!("/console/outbox/{first}")).await?;
    reader.click("Retry delivery").await?;
    reader.until_shown("1 queued for delivery.").await?;
    state(first).await?;
    reader.open("/console/failures").await?;
    reader.click("mailbox # is full").await?;
    reader.click("Retry 2 replies…").await?;
    reader.until_shown("Retry 2 replies?").await?;
    reader.until_shown("do headwater outbox retry $id; done").await?;
    reader.click("Retry 2 replies").await?;
    reader.until_shown("2 queued for delivery.").await?;
    for row in rows.lines() {
        state(row).await?;
    }
    let ticket = format!("/api/v1/tickets/{}", desk.handed_over);
    let has_all = |_: u16, ticket: &Value| {
        let late =
            by(ticket, "assistant").into_iter().filter(|text| text.starts_with("Late answer"));
        late.count() == 3
    };
    server.until(&ticket, has_all).await.map(drop)
}

/// Opens the dead letters of `orders` until so many are listed: what the console has read is shown for a second.
async fn until_listed(reader: &Reader, count: usize) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let shown = reader.open("/console/topics/orders/dead-letters").await?;
        if reader.driver().count("tbody input[name=id]").await? == count {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not {count} dead letters: {shown}");
    }
}

/// Dead letters: a selected one is replayed, a selected one is purged, and then those that match.
async fn selected_letters(reader: &Reader, server: &Server) -> Result<()> {
    dead_letters(server, 1, "r").await?;
    until_listed(reader, 1).await?;
    reader.find("input[name=id]").await?.click().await?;
    reader.click("Replay selected…").await?;
    reader.until_shown("Replay 1 dead letter?").await?;
    ensure!(count(server, LETTERS, "dead_letters").await? == 1, "a dry run changes nothing");
    reader.click("Replay 1 dead letter").await?;
    reader.until_shown("1 sent again.").await?;
    ensure!(count(server, LETTERS, "dead_letters").await? == 0);

    dead_letters(server, 2, "the printer is on fire").await?;
    dead_letters(server, 2, "r").await?;
    until_listed(reader, 4).await?;
    // The newest one comes first.
    reader.find("input[name=id]").await?.click().await?;
    reader.click("Purge selected…").await?;
    reader.until_shown("This cannot be undone.").await?;
    reader.click("Purge 1 dead letter").await?;
    reader.until_shown("1 deleted permanently.").await?;

    until_listed(reader, 3).await?;
    reader.fill("reason", "on fire").await?;
    reader.click("Filter").await?;
    reader.until("return location.search.includes('reason=on')").await?;
    reader.click("Purge all that match…").await?;
    reader.until_shown("Purge 2 dead letters?").await?;
    reader.until_shown("headwater dlq purge orders --reason 'on fire' --yes").await?;
    reader.click("Purge 2 dead letters").await?;
    reader.until_shown("2 deleted permanently.").await?;
    let (_, left) = server.get(LETTERS).await?;
    let left = left["dead_letters"].as_array().context("dead letters")?;
    ensure!(left.len() == 1 && left[0]["reason"] == "r", "{left:?}");
    Ok(())
}

/// The group is moved to the end and deleted, its name typed.
async fn group(reader: &Reader, server: &Server) -> Result<()> {
    let group = "/console/topics/orders/groups/billing";
    let path = "/api/v1/topics/orders/groups/billing";
    let left = async || {
        let to_end = json!({"to": "end", "dry_run": true, "force": true});
        let (status, tried) = server.post(&format!("{path}/reset"), &to_end).await?;
        ensure!(status == 200, "{tried}");
        tried["skipped"]["count"].as_u64().context("a count")
    };
    let before = left().await?;
    ensure!(before > 0, "the group has read everything");
    // The pulls leave the group when they have been idle for some seconds; a reset needs a group without members.
    server.until(path, |_, group| group["members"] == json!([])).await?;
    reader.open(group).await?;
    reader.fill("to", "end").await?;
    reader.click("Reset…").await?;
    reader.until_shown("will be skipped.").await?;
    ensure!(left().await? == before, "a dry run changes nothing");
    reader.confirm().await?;
    reader.until_shown("The group was moved.").await?;
    ensure!(left().await? == 0);

    reader.open(group).await?;
    reader.click("Delete group…").await?;
    reader.fill("typed", "wrong").await?;
    reader.click("Delete 1 group").await?;
    reader.until_shown("The typed name is not the same.").await?;
    ensure!(server.get(path).await?.0 == 200);
    reader.fill("typed", "billing").await?;
    reader.click("Delete 1 group").await?;
    reader.until_shown("Deleted.").await?;
    ensure!(server.get(path).await?.0 == 404);
    Ok(())
}

#[tokio::test]
async fn every_action_works_without_scripts_and_is_audited_once() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let desk = fixture.fill_desk().await?;
    let server = &fixture.server;
    let reader = Reader::start(server, BrowserScripts::Off).await?;

    hand_overs(&reader, server, &desk.handed_over).await?;
    drafts(&reader, server, desk.drafts).await?;

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
    // From the overview, and back without a change.
    reader.open("/console").await?;
    reader.click("Show by cause").await?;
    reader.until_shown("order # has no address").await?;
    reader.open("/console").await?;
    reader.click("Release all…").await?;
    reader.until_shown("Release 2 issues?").await?;
    reader.click("Cancel").await?;
    ensure!(reader.path().await?.starts_with("/console/issues?quarantined=true"));
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
    all_idle(server).await?;
    issues(&reader, &fixture, &data).await?;

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
    replies(&reader, &fixture, &desk).await?;

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
    let deadline = Instant::now() + LIMIT;
    while !reader.open("/console/plans/2").await?.contains(waits) {
        ensure!(Instant::now() < deadline, "{}", reader.text().await?);
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
    ensure!(count(server, LETTERS, "dead_letters").await? == 0);
    selected_letters(&reader, server).await?;

    // Produce a message, and see it.
    reader.open("/console/topics/orders").await?;
    reader.find("details.item summary").await?.click().await?;
    reader.fill("key", "customer-9").await?;
    reader.fill("payload", "{\"order\": 99}").await?;
    reader.click("Produce message").await?;
    reader.until_shown("customer-9").await?;

    // The topic, once with its group.
    reader.open("/console/topics/orders").await?;
    reader.click("Delete topic…").await?;
    reader.until_shown("Groups that read it: billing.").await?;
    group(&reader, server).await?;

    reader.open("/console/topics/orders").await?;
    reader.click("Delete topic…").await?;
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
        ("/take", 1),
        ("/assign", 1),
        ("/unassign", 1),
        ("/close", 1),
        // Of the ticket that is returned, too.
        ("/reopen", 2),
        ("/approve", 1),
        ("/reject", 1),
        ("/fork", 1),
        ("/plans/2/pause", 1),
        ("/plans/2/resume", 1),
        ("/plans/2/cancel", 1),
        (&format!("/dead-letters/{letter}/replay"), 1),
        // What was confirmed, and not its dry run: a selected one and all of a cause, a selected one and all that match.
        ("/dead-letters/replay", 2),
        ("/dead-letters/purge", 2),
        ("/groups/billing/reset", 1),
        ("/api/v1/plans", 1),
        ("/api/v1/issues/release", 1),
        // One by its button, three of a cause, and all that match.
        ("/release", 5),
        ("/api/v1/outbox/retry", 1),
        // One reply by its button, two of a cause, all that match, and one issue.
        ("/retry", 5),
        ("/groups/billing", 1),
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
