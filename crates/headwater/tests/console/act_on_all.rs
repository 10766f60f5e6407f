//! Actions on everything that is selected or that matches, however many they are; and why something waits, with the button that resolves it.

use anyhow::{Context, Result, ensure};
use reqwest::header::{AUTHORIZATION, HeaderMap};
use serde_json::{Value, json};

use crate::fixture::{ConsoleFixture, all_failures};
use crate::support::{Server, ServerDir};

/// Stores so many dead letters of a new topic, with these reasons in turn.
async fn dead_letters(server: &Server, topic: &str, count: usize, reasons: &[&str]) -> Result<()> {
    let api = format!("/api/v1/topics/{topic}");
    let (status, created) =
        server.post("/api/v1/topics", &json!({"name": topic, "partitions": 1})).await?;
    ensure!(status == 201, "{created}");
    let messages: Vec<Value> = (0..count).map(|_| json!({"payload": "x"})).collect();
    ensure!(
        server.post(&format!("{api}/messages"), &json!({"messages": messages})).await?.0 == 201
    );
    let mut dead = 0;
    while dead < count {
        let wanted = json!({"max": 100, "wait_ms": 2000, "lease_ms": 60000});
        let (status, pulled) = server.post(&format!("{api}/groups/billing/pull"), &wanted).await?;
        ensure!(status == 200, "{pulled}");
        let mut settlements = Vec::new();
        for message in pulled["messages"].as_array().context("messages")? {
            let reason = reasons[dead % reasons.len()];
            settlements.push(
                json!({"lease": message["lease"], "outcome": "dead_letter", "reason": reason}),
            );
            dead += 1;
        }
        let body = json!({"settlements": settlements});
        let (status, settled) = server.post(&format!("{api}/groups/billing/settle"), &body).await?;
        ensure!(status == 200, "{settled}");
    }
    let all = |_: u16, topic: &Value| topic["dead_letters"] == count;
    server.until(&api, all).await.map(drop)
}

async fn page(server: &Server, path: &str) -> Result<String> {
    let response = server.client.get(server.url(path)).send().await?;
    ensure!(response.status() == 200, "{path}: {}", response.status());
    Ok(response.text().await?)
}

/// Sends a form as a browser does, and returns the page that it leads to.
async fn submit(server: &Server, path: &str, form: &str) -> Result<String> {
    let request = server.client.post(server.url(path)).header("origin", server.url(""));
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    let response = request.body(form.to_owned()).send().await?;
    let (status, text) = (response.status(), response.text().await?);
    ensure!(status == 200, "{path}: {status} {text}");
    Ok(text)
}

/// Sends a form, and then the confirmation that it leads to, whose title is this.
async fn confirm(server: &Server, path: &str, form: &str, title: &str) -> Result<String> {
    let asked = submit(server, path, form).await?;
    ensure!(asked.contains(&format!("{title}?")), "{title:?} is not asked: {asked}");
    let value = asked.split("name=\"confirm\" value=\"").nth(1).context("a confirmation")?;
    let value = value.split('"').next().context("a number")?.replace('+', "%2B");
    submit(server, path, &format!("{form}&confirm={value}")).await
}

/// The panel that says why something waits.
fn why_of(page: &str) -> Result<&str> {
    let panel = page.split("<section class=\"why\">").nth(1).context("a panel")?;
    panel.split("</section>").next().context("its end")
}

#[tokio::test]
async fn all_selected_dead_letters_are_replayed_and_all_that_match_are_purged() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    dead_letters(&server, "orders", 250, &["no address"]).await?;
    let letters = "/api/v1/topics/orders/dead-letters";
    let (_, found) = server.get(&format!("{letters}?limit=150")).await?;
    let all = found["dead_letters"].as_array().context("dead letters")?;
    let ids: Vec<String> =
        all.iter().filter_map(|one| Some(format!("id={}", one["id"].as_str()?))).collect();
    ensure!(ids.len() == 150, "{found}");

    let act = "/console/do/topics/orders/dead-letters";
    let (replay, purge) = (format!("{act}/replay"), format!("{act}/purge"));
    let shown = confirm(&server, &replay, &ids.join("&"), "Replay 150 dead letters").await?;
    ensure!(shown.contains("<strong>150</strong> sent again."), "{shown}");
    let (_, topic) = server.get("/api/v1/topics/orders").await?;
    ensure!(topic["dead_letters"] == 100 && topic["length"] == 400, "{topic}");

    // By a filter, which stays in the address.
    let form = "select=matching&reason=no+address";
    let shown = confirm(&server, &purge, form, "Purge 100 dead letters").await?;
    ensure!(shown.contains("<strong>100</strong> deleted permanently."), "{shown}");
    ensure!(shown.contains("name=\"reason\" value=\"no address\""), "{shown}");
    ensure!(server.get("/api/v1/topics/orders").await?.1["dead_letters"] == 0);
    let shown = submit(&server, &purge, form).await?;
    ensure!(shown.contains("Nothing matches"), "{shown}");

    // What is left after a part is said, with the buttons that continue.
    let part = "/console/topics/orders/dead-letters?done=purged&count=2000&left=4000";
    let shown = page(&server, part).await?;
    for part in ["<strong>2,000</strong> deleted permanently.", "<strong>4,000 are left</strong>"] {
        ensure!(shown.contains(part), "{part}: {shown}");
    }

    // The whole purge is one entry of the audit log; that it was asked for, counted again and asked for once more is none. A call
    // takes 100 ids, so the replay of 150 is two.
    let of = |end| format!("POST /api/v1/topics/orders/{end} 200");
    let expected = [of("dead-letters/purge"), of("dead-letters/replay"), of("dead-letters/replay")];
    ensure!(audited(&server).await?[..3] == expected, "{:#?}", audited(&server).await?);
    Ok(())
}

/// Method, path and status of the entries of the audit log, newest first.
async fn audited(server: &Server) -> Result<Vec<String>> {
    let (_, audit) = server.get("/api/v1/audit?limit=500").await?;
    let entries = audit["entries"].as_array().context("entries")?;
    let text = |value: &Value| value.to_string().replace('"', "");
    let entry = |entry: &Value| {
        format!("{} {} {}", text(&entry["method"]), text(&entry["path"]), text(&entry["status"]))
    };
    Ok(entries.iter().map(entry).collect())
}

#[tokio::test]
async fn a_confirmed_action_is_one_entry_of_the_audit_log_and_a_cancelled_one_none() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    dead_letters(&server, "orders", 6, &["no address", "late", "broken"]).await?;
    // The pulls leave the group when they have been idle for some seconds; a reset needs a group without members.
    let is_alone = |_: u16, group: &Value| group["members"] == json!([]);
    server.until("/api/v1/topics/orders/groups/billing", is_alone).await?;
    let mut expected = audited(&server).await?;
    let (topic, letters) = ("/console/do/topics/orders", "dead-letters");
    let actions = [
        (
            format!("{topic}/{letters}/replay"),
            "select=matching&reason=late",
            "Replay 2 dead letters",
        ),
        (
            format!("{topic}/{letters}/purge"),
            "select=matching&reason=broken",
            "Purge 2 dead letters",
        ),
        (format!("{topic}/{letters}/plan"), "select=matching", "Plan the replay of 2 dead letters"),
        (format!("{topic}/groups/billing/reset"), "to=beginning", ""),
        (format!("{topic}/grow"), "partitions=2", "Add 1 partition"),
        (format!("{topic}/trim"), "count=1&force=true", ""),
    ];
    for (index, (path, form, title)) in actions.iter().enumerate() {
        let asked = submit(&server, path, form).await?;
        ensure!(asked.contains("name=\"confirm\"") && asked.contains(title), "{path}: {asked}");
        ensure!(audited(&server).await? == expected, "{path}: a dry run is in the audit log");
        confirm(&server, path, form, title).await?;
        let (called, status) = match index {
            2 => ("/api/v1/plans".to_owned(), 201),
            _ => (path.replacen("/console/do/", "/api/v1/", 1), 200),
        };
        expected.insert(0, format!("POST {called} {status}"));
        ensure!(audited(&server).await? == expected, "{path}: {:#?}", audited(&server).await?);
        if status == 201 {
            // Afterwards it sends nothing more: it waits for the outcome of its canary.
            server.until("/api/v1/plans/1", |_, plan| plan["sent"] == 2).await?;
        }
    }
    // A dry run of a program that streams its progress, too; and one that is refused is an entry.
    let all = json!({"all": true, "dry_run": true, "progress": true});
    let api = "/api/v1/topics/orders/dead-letters/purge";
    ensure!(server.post(api, &all).await?.0 == 200);
    ensure!(audited(&server).await? == expected);
    let none = json!({"dry_run": true});
    ensure!(server.post(api, &none).await?.0 == 400);
    expected.insert(0, format!("POST {api} 400"));
    ensure!(audited(&server).await? == expected);

    // The screen finds them.
    let found = page(&server, "/console/audit?caller=local&path=PURGE").await?;
    for (part, count) in [("/dead-letters/purge", 2), ("/trim", 0), ("entries were searched.", 1)] {
        ensure!(
            found.matches(part).count() == count,
            "{part:?} is not there {count} times: {found}"
        );
    }
    ensure!(found.contains("headwater audit log --caller local --path PURGE"), "{found}");
    ensure!(page(&server, "/console/audit?caller=ann").await?.contains("No change matches."));
    let wrong = page(&server, "/console/audit?from=yesterday").await?;
    ensure!(wrong.contains("invalid `from` = `yesterday`"), "{wrong}");
    Ok(())
}

#[tokio::test]
async fn the_replay_of_all_that_match_can_be_planned() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    dead_letters(&server, "orders", 6, &["no address", "it's late"]).await?;
    let shown = page(&server, "/console/topics/orders/dead-letters?reason=late").await?;
    ensure!(shown.contains("Plan the replay of all that match…"), "{shown}");

    let plan = "/console/do/topics/orders/dead-letters/plan";
    let form = "select=matching&reason=it%27s+late&partition=0";
    let asked = submit(&server, plan, form).await?;
    let command = "headwater plan create orders --reason 'it'\\''s late' --partition 0";
    for part in [command, "The plan stops by itself", "it's late", "billing"] {
        ensure!(asked.contains(part), "{part:?}: {asked}");
    }
    ensure!(!asked.contains("Cause:"), "{asked}");
    ensure!(server.get("/api/v1/plans").await?.1["plans"] == json!([]), "a dry run makes no plan");
    let shown = confirm(&server, plan, form, "Plan the replay of 3 dead letters").await?;
    ensure!(shown.contains("The replay plan is made and runs."), "{shown}");
    let (_, made) = server.get("/api/v1/plans/1").await?;
    ensure!(made["filter"]["reason"] == "it's late" && made["filter"]["partition"] == 0, "{made}");
    ensure!(made["topics"] == json!(["orders"]) && made["total"] == 3, "{made}");
    let is_sent = |_: u16, plan: &Value| plan["sent"] == 3;
    server.until("/api/v1/plans/1", is_sent).await?;
    let is_left = |_: u16, topic: &Value| topic["dead_letters"] == 3;
    server.until("/api/v1/topics/orders", is_left).await?;
    Ok(())
}

#[tokio::test]
async fn a_cause_of_which_not_all_was_read_says_so_and_names_the_plan() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    dead_letters(&server, "orders", 1001, &["no address"]).await?;
    dead_letters(&server, "mails", 2, &["no address"]).await?;
    let failures = all_failures(&server).await?;
    let clusters = failures["clusters"].as_array().context("causes")?;
    let of = |topic: &str| clusters.iter().find(|one| one["place"] == topic).context("a cause");
    let (many, few) = (of("orders")?, of("mails")?);
    ensure!(many["count"] == 1000 && many["complete"] == false, "{many}");
    ensure!(few["count"] == 2 && few["complete"] == true, "{few}");

    let (many, few) = (many["id"].as_str().context("an id")?, few["id"].as_str().context("an id")?);
    ensure!(page(&server, "/console/failures").await?.contains("1,000+"));
    let shown = page(&server, &format!("/console/failures/{many}")).await?;
    ensure!(shown.contains("a replay plan takes all of this cause"), "{shown}");
    for (verb, title) in
        [("purge", "Purge 1,000 dead letters"), ("retry", "Replay 1,000 dead letters")]
    {
        let asked = submit(&server, &format!("/console/do/failures/{many}/{verb}"), "").await?;
        let or_more = format!("{title} or more?");
        for part in [&*or_more, "A replay plan takes all of this cause."] {
            ensure!(asked.contains(part), "{part:?}: {asked}");
        }
        let commands = asked.matches("headwater dlq ").count();
        ensure!(commands == 10, "a command takes 100 ids: {commands}");
    }
    let asked = submit(&server, &format!("/console/do/failures/{few}/purge"), "").await?;
    ensure!(
        asked.contains("Purge 2 dead letters?") && !asked.contains("replay plan takes"),
        "{asked}"
    );
    let asked = submit(&server, &format!("/console/do/failures/{many}/plan"), "").await?;
    ensure!(asked.contains("Plan the replay of 1,001 dead letters?"), "{asked}");
    Ok(())
}

#[tokio::test]
async fn a_ticket_says_why_it_waits_as_the_command_line_does() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--issue-quiet", "0s", "--issue-max-wait", "0s"])?;
    let open = async || {
        let new = json!({"title": "Router blinks red", "content": "Since yesterday."});
        let (status, ticket) = server.post("/api/v1/tickets", &new).await?;
        ensure!(status == 201, "{ticket}");
        let id = ticket["ticket_id"].as_str().context("an id")?.to_owned();
        let is_idle = |_: u16, why: &Value| why["reason"] == "idle";
        server.until(&format!("/api/v1/tickets/{id}/why"), is_idle).await?;
        anyhow::Ok(id)
    };
    let shown = async |id: &str, reason: &'static str| {
        let has_reason = move |_: u16, why: &Value| why["reason"] == reason;
        server.until(&format!("/api/v1/tickets/{id}/why"), has_reason).await?;
        // What the console has read is shown for a second.
        tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
        page(&server, &format!("/console/tickets/{id}")).await
    };

    let closed = open().await?;
    ensure!(server.post(&format!("/api/v1/tickets/{closed}/close"), &json!({})).await?.0 == 200);
    let found = shown(&closed, "closed").await?;
    let panel = why_of(&found)?;
    ensure!(panel.contains("is closed, and every message in it is processed"), "{panel}");
    ensure!(panel.contains(&format!("headwater ticket reopen {closed}")), "{panel}");
    ensure!(panel.contains(">Reopen ticket</button>"), "{panel}");

    let taken = open().await?;
    let reply = json!({"content": "I look at it.", "author": "agent"});
    let (status, sent) = server.post(&format!("/api/v1/tickets/{taken}/messages"), &reply).await?;
    ensure!(status < 300, "{sent}");
    let found = shown(&taken, "handed_over").await?;
    let panel = why_of(&found)?;
    let action = format!("action=\"/console/do/tickets/{taken}/reopen\"");
    ensure!(panel.contains(&action) && panel.contains(">Return to the desk</button>"), "{panel}");
    submit(&server, &format!("/console/do/tickets/{taken}/reopen"), "").await?;
    ensure!(server.get(&format!("/api/v1/tickets/{taken}")).await?.1["handed_over"] == false);
    Ok(())
}

#[tokio::test]
async fn the_overview_leads_to_what_its_problems_and_numbers_count() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    fixture.fill().await?;
    let server = &fixture.server;
    let slow = "INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, created_at)
        SELECT id, integration_id, 'reply', 'acme/shop#2', 'slow', '{\"body\":\"hello\"}', 'pending', now() + interval '1 day', now() - interval '1 hour'
        FROM issues WHERE external_issue_id = '2' AND external_project_id = 'acme/shop'";
    fixture.database.query(slow)?;
    let shown = page(server, "/console").await?;
    for (code, address, text) in [
        ("quarantined", "/console/issues?quarantined=true", "refused by the bank"),
        ("dead_replies", "/console/outbox", "status 403"),
        ("dead_letters", "/console/failures", "order # has no address"),
        ("outbox_lag", "/console/outbox?status=pending", "acme/shop#2"),
    ] {
        let line = shown.split(&format!("<li data-code=\"{code}\">")).nth(1).context(code)?;
        let line = line.split("</li>").next().context(code)?;
        ensure!(line.contains(&format!("href=\"{address}\"")), "{code}: {line}");
        let listed = page(server, address).await?;
        ensure!(listed.contains(text), "{address} does not show {text:?}: {listed}");
        let is_slow = code == "outbox_lag";
        ensure!(!is_slow || !listed.contains("acme/shop#1"), "no dead ones: {listed}");
    }
    for (path, title) in [
        ("/console/do/issues/release", "Release 3 issues?"),
        ("/console/do/outbox/retry", "Retry 1 reply?"),
    ] {
        ensure!(shown.contains(&format!("action=\"{path}\"")), "{path}: {shown}");
        let asked = submit(server, path, "").await?;
        ensure!(asked.contains(title), "{path}: {asked}");
    }
    for (tile, address) in [
        ("Replies to deliver", "/console/outbox?status=pending"),
        ("Oldest reply waits", "/console/outbox?status=pending"),
        ("Dead replies", "/console/outbox"),
    ] {
        let link = format!("<a href=\"{address}\"><span class=\"label\">{tile}</span>");
        ensure!(shown.contains(&link), "{link}: {shown}");
    }
    Ok(())
}

#[tokio::test]
async fn the_dead_replies_of_one_issue_are_retried() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    fixture.fill().await?;
    let server = &fixture.server;
    let dead = "INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, last_error)
        SELECT id, integration_id, 'reply', 'acme/shop#2', 'second-' || n, '{\"body\":\"hello\"}', 'dead', now(), 'status 404'
        FROM issues, generate_series(1, 60) AS n WHERE external_issue_id = '2' AND external_project_id = 'acme/shop' RETURNING issue_id";
    let rows = fixture.database.query(dead)?;
    let issue = rows.lines().next().context("an issue")?.trim();
    let shown = page(server, &format!("/console/outbox?issue={issue}")).await?;
    let button = format!("name=\"issue\" value=\"{issue}\"");
    ensure!(
        shown.contains(&button) && shown.contains("Retry all dead ones of this issue…"),
        "{shown}"
    );
    let pending = page(server, &format!("/console/outbox?issue={issue}&status=pending")).await?;
    ensure!(!pending.contains("Retry all"), "{pending}");

    let (retry, form) = ("/console/do/outbox/retry", format!("issue={issue}"));
    let asked = submit(server, retry, &form).await?;
    let command = format!("headwater outbox retry --all --issue {issue} --yes");
    ensure!(asked.contains(&command) && !asked.contains("acme/shop#1"), "{asked}");
    // In two calls, because a call takes 50.
    let shown = confirm(server, retry, &form, "Retry 60 replies").await?;
    ensure!(shown.contains("<strong>60</strong> queued for delivery."), "{shown}");
    ensure!(shown.contains(&button), "the filter stays: {shown}");
    let (_, left) = server.get("/api/v1/outbox?status=dead").await?;
    let errors = left["rows"].as_array().context("rows")?.iter().map(|row| &row["error"]);
    ensure!(errors.clone().any(|error| error == "status 403"), "the other issue is left: {left}");
    ensure!(submit(server, retry, "").await?.contains("acme/shop#1"));
    Ok(())
}

#[tokio::test]
async fn an_issue_that_waits_behind_many_that_do_not_is_retried() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let server = &fixture.server;
    // The sweep would take them a day later.
    let queued = "INSERT INTO integrations (name, provider) VALUES ('shop', 'github');
        INSERT INTO issues (integration_id, external_project_id, external_issue_id, processing_status, pending_events,
            first_pending_at, nudged_at, not_before)
        SELECT id, 'acme/shop', n::text, 'queued', 1, now(), now() + interval '1 day',
            CASE WHEN n = 501 THEN now() + interval '1 day' END
        FROM integrations, generate_series(1, 501) AS n WHERE name = 'shop' ORDER BY n";
    fixture.database.query(queued)?;
    let (_, waiting) = server.get("/api/v1/issues?waiting=true&count=true").await?;
    let found = waiting["issues"].as_array().context("issues")?;
    ensure!(found.len() == 1 && waiting["matching"] == 1, "{waiting}");
    ensure!(found[0]["external_issue_id"] == "501", "{waiting}");

    let retry = "/console/do/issues/retry";
    let asked = submit(server, retry, "error=refused").await?;
    ensure!(asked.contains("Nothing matches"), "{asked}");
    let shown = confirm(server, retry, "integration=shop", "Retry 1 issue").await?;
    ensure!(shown.contains("<strong>1</strong> do not wait any longer."), "{shown}");
    Ok(())
}

#[tokio::test]
async fn a_panel_has_the_command_and_the_button_that_resolve_it() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let server = &fixture.server;
    let (_, ticket) = server.get(&format!("/api/v1/tickets/{}", data.ticket)).await?;
    let answered = ticket["issue_id"].as_i64().context("an issue")?;
    let failed = format!(
        "UPDATE issues SET processing_status = 'queued', pending_events = 1, attempts = 2, first_pending_at = now(),
             not_before = now() + interval '1 day', last_error = 'the model does not answer' WHERE id = {answered}"
    );
    fixture.database.query(&failed)?;
    // The pulls of the fixture leave the group when they have been idle for some seconds.
    let is_alone = |_: u16, why: &Value| why["reason"] == "no_member";
    server.until("/api/v1/topics/orders/groups/billing/why", is_alone).await?;
    let (issue, row) = (data.quarantined, data.dead_reply);
    let retry = format!("/console/do/issues/{answered}/retry");
    for (path, parts) in [
        (
            format!("/console/issues/{issue}"),
            [format!("/console/do/issues/{issue}/release"), ">Release</button>".to_owned()],
        ),
        (
            format!("/console/issues/{answered}"),
            [format!("action=\"{retry}\""), ">Retry now</button>".to_owned()],
        ),
        (
            format!("/console/tickets/{}", data.ticket),
            [
                format!("action=\"{retry}?ticket={}\"", data.ticket),
                ">Retry now</button>".to_owned(),
            ],
        ),
        (
            format!("/console/outbox/{row}"),
            [format!("/console/do/outbox/{row}/retry"), ">Retry delivery</button>".to_owned()],
        ),
        (
            "/console/plans/1".to_owned(),
            ["/console/do/plans/1/resume".to_owned(), ">Resume</button>".to_owned()],
        ),
        (
            "/console/topics/orders/groups/billing".to_owned(),
            [
                "<code>headwater consume orders --group billing</code>".to_owned(),
                "Show all partitions".to_owned(),
            ],
        ),
    ] {
        let found = page(server, &path).await?;
        let panel = why_of(&found)?;
        for part in &parts {
            ensure!(panel.contains(part), "{path} lacks {part:?}: {panel}");
        }
    }
    // Retried from the ticket, it leads back to the ticket.
    let shown = submit(server, &format!("{retry}?ticket={}", data.ticket), "").await?;
    ensure!(
        shown.contains("The issue can be claimed now.") && shown.contains("Send reply"),
        "{shown}"
    );
    Ok(())
}

#[tokio::test]
async fn a_reader_sees_what_a_role_is_needed_for() -> Result<()> {
    const TOKENS: &str = r#"
[[token]]
name = "ann"
role = "read"
token = "reader-token-of-ann"
[[token]]
name = "root"
role = "admin"
token = "admin-token-of-root"
"#;
    let dir = ServerDir::new()?.settings(TOKENS)?;
    let mut server = dir.serve(&[])?;
    let client = |token: &str| -> Result<reqwest::Client> {
        let bearer = format!("Bearer {token}").parse()?;
        let headers = HeaderMap::from_iter([(AUTHORIZATION, bearer)]);
        Ok(reqwest::Client::builder().default_headers(headers).build()?)
    };
    server.client = client("admin-token-of-root")?;
    dead_letters(&server, "orders", 1, &["no address"]).await?;
    let (_, sent) = server.get("/api/v1/topics/orders/messages").await?;
    let message = sent["messages"][0]["id"].as_str().context("a message")?;
    server.client = client("reader-token-of-ann")?;
    let shown = page(&server, "/console/topics/orders/dead-letters").await?;
    for (label, role) in [
        ("Plan the replay of all that match…", "write"),
        ("Replay all that match…", "write"),
        ("Purge selected…", "admin"),
        ("Purge all that match…", "admin"),
    ] {
        let expected = format!(
            "disabled>{label}</button><span class=\"quiet\"> needs the role <code>{role}</code>"
        );
        ensure!(shown.contains(&expected), "{label}: {shown}");
    }
    let found = page(&server, &format!("/console/topics/orders/messages/{message}")).await?;
    let panel = why_of(&found)?;
    ensure!(panel.contains("disabled>Replay…</button>"), "{panel}");
    Ok(())
}
