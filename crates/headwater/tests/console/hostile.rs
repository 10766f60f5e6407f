//! Text of users that is HTML, script, very long, right-to-left or full of control characters, wherever it is shown.

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::{Value, json};

use crate::fixture::{ConsoleFixture, Reader};

const SCRIPT: &str = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2><!--/live:tickets--><svg onload=window.hacked=3>";
const MIRRORED: &str = "abc\u{202e}txt.exe\u{2066}שלום";

#[tokio::test]
async fn hostile_text_is_shown_as_text_on_every_screen() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let server = &fixture.server;
    let long = "long text ".repeat(100_000);
    let new = json!({"title": SCRIPT, "content": format!("{SCRIPT}\n{MIRRORED}\u{1b}[31m"), "user_id": MIRRORED});
    let (status, ticket) = server.post("/api/v1/tickets", &new).await?;
    ensure!(status == 201, "{ticket}");
    let id = ticket["ticket_id"].as_str().context("an id")?.to_owned();
    let issue = ticket["issue_id"].as_i64().context("an id")?;
    let (status, large) =
        server.post("/api/v1/tickets", &json!({"title": "large", "content": long})).await?;
    let large = match status {
        201 => large["ticket_id"].as_str().map(str::to_owned),
        // A limit of the desk; the queue has none below a megabyte.
        _ => None,
    };

    ensure!(
        server.post("/api/v1/topics", &json!({"name": "orders", "partitions": 1})).await?.0 == 201
    );
    let messages: Vec<Value> = [SCRIPT, MIRRORED, "nul \0 bell \u{7}", &long]
        .iter()
        .map(|text| json!({"key": text.chars().take(40).collect::<String>(), "payload": text, "headers": {"x": text.chars().take(100).collect::<String>()}}))
        .collect();
    let (status, sent) =
        server.post("/api/v1/topics/orders/messages", &json!({"messages": messages})).await?;
    ensure!(status == 201, "{sent}");
    let entries: Vec<&str> = sent["messages"]
        .as_array()
        .context("messages")?
        .iter()
        .filter_map(|one| one["id"].as_str())
        .collect();
    ensure!(entries.len() == 4, "{sent}");
    let wanted = json!({"max": 2, "wait_ms": 5000, "lease_ms": 60000});
    let (_, pulled) = server.post("/api/v1/topics/orders/groups/g/pull", &wanted).await?;
    let settlement = |message: &Value| json!({"lease": message["lease"], "outcome": "dead_letter", "reason": SCRIPT});
    let settlements: Vec<Value> =
        pulled["messages"].as_array().context("messages")?.iter().map(settlement).collect();
    ensure!(
        server
            .post("/api/v1/topics/orders/groups/g/settle", &json!({"settlements": settlements}))
            .await?
            .0
            == 200
    );
    let letters =
        |_: u16, page: &Value| page["dead_letters"].as_array().is_some_and(|all| !all.is_empty());
    server.until("/api/v1/topics/orders/dead-letters", letters).await?;

    // Names and errors that come from other systems, wherever they are stored.
    let quoted = SCRIPT.replace('\'', "''");
    let stored = format!(
        "INSERT INTO integrations (name, provider) VALUES ('{quoted}', 'github');
         INSERT INTO issues (integration_id, external_project_id, external_issue_id, quarantined_at, last_error, claim_owner)
         SELECT id, '{quoted}', '{MIRRORED}', now(), '{quoted}' || E'\\x01\\x1b[31m', '{quoted}' FROM integrations WHERE provider = 'github';
         INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, last_error)
         SELECT id, integration_id, 'reply', '{quoted}', 'dead-' || id, '{{\"body\":\"<script>window.hacked=6</script>\"}}', 'dead', now(), '{quoted}'
         FROM issues WHERE external_issue_id = '{MIRRORED}';
         INSERT INTO issue_runs (issue_id, epoch, worker, claimed_at, ended_at, result, error, events)
         SELECT id, 1, '{quoted}', now(), now(), 'failed', '{quoted}', 0 FROM issues WHERE external_issue_id = '{MIRRORED}';
         INSERT INTO replay_plans (state, active, selection, progress, created_by, created_at, changed_at)
         SELECT 'paused', 1, '{{\"topics\": [{{\"topic\": \"orders\", \"to\": \"9-0\"}}], \"max_replays\": 3}}',
             '{{\"total\": 4, \"step\": 1, \"step_size\": 4}}', '{quoted}', extract(epoch FROM now())::bigint * 1000, extract(epoch FROM now())::bigint * 1000;
         INSERT INTO metrics_history (minute, process, data)
         SELECT extract(epoch FROM now())::bigint / 60 - n, '{quoted}', '{{\"n\": 6, \"events\": 1, \"version\": \"<img src=x onerror=window.hacked=7>\", \"started\": '
             || (extract(epoch FROM now())::bigint - 1200) * 1000 || '}}' FROM generate_series(2, 9) AS n"
    );
    fixture.database.query(&stored)?;
    let (_, found) = server.get("/api/v1/issues?quarantined=true").await?;
    let quarantined = found["issues"][0]["id"].as_i64().context("an issue")?;
    let (_, found) = server.get("/api/v1/outbox/dead").await?;
    let row = found["rows"][0]["id"].as_i64().context("a row")?;
    let session = json!({"stream": format!("cam {}", &MIRRORED[..3]), "info": {"text": SCRIPT}});
    server.post("/api/v1/assignments/cameras/streams", &session).await?;
    let (_, failures) = server.get("/api/v1/failures").await?;
    let causes = failures["clusters"].as_array().context("causes")?.iter();
    let causes: Vec<String> =
        causes.filter_map(|one| one["id"].as_str().map(str::to_owned)).collect();
    ensure!(causes.len() >= 3, "{failures}");

    let reader = Reader::start(server, BrowserScripts::On).await?;
    let mut paths = vec![
        format!("/console/issues/{quarantined}"),
        "/console/issues?error=%3Cscript%3E".to_owned(),
        "/console/outbox".to_owned(),
        "/console/outbox?status=any".to_owned(),
        format!("/console/outbox/{row}"),
        "/console/plans".to_owned(),
        "/console/plans/1".to_owned(),
        "/console/topics".to_owned(),
        "/console/topics/orders".to_owned(),
        "/console/topics/orders/groups/g".to_owned(),
        "/console/assignment".to_owned(),
        "/console/assignment?topic=%3Cscript%3E".to_owned(),
        "/console/assignment/cameras".to_owned(),
        "/console/tail?topic=orders&topic=%3Cimg%20src%3Dx%3E".to_owned(),
        "/console/sessions".to_owned(),
        "/console/processes".to_owned(),
        "/console/drafts".to_owned(),
        "/console/webhooks".to_owned(),
        "/console/settings".to_owned(),
        "/console/reports".to_owned(),
        "/console/sql?sql=%3Cscript%3Ewindow.hacked%3D8%3C%2Fscript%3E".to_owned(),
        "/console/search?q=customer%00nul".to_owned(),
        "/console/topics/orders/messages?text=%3Cscript%3E&key=%00".to_owned(),
        "/console/tickets".to_owned(),
        format!("/console/tickets/{id}"),
        "/console/issues".to_owned(),
        format!("/console/issues/{issue}"),
        "/console/topics/orders/messages".to_owned(),
        "/console/topics/orders/dead-letters".to_owned(),
        "/console/failures".to_owned(),
        "/console/audit".to_owned(),
        "/console/search?q=%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E".to_owned(),
        "/console/tickets?user_id=%22%3E%3Cscript%3Ewindow.hacked%3D4%3C%2Fscript%3E".to_owned(),
        "/console/tickets?status=%3Cscript%3E".to_owned(),
        "/console/%3Cscript%3Ewindow.hacked=5%3C%2Fscript%3E".to_owned(),
        "/console/topics/%3Cimg%20src%3Dx%3E".to_owned(),
    ];
    paths.extend(causes.iter().map(|cause| format!("/console/failures/{cause}")));
    paths.extend(entries.iter().map(|entry| format!("/console/topics/orders/messages/{entry}")));
    paths.extend(large.map(|large| format!("/console/tickets/{large}")));
    for path in &paths {
        reader.open(path).await?;
        let source = reader.driver().source().await?;
        ensure!(source.len() < 600_000, "{path} has {} bytes", source.len());
        let found = reader.driver().execute(
            "return {hacked: window.hacked ?? null, images: document.querySelectorAll('main img, main svg:not(.sparkline), main script').length,
                wide: document.documentElement.scrollWidth > document.documentElement.clientWidth}",
        ).await?;
        ensure!(found == json!({"hacked": null, "images": 0, "wide": false}), "{path}: {found}");
    }
    let message = reader.open(&format!("/console/topics/orders/messages/{}", entries[2])).await?;
    ensure!(message.contains("nul \u{2400} bell \u{2407}"), "{message}");
    let shown = reader.open(&format!("/console/tickets/{id}")).await?;
    ensure!(shown.contains("<script>window.hacked=1</script>"), "{shown}");
    reader.must_be_accessible("a hostile ticket").await?;
    reader.must_be_clean(&["status of 404", "status of 400"]).await?;
    reader.browser.quit().await
}
