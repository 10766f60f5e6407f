//! Text of users that is HTML, script, very long, right-to-left or full of control characters, wherever it is shown.

use anyhow::{Context, Result, ensure};
use headwater_queue::{ConsumerConfig, Message, Outcome, Queue, QueueConfig, Subscription};
use headwater_testkit::BrowserScripts;
use serde_json::{Value, json};

use crate::fixture::{ConsoleFixture, Reader, all_failures};
use crate::support::desk::{all_idle, answered};
use crate::support::hostile_text::encoded;
use crate::support::sender::github_signature;
use crate::support::{Server, answer};

const SCRIPT: &str = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2><!--/live:tickets--><svg onload=window.hacked=3>";
/// How [`SCRIPT`] begins where it is shown.
const SHOWN: &str = "<script>window.hacked=1</script>";
const MIRRORED: &str = "abc\u{202e}txt.exe\u{2066}שלום";

/// Names that are allowed: of a topic, of a group, and of processes, streams and sessions, which have no spaces.
const TOPIC: &str = "<script>window.hacked=10</script>&'\" %2F\u{202e}";
const GROUP: &str = "<img src=x onerror=window.hacked=11>\u{202e}&%";
const NAME: &str = "<img/src=x/onerror=window.hacked=12>";

/// Maximum bytes of the text and of the title of a ticket.
const CONTENT_BYTES_MAX: usize = 64 * 1024;
const TITLE_BYTES_MAX: usize = 500;

/// Maximum bytes of a page, and of one that has a form with a payload of a megabyte.
const PAGE_BYTES_MAX: usize = 600_000;
const EDITED_BYTES_MAX: usize = 1_200_000;

/// What a script finds in the page that is open.
const FOUND: &str = "return {hacked: window.hacked ?? null,
    images: document.querySelectorAll('main img:not(.chart), main svg:not(.sparkline, .time-chart > svg, .legend > li > svg), main script').length,
    wide: document.documentElement.scrollWidth > document.documentElement.clientWidth}";

/// A page, and text of users that it shows; empty if the text is nowhere in it, or cut.
type HostilePage = (String, &'static str);

/// Text of a megabyte.
fn long() -> String {
    "long text ".repeat(100_000)
}

/// The page that is open shows text as text, and is not longer than this.
async fn must_be_text(reader: &Reader, path: &str, bytes_max: usize) -> Result<()> {
    let source = reader.driver().source().await?;
    ensure!(source.len() < bytes_max, "{path} has {} bytes", source.len());
    let found = reader.driver().execute(FOUND).await?;
    ensure!(found == json!({"hacked": null, "images": 0, "wide": false}), "{path}: {found}");
    Ok(())
}

async fn post(server: &Server, path: &str, body: &Value) -> Result<Value> {
    let (status, answer) = server.post(&format!("/api/v1{path}"), body).await?;
    ensure!((200..300).contains(&status), "{path}: {status} {answer}");
    Ok(answer)
}

/// A ticket whose answer is there, and its issue.
async fn answered_ticket(server: &Server) -> Result<(String, i64)> {
    let new = json!({"title": SCRIPT, "content": format!("{SCRIPT}\n{MIRRORED}\u{1b}[31m"), "user_id": MIRRORED});
    let ticket = post(server, "/tickets", &new).await?;
    let id = ticket["ticket_id"].as_str().context("an id")?.to_owned();
    answered(server, &id, 1).await?;
    Ok((id, ticket["issue_id"].as_i64().context("an id")?))
}

/// The ticket with the longest title and text. Longer ones are refused.
async fn largest_ticket(server: &Server) -> Result<String> {
    let new = |title: usize, content: usize| json!({"title": "x".repeat(title), "content": "x".repeat(content)});
    for (title, content, expected) in [
        (1, CONTENT_BYTES_MAX + 1, "`content` must have 1 to 65536 bytes"),
        (1, 1_000_000, "`content` must have 1 to 65536 bytes"),
        (TITLE_BYTES_MAX + 1, 1, "`title` must have 1 to 500 bytes"),
    ] {
        let (status, refused) = server.post("/api/v1/tickets", &new(title, content)).await?;
        let message = refused["error"]["message"].as_str().unwrap_or_default();
        ensure!(
            status == 400 && message.contains(expected),
            "{title}, {content}: {status} {refused}"
        );
    }
    let large = post(server, "/tickets", &new(TITLE_BYTES_MAX, CONTENT_BYTES_MAX)).await?;
    Ok(large["ticket_id"].as_str().context("an id")?.to_owned())
}

/// Messages of `orders`, of which all become dead letters; returns the ids of the messages.
async fn messages_and_letters(server: &Server) -> Result<Vec<String>> {
    post(server, "/topics", &json!({"name": "orders", "partitions": 1})).await?;
    let long = long();
    let message = |text: &str| {
        let start = |count: usize| text.chars().take(count).collect::<String>();
        json!({"key": start(40), "payload": text, "headers": {"x": start(100)}})
    };
    let texts = [SCRIPT, MIRRORED, "nul \0 bell \u{7}", &long];
    let messages = json!({"messages": texts.map(message)});
    let sent = post(server, "/topics/orders/messages", &messages).await?;
    let sent = sent["messages"].as_array().context("messages")?.iter();
    let entries: Vec<String> =
        sent.filter_map(|one| one["id"].as_str().map(str::to_owned)).collect();
    ensure!(entries.len() == texts.len(), "{entries:?}");
    let (mut dead, group) = (0, "/topics/orders/groups/g");
    while dead < texts.len() {
        let wanted = json!({"max": 10, "wait_ms": 5000, "lease_ms": 60000});
        let pulled = post(server, &format!("{group}/pull"), &wanted).await?;
        let letter = |message: &Value| json!({"lease": message["lease"], "outcome": "dead_letter", "reason": SCRIPT});
        let settlements: Vec<Value> =
            pulled["messages"].as_array().context("messages")?.iter().map(letter).collect();
        dead += settlements.len();
        post(server, &format!("{group}/settle"), &json!({"settlements": settlements})).await?;
    }
    Ok(entries)
}

/// A topic, a group and a consumer with hostile names, and a delayed message. Names with control characters are refused.
async fn named_by_users(fixture: &ConsoleFixture) -> Result<Subscription> {
    let server = &fixture.server;
    let refused = json!({"name": "nul \0", "partitions": 1});
    let (status, refused) = server.post("/api/v1/topics", &refused).await?;
    let message = refused["error"]["message"].as_str().unwrap_or_default();
    ensure!(status == 400 && message.contains("control characters"), "{status} {refused}");
    post(server, "/topics", &json!({"name": TOPIC, "partitions": 2})).await?;
    let topic = format!("/topics/{}", encoded(TOPIC));
    let later =
        json!({"key": SCRIPT, "payload": SCRIPT, "headers": {"x": SCRIPT}, "delay_ms": 3_600_000});
    let now = json!({"key": MIRRORED, "payload": SCRIPT});
    post(server, &format!("{topic}/messages"), &json!({"messages": [later, now]})).await?;

    let streams = headwater_stream::connect(&fixture.redis.url(), &Default::default()).await?;
    let config = QueueConfig { name: Some(NAME.to_owned()), ..QueueConfig::default() };
    let queue = Queue::with_config(streams, config)?;
    let handler = |_: Message| async { Outcome::Done };
    let subscription = queue.subscribe(TOPIC, GROUP, handler, ConsumerConfig::default()).await?;
    let group = format!("/api/v1{topic}/groups/{}", encoded(GROUP));
    let is_owner = |_: u16, group: &Value| {
        group["members"][0].is_object() && group["partitions"][0]["owner"].is_object()
    };
    server.until(&group, is_owner).await?;
    for stream in [format!("cam {}", &MIRRORED[..3]), NAME.to_owned()] {
        let stream = json!({"stream": stream, "info": {"text": SCRIPT}});
        post(server, "/assignments/cameras/streams", &stream).await?;
    }
    Ok(subscription)
}

/// Webhooks whose reason contains text of the sender.
async fn webhooks(server: &Server) -> Result<()> {
    let body = json!({"action": SCRIPT}).to_string();
    for (integration, status) in [("code", 200), (SCRIPT, 404)] {
        let path = server.url(&format!("/webhooks/github/{}", encoded(integration)));
        let request = server.client.post(path).header("content-type", "application/json");
        let request = request.header("x-github-event", "issues").header("x-github-delivery", "1");
        let request = request.header("x-hub-signature-256", github_signature(body.as_bytes()));
        let (found, answer) = answer(request.body(body.clone()).send().await?).await?;
        ensure!(found == status, "{integration}: {found} {answer}");
    }
    Ok(())
}

/// Rows that come from other systems, models and people, in every table whose text is shown.
fn stored(ticket: &str, issue: i64) -> String {
    let now = "extract(epoch FROM now())::bigint * 1000";
    let long = "repeat('long text ', 100000)";
    let calls = json!([{"tool": SCRIPT, "arguments": {SCRIPT: MIRRORED}, "request": 1}]);
    format!(
        "INSERT INTO integrations (name, provider) VALUES ('{SCRIPT}', 'github');
         INSERT INTO issues (integration_id, external_project_id, external_issue_id, quarantined_at, last_error, claim_owner)
         SELECT id, '{SCRIPT}', '{MIRRORED}', now(), '{SCRIPT}' || E'\\x01\\x1b[31m', '{SCRIPT}' FROM integrations WHERE name = '{SCRIPT}';
         INSERT INTO event_logs (issue_id, integration_id, source, event_type, dedup_key, digest, payload, payload_bytes, processed_at, processing_error)
         SELECT id, integration_id, '{SCRIPT}', '{SCRIPT}', '{SCRIPT}' || n, '',
             jsonb_build_object('{SCRIPT}', CASE n WHEN 1 THEN {long} ELSE '{MIRRORED}' END), 1000000, now(), '{SCRIPT}'
         FROM issues, generate_series(1, 2) AS n WHERE external_issue_id = '{MIRRORED}';
         INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, last_error)
         SELECT id, integration_id, 'reply', '{SCRIPT}', 'dead-' || n,
             jsonb_build_object('{SCRIPT}', CASE n WHEN 1 THEN {long} ELSE '{SCRIPT}' END), 'dead', now(), '{SCRIPT}'
         FROM issues, generate_series(1, 2) AS n WHERE external_issue_id = '{MIRRORED}';
         INSERT INTO issue_runs (issue_id, epoch, worker, claimed_at, ended_at, result, error, events)
         SELECT id, 1, '{SCRIPT}', now(), now(), 'failed', '{SCRIPT}', 0 FROM issues WHERE external_issue_id = '{MIRRORED}';
         INSERT INTO model_runs (id, at, issue_id, integration, model, result, calls, tokens_in, tokens_out, epoch)
         SELECT 'hostile', {now}, id, '{SCRIPT}', '{SCRIPT}', 'done', 1, 5, 5, 1 FROM issues WHERE external_issue_id = '{MIRRORED}';
         INSERT INTO replay_plans (state, active, selection, progress, created_by, created_at, changed_at)
         SELECT 'paused', 1, '{{\"topics\": [{{\"topic\": \"orders\", \"to\": \"9-0\"}}], \"max_replays\": 3}}',
             '{{\"total\": 4, \"step\": 1, \"step_size\": 4}}', '{SCRIPT}', {now}, {now};
         INSERT INTO metrics_history (minute, process, data)
         SELECT extract(epoch FROM now())::bigint / 60 - n, '{SCRIPT}', '{{\"n\": 6, \"events\": 1, \"version\": \"<img src=x onerror=window.hacked=7>\", \"started\": '
             || (extract(epoch FROM now())::bigint - 1200) * 1000 || '}}' FROM generate_series(2, 9) AS n;
         INSERT INTO drafts (draft_id, issue_id, integration, status, content, edited, posted, effects, chosen_by, up_to, calls,
             created_at, decided_at, decided_by, decision_reason)
         SELECT gen_random_uuid()::text, {issue}, '{SCRIPT}', status, '{SCRIPT}' || n, CASE n WHEN 1 THEN '{MIRRORED}' END,
             CASE status WHEN 'approved' THEN '{SCRIPT}' END, '[]', '{SCRIPT}', 1000000000, CASE n WHEN 2 THEN '{calls}' END,
             {now}, {now}, '{SCRIPT}', '{SCRIPT}'
         FROM unnest(ARRAY['pending', 'approved', 'rejected', 'outdated', 'note']) AS status, generate_series(1, 2) AS n;
         UPDATE tickets SET handed_over = true, handed_over_at = {now}, hand_over_reason = '{SCRIPT}', assignee = '{SCRIPT}'
         WHERE ticket_id = '{ticket}'"
    )
}

/// The session of an issue, and another one that has only its first step. Returns their pages.
async fn sessions(server: &Server, issue: i64) -> Result<Vec<HostilePage>> {
    let (_, page) = server.get(&format!("/api/v1/sessions?issue={issue}")).await?;
    let session = page["sessions"][0]["session"].as_str().context("a session")?;
    let (_, page) = server.get(&format!("/api/v1/sessions/{session}/events")).await?;
    let events = page["events"].as_array().context("events")?;
    let first = events.first().and_then(|event| event["id"].as_str()).context("a step")?;
    let last = events.last().and_then(|event| event["id"].as_str()).context("a step")?;
    let fork = json!({"session": NAME, "until": first});
    post(server, &format!("/sessions/{session}/fork"), &fork).await?;
    let base = format!("/console/sessions/{session}");
    Ok(vec![
        ("/console/sessions".to_owned(), NAME),
        (base.clone(), ""),
        // In the prompt the brackets are escaped.
        (format!("{base}/steps/{first}"), ""),
        (format!("{base}/steps/{last}"), SHOWN),
        (format!("{base}/compare?with={}", encoded(NAME)), NAME),
        (format!("/console/sessions/{}", encoded(NAME)), NAME),
    ])
}

/// Pages whose address does not depend on what was stored.
fn fixed_pages() -> Vec<HostilePage> {
    let (topic, group) = (encoded(TOPIC), encoded(GROUP));
    let query = encoded(
        "SELECT '<script>window.hacked=8</script>' AS \"<img src=x onerror=window.hacked=9>\"",
    );
    let result = if cfg!(feature = "analytics") { "<script>window.hacked=8</script>" } else { "" };
    let pages = [
        ("/console", ""),
        ("/console?range=15m", ""),
        ("/console/issues?error=%3Cscript%3E", SHOWN),
        ("/console/issues?quarantined=true", SHOWN),
        ("/console/outbox", SHOWN),
        ("/console/outbox?status=any", SHOWN),
        ("/console/plans", ""),
        ("/console/plans/1", SHOWN),
        ("/console/topics", "<script>window.hacked=10</script>"),
        ("/console/topics/orders", ""),
        ("/console/topics/orders/groups/g", ""),
        ("/console/assignment", "<img src=x onerror=window.hacked=11>"),
        ("/console/assignment?topic=%3Cscript%3E", ""),
        ("/console/assignment/cameras", NAME),
        ("/console/tail?topic=orders&topic=%3Cimg%20src%3Dx%3E", SHOWN),
        ("/console/processes", ""),
        ("/console/drafts", SHOWN),
        ("/console/drafts?status=approved", SHOWN),
        ("/console/drafts?status=rejected", SHOWN),
        ("/console/drafts?status=outdated", SHOWN),
        ("/console/drafts?status=note", SHOWN),
        ("/console/drafts?status=%3Cscript%3E", ""),
        ("/console/webhooks", SHOWN),
        ("/console/settings", ""),
        ("/console/reports", ""),
        ("/console/reports/tokens-and-cost", SHOWN),
        ("/console/sql?query=%3Cscript%3Ewindow.hacked%3D8%3C%2Fscript%3E", ""),
        ("/console/search?q=customer%00nul", ""),
        ("/console/topics/orders/messages?text=%3Cscript%3E&key=%00", ""),
        ("/console/tickets", SHOWN),
        ("/console/tickets?status=handed_over", SHOWN),
        ("/console/issues", SHOWN),
        ("/console/topics/orders/messages", SHOWN),
        ("/console/topics/orders/dead-letters", SHOWN),
        ("/console/failures", "<script>"),
        ("/console/audit", ""),
        ("/console/search?q=%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E", ""),
        ("/console/tickets?user_id=%22%3E%3Cscript%3Ewindow.hacked%3D4%3C%2Fscript%3E", ""),
        ("/console/tickets?status=%3Cscript%3E", ""),
        ("/console/%3Cscript%3Ewindow.hacked=5%3C%2Fscript%3E", ""),
        ("/console/topics/%3Cimg%20src%3Dx%3E", ""),
    ];
    let mut pages: Vec<HostilePage> =
        pages.iter().map(|(path, shown)| ((*path).to_owned(), *shown)).collect();
    pages.extend([
        (format!("/console/sql?query={query}"), result),
        (format!("/console/topics/{topic}"), SHOWN),
        (format!("/console/topics/{topic}/messages"), SHOWN),
        (format!("/console/topics/{topic}/dead-letters"), ""),
        (format!("/console/topics/{topic}/groups/{group}"), NAME),
        (format!("/console/assignment?topic={topic}"), "<script>window.hacked=10</script>"),
        (format!("/console/tail?topic={topic}"), SHOWN),
    ]);
    pages
}

/// Pages before a change, each with examples of what it touches. At the end, the hostile group and topic are deleted.
async fn confirmations(reader: &Reader, letters: &str, subscription: Subscription) -> Result<()> {
    let (topic, group) = (encoded(TOPIC), encoded(GROUP));
    let topic = format!("/console/topics/{topic}");
    let group = format!("{topic}/groups/{group}");
    subscription.stop().await;
    for (path, button, shown, typed) in [
        ("/console/topics/orders/dead-letters", "Purge all that match…", SHOWN, ""),
        ("/console/issues?quarantined=true", "Release all that match…", SHOWN, ""),
        ("/console/outbox", "Retry all…", SHOWN, ""),
        (letters, "Replay plan…", "<script>", ""),
        (&group, "Delete group…", "<img src=x onerror=window.hacked=11>", GROUP),
        (&topic, "Delete topic…", "<script>window.hacked=10</script>", TOPIC),
    ] {
        reader.open(path).await?;
        reader.click(button).await?;
        // The page before it may show the same text.
        let is_asked = "return location.pathname.startsWith('/console/do/') && document.readyState === 'complete'";
        reader.until(is_asked).await?;
        reader.until_shown(shown).await?;
        must_be_text(reader, button, PAGE_BYTES_MAX).await?;
        if !typed.is_empty() {
            reader.must_be_accessible(button).await?;
            reader.fill("typed", typed).await?;
            reader.confirm().await?;
            reader.until_shown("Deleted.").await?;
        }
    }
    Ok(())
}

/// The files of reports: text of users is neither markup in a chart nor a formula in a table.
async fn report_files(server: &Server) -> Result<()> {
    let file = async |report: &str, name: &str| {
        let path = server.url(&format!("/console/reports/{report}/{name}"));
        let response = server.client.get(path).send().await?;
        ensure!(response.status() == 200, "{report}/{name}: {response:?}");
        anyhow::Ok(response.text().await?)
    };
    let rows = file("tokens-and-cost", "data.csv").await?;
    ensure!(rows.contains(SHOWN), "{rows}");
    if !cfg!(feature = "analytics") {
        return Ok(());
    }
    // The reasons of dead letters are the labels of this chart.
    let has_rows = |_: u16, report: &Value| report["rows"][0].is_array();
    server.until("/api/v1/reports/dead-letters", has_rows).await?;
    let chart = file("dead-letters", "chart.svg").await?;
    ensure!(chart.contains("&lt;script&gt;") && !chart.contains("<script"), "{chart}");
    ensure!(file("dead-letters", "data.csv").await?.contains(SHOWN));
    Ok(())
}

// The consumer goes on while a call blocks.
#[tokio::test(flavor = "multi_thread")]
async fn hostile_text_is_shown_as_text_on_every_screen() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let server = &fixture.server;
    let (ticket, issue) = answered_ticket(server).await?;
    let large = largest_ticket(server).await?;
    let entries = messages_and_letters(server).await?;
    let subscription = named_by_users(&fixture).await?;
    webhooks(server).await?;
    all_idle(server).await?;
    fixture.database.query(&stored(&ticket, issue))?;
    if cfg!(feature = "analytics") {
        server.until("/api/v1/sql?query=SELECT%201", |status, _| status == 200).await?;
    }

    let ids = async |path: &str, list: &str| -> Result<Vec<String>> {
        let (_, page) = server.get(&format!("/api/v1{path}")).await?;
        let all = page[list].as_array().with_context(|| format!("{path}: {page}"))?.iter();
        let id =
            |one: &Value| one["id"].as_str().map_or_else(|| one["id"].to_string(), str::to_owned);
        Ok(all.map(id).collect())
    };
    let quarantined = &ids("/issues?quarantined=true", "issues").await?[0];
    let rows = ids("/outbox/dead", "rows").await?;
    let letters = ids("/topics/orders/dead-letters", "dead_letters").await?;
    all_failures(server).await?;
    let causes = ids("/failures", "clusters").await?;
    ensure!(
        (rows.len(), letters.len()) == (2, 4) && causes.len() >= 3,
        "{rows:?} {letters:?} {causes:?}"
    );

    let mut pages = fixed_pages();
    pages.extend(sessions(server, issue).await?);
    pages.extend([
        (format!("/console/issues/{quarantined}"), SHOWN),
        (format!("/console/issues/{issue}"), ""),
        (format!("/console/tickets/{ticket}"), SHOWN),
        (format!("/console/tickets/{large}"), "x"),
    ]);
    pages.extend(rows.iter().map(|row| (format!("/console/outbox/{row}"), "")));
    pages.extend(causes.iter().map(|cause| (format!("/console/failures/{cause}"), "<script>")));
    let message = |entry: &String| format!("/console/topics/orders/messages/{entry}");
    pages.extend(entries.iter().map(|entry| (message(entry), "")));

    let reader = Reader::start(server, BrowserScripts::On).await?;
    for (path, shown) in &pages {
        let text = reader.open(path).await?;
        ensure!(text.contains(shown), "{path} does not show {shown:?}:\n{text}");
        must_be_text(&reader, path, PAGE_BYTES_MAX).await?;
    }
    let (mut largest, mut refused) = (0, 0);
    for letter in &letters {
        let path = format!("/console/topics/orders/dead-letters/{letter}");
        let text = reader.open(&path).await?;
        ensure!(text.contains(SHOWN), "{path}: {text}");
        // The form to edit it has the whole payload, unless a form would change it.
        must_be_text(&reader, &path, EDITED_BYTES_MAX).await?;
        if text.contains("The payload has NUL characters") {
            refused += 1;
            continue;
        }
        let payload = reader.find("#payload").await?.value().await?;
        let is_cut = text.contains("The first 20,000 characters of 976.6 KiB");
        ensure!(is_cut == (payload == long()), "{path}: {} bytes: {text}", payload.len());
        largest = largest.max(payload.len());
    }
    ensure!(largest == long().len(), "{largest} bytes are the largest payload");
    ensure!(refused == 1, "{refused} payloads cannot be edited");

    let shown = reader.open(&message(&entries[2])).await?;
    ensure!(shown.contains("nul \u{2400} bell \u{2407}"), "{shown}");
    for path in [format!("/console/tickets/{ticket}"), "/console/drafts".to_owned()] {
        reader.open(&path).await?;
        reader.must_be_accessible(&path).await?;
    }
    let failures = all_failures(server).await?;
    let mut clusters = failures["clusters"].as_array().context("causes")?.iter();
    let cause = clusters.find(|one| one["kind"] == "dead_letter").context("a cause")?;
    let cause = format!("/console/failures/{}", cause["id"].as_str().context("an id")?);
    confirmations(&reader, &cause, subscription).await?;
    report_files(server).await?;
    reader.must_be_clean(&["status of 404", "status of 400"]).await?;
    reader.browser.quit().await
}
