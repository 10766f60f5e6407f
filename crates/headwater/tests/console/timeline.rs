//! How an answer came about: the timeline of an issue over HTTP, on the command line and on the screens of its issue and ticket.

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::{Value, json};

use crate::fixture::{ConsoleFixture, Reader};
use crate::support::{ServerDir, text};

#[tokio::test]
async fn a_run_is_shown_from_its_event_to_its_delivery() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--issue-quiet", "0s", "--issue-max-wait", "0s"])?;
    let new = json!({"title": "Router blinks red", "content": "Since yesterday."});
    let (status, ticket) = server.post("/api/v1/tickets", &new).await?;
    ensure!(status == 201, "{ticket}");
    let issue = ticket["issue_id"].as_i64().context("an issue")?;
    let path = format!("/api/v1/issues/{issue}/timeline");
    // The tokens are stored after the end of the run, and the reply is delivered after it.
    let is_whole = |_: u16, timeline: &Value| {
        let run = &timeline["runs"][0];
        let delivered = |row: &Value| row["status"] == "delivered";
        run["models"][0]["tokens_in"].as_i64() > Some(0)
            && run["outbox"]
                .as_array()
                .is_some_and(|rows| !rows.is_empty() && rows.iter().all(delivered))
    };
    let timeline = server.until(&path, is_whole).await?;
    let run = &timeline["runs"][0];
    ensure!(timeline["running"].is_null() && timeline["next_cursor"].is_null(), "{timeline}");
    ensure!(run["epoch"] == 1 && run["result"] == "done" && run["processed_events"] == 1, "{run}");
    ensure!(run["events"][0]["created_at"].is_string() && run["wait_ms"].is_u64(), "{run}");
    ensure!(
        run["error"].is_null() && run["worker"] != "" && run["models"][0]["prompt_version"] == 0,
        "{run}"
    );
    let session = run["models"][0]["session"].as_str().context("a session")?;
    ensure!(session.starts_with(&format!("issue-{issue}-run-1-")), "{session}");
    server.until(&format!("/api/v1/sessions/{session}"), |status, _| status == 200).await?;

    // Pages follow the number of the run.
    for n in 2..=3 {
        let more = json!({"content": format!("Message {n}.")});
        let messages =
            format!("/api/v1/tickets/{}/messages", ticket["ticket_id"].as_str().context("an id")?);
        ensure!(server.post(&messages, &more).await?.0 < 300);
        server.until(&path, |_, timeline| timeline["runs"][0]["epoch"] == n).await?;
    }
    let (_, first) = server.get(&format!("{path}?limit=2")).await?;
    let epochs = |page: &Value| -> Vec<i64> {
        page["runs"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|run| run["epoch"].as_i64())
            .collect()
    };
    ensure!(epochs(&first) == [3, 2] && first["next_cursor"] == 2, "{first}");
    let (_, second) = server.get(&format!("{path}?limit=2&cursor=2")).await?;
    ensure!(epochs(&second) == [1] && second["next_cursor"].is_null(), "{second}");
    for wrong in ["?limit=0", "?limit=101", "?cursor=x", "?unknown=1"] {
        ensure!(server.get(&format!("{path}{wrong}")).await?.0 == 400, "{wrong}");
    }
    ensure!(server.get("/api/v1/issues/987654/timeline").await?.0 == 404);

    let url = server.url("");
    let listed = dir.run(&["issue", "timeline", &issue.to_string(), "--url", &url])?;
    let listed = text(&listed.stdout);
    ensure!(
        listed.lines().count() == 4 && listed.contains("done") && listed.contains(session),
        "{listed}"
    );

    let newest = server.until(&path, is_whole).await?;
    let steps = newest["runs"][0]["models"][0]["session"].as_str().context("a session")?;
    server.until(&format!("/api/v1/sessions/{steps}"), |status, _| status == 200).await?;
    // Without scripts, on both screens.
    let reader = Reader::start(&server, BrowserScripts::Off).await?;
    for screen in [
        format!("/console/issues/{issue}"),
        format!("/console/tickets/{}", ticket["ticket_id"].as_str().context("an id")?),
    ] {
        reader.open(&screen).await?;
        reader.find("details[data-key=run-1] summary").await?.click().await?;
        let shown = reader.find("details[data-key=run-1]").await?.text().await?;
        for part in [
            "Event ",
            "Claimed by ",
            "epoch 1",
            "after a wait of",
            "the built-in prompt",
            "tokens in",
            "Prompts, tool calls and answers of this run",
            "Ended after",
            "Reply",
            "posted",
        ] {
            ensure!(shown.contains(part), "{screen} does not show {part:?}:\n{shown}");
        }
        // Only the newest run has the steps of its session.
        reader.find("details[data-key=run-3] summary").await?.click().await?;
        let shown = reader.find("details[data-key=run-3]").await?.text().await?;
        ensure!(shown.contains("Answer of the model"), "{screen}:\n{shown}");
    }
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}

/// Runs without a result have their reason, also if it is hostile text.
#[tokio::test]
async fn runs_that_were_discarded_are_shown_with_their_reason() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let issue = data.quarantined;
    let runs = format!(
        "INSERT INTO issue_runs (issue_id, epoch, worker, claimed_at, ended_at, result, error, events)
         SELECT {issue}, n, 'worker-<b>1</b>', now(), now(),
             (ARRAY['failed', 'deferred', 'quarantined', 'superseded', 'released', 'expired', 'fenced'])[n],
             CASE WHEN n <= 3 THEN '<script>window.hacked=1</script> status 500' END, 0
         FROM generate_series(1, 7) AS n"
    );
    fixture.database.query(&runs)?;
    let reader = Reader::start(&fixture.server, BrowserScripts::On).await?;
    let path = format!("/console/issues/{issue}");
    reader.open(&path).await?;
    for (epoch, result, reason) in [
        (7, "fenced", "its result came later and was discarded"),
        (6, "expired", "it died, hung or was cut off"),
        (5, "released", "released its claim without a result"),
        (4, "superseded", "newer events arrived"),
        (
            3,
            "quarantined",
            "the issue was quarantined: <script>window.hacked=1</script> status 500",
        ),
        (2, "deferred", "without counting an attempt"),
        (1, "failed", "it failed and was retried"),
    ] {
        reader.find(&format!("details[data-key=run-{epoch}] summary")).await?.click().await?;
        let shown = reader.find(&format!("details[data-key=run-{epoch}]")).await?.text().await?;
        ensure!(
            shown.contains(result) && shown.contains(reason) && shown.contains("worker-<b>1</b>"),
            "{shown}"
        );
    }
    let hacked = reader.driver().execute("return window.hacked ?? null").await?;
    ensure!(hacked.is_null(), "text of an error was executed");
    reader.must_be_accessible(&path).await?;
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}
