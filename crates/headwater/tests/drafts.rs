//! Drafts on the real binary: nothing is posted without an approval, nothing twice, and nothing is lost, whenever the
//! process is killed.

mod support;

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Database, Postgres};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::support::desk::{all_idle, answered, by, open};
use crate::support::model::FakeModel;
use crate::support::receivers::{Fault, Receiver};
use crate::support::sender::{
    SECRET, STANDARD_SECRET, github, github_comment, github_issues, now, send, standard,
};
use crate::support::{Server, ServerDir, eventually, text};

fn place(url: &str, more: &str) -> Result<ServerDir> {
    let settings = format!(
        "[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\nbase_url = \"{url}\"\n\
         reply_token_env = \"TOKEN\"\n{more}\n"
    );
    Ok(ServerDir::new()?.settings(&settings)?.variable("TOKEN", "a token"))
}

const SQLITE: &str = "sqlite:headwater-data/headwater.db";

fn arguments(database: &str) -> Vec<String> {
    let given = ["--issue-quiet", "10ms", "--worker-claim", "1s", "--sweep-every", "200ms"];
    let given = [&given[..], &["--analytics-path", "", "--database-url", database]].concat();
    given.into_iter().map(str::to_owned).collect()
}

fn serve(place: &ServerDir, database: &str) -> Result<Server> {
    let given = arguments(database);
    place.serve(&given.iter().map(String::as_str).collect::<Vec<_>>())
}

async fn ask(server: &Server, number: u64, text: &str) -> Result<()> {
    let body = github_issues("opened", number, text).to_string();
    let (status, body) =
        send(github(server, "issues", &format!("d-{number}"), body.as_bytes())).await?;
    ensure!(status == 200 && body["status"] == "ok", "{status} {body}");
    Ok(())
}

async fn comment(server: &Server, number: u64, text: &str) -> Result<()> {
    let body = github_comment(number, "ann", text).to_string();
    let (status, body) = send(github(server, "issue_comment", text, body.as_bytes())).await?;
    ensure!(status == 200 && body["status"] == "ok", "{status} {body}");
    Ok(())
}

fn comments_path(number: u64) -> String {
    format!("/repositories/35129377/issues/{number}/comments")
}

/// The pending draft for an issue number of the provider, once there is one with an id above `after`.
async fn pending(server: &Server, number: u64, after: i64) -> Result<Value> {
    let number = number.to_string();
    let find = |body: &Value| {
        let drafts = body["drafts"].as_array().into_iter().flatten();
        let mut of_issue = drafts.filter(|draft| draft["external_issue_id"] == *number);
        of_issue.find(|draft| draft["id"].as_i64() > Some(after)).cloned()
    };
    let page =
        server.until("/api/v1/drafts?status=pending", |_, body| find(body).is_some()).await?;
    find(&page).context("the draft was found")
}

fn id(draft: &Value) -> i64 {
    draft["id"].as_i64().unwrap_or_default()
}

async fn decide(server: &Server, draft: i64, verb: &str, body: Value) -> Result<(u16, Value)> {
    server.post(&format!("/api/v1/drafts/{draft}/{verb}"), &body).await
}

async fn a_draft_is_posted_once_when_it_is_approved(database: &str) -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "mode = \"draft\"")?;
    let server = serve(&place, database)?;
    ask(&server, 1, "Where is it?").await?;
    let draft = pending(&server, 1, 0).await?;
    assert_eq!(draft["chosen_by"], "mode of the integration", "{draft:#}");
    let number = id(&draft);
    // The outbox row is marked as delivered a moment after the draft is stored.
    let why = format!("/api/v1/issues/{}/why", draft["issue_id"]);
    server.until(&why, |_, why| why["reason"] == "draft").await?;

    let (status, edited) =
        decide(&server, number, "edit", json!({"content": "It is late."})).await?;
    assert_eq!((status, &edited["version"]), (200, &json!(2)), "{edited:#}");
    // About a text that was edited since.
    let (status, refused) = decide(&server, number, "approve", json!({"version": 1})).await?;
    assert_eq!((status, &refused["error"]["code"]), (409, &json!("conflict")), "{refused:#}");
    for bad in [json!({"content": " "}), json!({"content": 1}), json!({"text": "x"})] {
        assert_eq!(decide(&server, number, "approve", bad.clone()).await?.0, 400, "{bad}");
    }
    assert_eq!(decide(&server, 999, "approve", json!({})).await?.0, 404);
    all_idle(&server).await?;
    assert_eq!(receiver.requests().len(), 0, "nothing leaves without an approval");

    let (status, approved) = decide(&server, number, "approve", json!({"version": 2})).await?;
    assert_eq!((status, &approved["changed"]), (200, &json!(true)), "{approved:#}");
    assert_eq!(
        (&approved["posted"], &approved["decided_by"]),
        (&json!("It is late."), &json!("local"))
    );
    assert_ne!(approved["content"], approved["posted"], "both texts are kept");
    eventually("the comment", || receiver.accepted().len() == 1).await?;
    // Repeated, and contradicted.
    let (status, again) = decide(&server, number, "approve", json!({})).await?;
    assert_eq!((status, &again["changed"]), (200, &json!(false)), "{again:#}");
    for (verb, body) in [
        ("reject", json!({})),
        ("approve", json!({"content": "x"})),
        ("edit", json!({"content": "x"})),
    ] {
        assert_eq!(decide(&server, number, verb, body).await?.0, 409, "{verb}");
    }
    // The next run sees what was posted.
    comment(&server, 1, "And now?").await?;
    pending(&server, 1, number).await?;
    let posted = receiver.accepted();
    assert_eq!(posted.len(), 1, "{posted:#?}");
    assert_eq!((posted[0].content(), posted[0].path.as_str()), ("It is late.", &*comments_path(1)));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_is_posted_once_when_it_is_approved_on_sqlite() -> Result<()> {
    a_draft_is_posted_once_when_it_is_approved(SQLITE).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_is_posted_once_when_it_is_approved_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    a_draft_is_posted_once_when_it_is_approved(&database.url()).await
}

async fn a_newer_message_makes_a_draft_outdated(database: &str) -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let (model, model_url) = FakeModel::open((5, 5)).await?;
    let place = place(&url, "mode = \"draft\"")?.variable("HEADWATER_MODEL_URL", &model_url);
    let place = place.variable("HEADWATER_MODEL_NAME", "m");
    let server = serve(&place, database)?;
    ask(&server, 1, "First question").await?;
    let first = id(&pending(&server, 1, 0).await?);
    comment(&server, 1, "Second question").await?;
    let second = id(&pending(&server, 1, first).await?);
    let (status, refused) = decide(&server, first, "approve", json!({})).await?;
    assert_eq!((status, &refused["error"]["code"]), (409, &json!("outdated")), "{refused:#}");
    let (_, shown) = server.get(&format!("/api/v1/drafts/{first}")).await?;
    assert_eq!(shown["status"], "outdated", "{shown:#}");
    // The new draft answers both.
    let request = model.requests("Second question").pop().context("a request")?.body.to_string();
    assert_eq!(request.matches(r#"\"pending\":true"#).count(), 2, "{request}");

    // A rejected draft is never posted, and the desk continues with the next message.
    let (status, rejected) =
        decide(&server, second, "reject", json!({"reason": "too short"})).await?;
    assert_eq!((status, &rejected["decision_reason"]), (200, &json!("too short")), "{rejected:#}");
    assert_eq!(decide(&server, second, "approve", json!({})).await?.0, 409);
    comment(&server, 1, "Third question").await?;
    let third = id(&pending(&server, 1, second).await?);
    let request = model.requests("Third question").pop().context("a request")?.body.to_string();
    assert!(request.contains("a person rejected it: too short"), "{request}");
    assert_eq!(receiver.requests().len(), 0);
    decide(&server, third, "approve", json!({"content": "All of it."})).await?;
    eventually("the comment", || receiver.accepted().len() == 1).await?;
    assert_eq!(receiver.accepted()[0].content(), "All of it.");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_message_makes_a_draft_outdated_on_sqlite() -> Result<()> {
    a_newer_message_makes_a_draft_outdated(SQLITE).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_message_makes_a_draft_outdated_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    a_newer_message_makes_a_draft_outdated(&database.url()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_choose_the_mode_and_notes_are_never_posted() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let rules = "[[integration.rule]]\nmode = \"note\"\nwords = [\"REFUND\"]\n\
         [[integration.rule]]\nmode = \"auto\"\nauthor_associations = [\"NONE\"]\nfirst_contact = true\n";
    let place = place(&url, &format!("mode = \"draft\"\n{rules}"))?;
    let server = serve(&place, SQLITE)?;
    // By the second rule, and then by the mode of the integration.
    ask(&server, 1, "Where is it?").await?;
    eventually("a comment", || receiver.accepted().len() == 1).await?;
    comment(&server, 1, "And now?").await?;
    pending(&server, 1, 0).await?;
    ask(&server, 2, "I want a refund.").await?;
    let notes = "/api/v1/drafts?status=note";
    let page = server.until(notes, |_, body| body["drafts"] != json!([])).await?;
    let note = &page["drafts"][0];
    assert_eq!((&note["chosen_by"], &note["external_issue_id"]), (&json!("rule 1"), &json!("2")));
    for verb in ["approve", "reject"] {
        assert_eq!(decide(&server, id(note), verb, json!({})).await?.0, 409);
    }
    all_idle(&server).await?;
    assert_eq!(receiver.accepted().len(), 1, "{:#?}", receiver.accepted());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn effects_of_tools_wait_for_the_approval_too() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let settings = format!(
        "[[integration]]\nid = \"anybody\"\nprovider = \"standard\"\nsecret = \"{STANDARD_SECRET}\"\n\
         base_url = \"{url}/callback\"\nmode = \"draft\"\n[[integration]]\nid = \"desk\"\nprovider = \"desk\"\nmode = \"draft\"\n"
    );
    let place = ServerDir::new()?.settings(&settings)?;
    let server = serve(&place, SQLITE)?;
    // The hand-over of a ticket is internal: it happens at once, and its text waits.
    let created = open(&server, "I want to speak to a human").await?;
    let ticket = created["ticket_id"].as_str().context("a ticket")?.to_owned();
    let path = format!("/api/v1/tickets/{ticket}");
    let shown = server.until(&path, |_, shown| shown["handed_over"] == true).await?;
    assert!(by(&shown, "assistant").is_empty(), "{shown:#}");
    let draft = pending_of_issue(&server, &created["issue_id"]).await?;
    assert_eq!(decide(&server, id(&draft), "approve", json!({})).await?.0, 200);
    answered(&server, &ticket, 1).await?;

    let body = json!({"type": "message", "issue": "77", "text": "I want to speak to a human"});
    let (_, sent) = send(standard(&server, "m-1", now(), body.to_string().as_bytes())).await?;
    let draft = pending_of_issue(&server, &sent["issue_id"]).await?;
    assert_eq!(draft["effects"], json!(["hand_over"]), "{draft:#}");
    all_idle(&server).await?;
    assert_eq!(receiver.requests().len(), 0);
    decide(&server, id(&draft), "approve", json!({})).await?;
    eventually("reply and hand-over", || receiver.accepted().len() == 2).await?;
    let types: Vec<Value> =
        receiver.accepted().iter().map(|one| one.body["type"].clone()).collect();
    assert_eq!(types, [json!("reply"), json!("hand_over")]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_whose_draft_is_outdated_or_rejected_does_not_silence_the_desk() -> Result<()> {
    let (_, url) = Receiver::start().await?;
    let place = place(&url, "mode = \"draft\"")?;
    let server = serve(&place, SQLITE)?;
    let human = "I want to speak to a human";
    ask(&server, 1, human).await?;
    let first = pending(&server, 1, 0).await?;
    assert_eq!(first["effects"], json!(["hand_over"]), "{first:#}");

    // The user writes again before a person has decided: another draft follows.
    comment(&server, 1, "Hello?").await?;
    let second = pending(&server, 1, id(&first)).await?;
    let (_, outdated) = server.get(&format!("/api/v1/drafts/{}", id(&first))).await?;
    assert_eq!(outdated["status"], "outdated", "{outdated:#}");

    // A person rejects it: the desk goes on with the next message.
    assert_eq!(decide(&server, id(&second), "reject", json!({"reason": "No."})).await?.0, 200);
    comment(&server, 1, "Where is my parcel?").await?;
    pending(&server, 1, id(&second)).await?;
    Ok(())
}

async fn pending_of_issue(server: &Server, issue: &Value) -> Result<Value> {
    let path = format!("/api/v1/drafts?status=pending&issue_id={issue}");
    let page = server.until(&path, |_, body| body["drafts"] != json!([])).await?;
    Ok(page["drafts"][0].clone())
}

#[test]
fn invalid_modes_and_rules_are_rejected() -> Result<()> {
    for (more, expected) in [
        ("mode = \"maybe\"", "unknown mode `maybe`"),
        ("[[integration.rule]]\nmode = \"auto\"", "rule 1 has no condition"),
        ("[[integration.rule]]\nmode = \"auto\"\nhours = \"6-6\"", "invalid `hours` `6-6`"),
        ("[[integration.rule]]\nmode = \"auto\"\nhours = \"1-25\"", "invalid `hours`"),
        ("[[integration.rule]]\nmode = \"auto\"\ntools = [\"rm\"]", "unknown tool `rm`"),
        ("[[integration.rule]]\nmode = \"auto\"\nwords = [\"\"]", "empty text in `words`"),
        (
            "[[integration.rule]]\nmode = \"auto\"\nauthor_associations = [\"X\"]",
            "unknown association",
        ),
        ("[[integration.rule]]\nmode = \"auto\"\nday = 1", "unknown field `day`"),
    ] {
        let output = place("http://localhost", more)?.run(&["config"])?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{more}: {error}");
        assert!(error.contains(expected), "{more}: {error}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn drafts_are_decided_about_on_the_command_line() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "mode = \"draft\"")?;
    let server = serve(&place, SQLITE)?;
    for number in [1, 2] {
        ask(&server, number, "Where is it?").await?;
    }
    let (first, second) = (pending(&server, 1, 0).await?, pending(&server, 2, 0).await?);
    let at = server.url("");
    let run = |words: &[&str]| {
        let output = place.run(&[words, &["--url", &at]].concat())?;
        anyhow::Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
    };
    let (one, two) = (id(&first).to_string(), id(&second).to_string());
    let (_, listed, _) = run(&["draft", "list", "--json"])?;
    assert_eq!(listed.lines().count(), 2, "{listed}");
    assert!(run(&["draft", "edit", &one, "--content", "Soon."])?.1.contains("edited draft"));
    assert!(run(&["draft", "show", &one])?.1.contains("Soon."));
    assert!(run(&["draft", "approve", &one])?.1.contains("it is posted"));
    assert!(run(&["draft", "approve", &one])?.1.contains("approved before"));
    assert!(run(&["draft", "reject", &two, "--reason", "No."])?.1.contains("never posted"));
    let (code, _, error) = run(&["draft", "approve", &two])?;
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("was rejected before"), "{error}");
    eventually("the comment", || receiver.accepted().len() == 1).await?;
    assert_eq!(receiver.accepted()[0].content(), "Soon.");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn drafts_are_decided_about_in_the_console() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "mode = \"draft\"")?;
    let server = serve(&place, SQLITE)?;
    for number in [1, 2] {
        ask(&server, number, "Where is it?").await?;
    }
    let (first, second) = (pending(&server, 1, 0).await?, pending(&server, 2, 0).await?);
    let shown = server.client.get(server.url("/console/drafts")).send().await?.text().await?;
    assert_eq!(shown.matches("Approve and post").count(), 2, "{shown}");
    let submit = async |path: String, form: &'static str| {
        let request = server.client.post(server.url(&path)).header("origin", server.url(""));
        let request =
            request.header("content-type", "application/x-www-form-urlencoded").body(form);
        anyhow::Ok(request.send().await?.text().await?)
    };
    let approve = format!("/console/do/drafts/{}/approve", id(&first));
    let refused = submit(approve.clone(), "version=7&content=Soon.").await?;
    assert!(refused.contains("was edited since"), "{refused}");
    let shown = submit(approve, "version=1&content=Soon.%0D%0AReally.").await?;
    assert!(shown.contains("The draft is approved"), "{shown}");
    let reject = format!("/console/do/drafts/{}/reject", id(&second));
    assert!(submit(reject, "version=1&reason=").await?.contains("The draft is rejected"));
    eventually("the comment", || receiver.accepted().len() == 1).await?;
    assert_eq!(receiver.accepted()[0].content(), "Soon.\nReally.");
    Ok(())
}

/// Where the process is killed.
#[derive(Clone, Copy, Debug)]
enum KillPoint {
    AfterTheWebhook,
    AfterTheDraft,
    DuringTheApproval,
    AfterTheApproval,
    AfterThePost,
}

const KILL_POINTS: [KillPoint; 5] = [
    KillPoint::AfterTheWebhook,
    KillPoint::AfterTheDraft,
    KillPoint::DuringTheApproval,
    KillPoint::AfterTheApproval,
    KillPoint::AfterThePost,
];

/// Ends the database sessions of a killed process, as if the machine had died.
fn end_sessions(database: &Database) -> Result<()> {
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name <> 'gate'";
    database.query(end).map(drop)
}

/// An outbox row of a killed process is leased for thirty seconds, also if its last statement ends after it.
fn end_leases(database: &Database) -> Result<()> {
    end_sessions(database)?;
    database.query("UPDATE outbox SET due_at = now() WHERE status <> 'delivered'").map(drop)
}

async fn a_kill_at_any_step_posts_every_approved_draft_once_and_no_other(
    url_of_database: &str,
    database: Option<&Database>,
) -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "mode = \"draft\"")?;
    let mut server = serve(&place, url_of_database)?;
    for (number, point) in (1..).zip(KILL_POINTS) {
        ask(&server, number, "Where is it?").await?;
        let posted = || receiver.comments(&comments_path(number)).len();
        if !matches!(point, KillPoint::AfterTheWebhook) {
            let draft = id(&pending(&server, number, 0).await?);
            assert_eq!(posted(), 0, "{point:?}");
            let approve = server.url(&format!("/api/v1/drafts/{draft}/approve"));
            let approve = server.client.post(approve).json(&json!({})).send();
            match point {
                KillPoint::DuringTheApproval => {
                    let sent = tokio::spawn(approve);
                    tokio::task::yield_now().await;
                    server.kill9()?;
                    let _ = sent.await;
                }
                KillPoint::AfterTheApproval => drop(approve.await?),
                KillPoint::AfterThePost => {
                    // Posted, but the process does not learn it.
                    receiver.fail_next(Fault::LoseResponse);
                    approve.await?;
                    eventually("the comment", || posted() == 1).await?;
                }
                _ => {}
            }
        }
        server.kill9()?;
        if let Some(database) = database {
            end_leases(database)?;
        }
        server = serve(&place, url_of_database)?;
        let drafts = "/api/v1/drafts?limit=200";
        let of_issue = |body: &Value| {
            let drafts = body["drafts"].as_array().cloned().unwrap_or_default();
            let number = number.to_string();
            drafts
                .into_iter()
                .filter(move |one| one["external_issue_id"] == *number)
                .collect::<Vec<_>>()
        };
        let page = server.until(drafts, |_, body| !of_issue(body).is_empty()).await?;
        let found = of_issue(&page);
        assert_eq!(found.len(), 1, "{point:?}: {found:#?}");
        let is_approved = found[0]["status"] == "approved";
        if matches!(point, KillPoint::AfterTheApproval | KillPoint::AfterThePost) {
            assert!(is_approved, "{point:?}: an approval that was confirmed is not lost");
        }
        if !is_approved {
            assert_eq!((posted(), &found[0]["status"]), (0, &json!("pending")), "{point:?}");
        }
        let (status, body) = decide(&server, id(&found[0]), "approve", json!({})).await?;
        assert_eq!((status, &body["changed"]), (200, &json!(!is_approved)), "{point:?}");
        eventually("the comment", || posted() == 1).await?;
    }
    // Every delivery is recorded, so no further one can come.
    let issues = server.until("/api/v1/overview", |_, body| body["outbox"]["pending"] == 0).await;
    issues?;
    for number in 1..=KILL_POINTS.len() as u64 {
        assert_eq!(receiver.comments(&comments_path(number)).len(), 1, "issue {number}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_at_any_step_posts_every_approved_draft_once_and_no_other_on_sqlite() -> Result<()> {
    a_kill_at_any_step_posts_every_approved_draft_once_and_no_other(SQLITE, None).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_at_any_step_posts_every_approved_draft_once_and_no_other_on_postgres() -> Result<()>
{
    let database = Postgres::shared()?.database()?;
    let url = database.url();
    a_kill_at_any_step_posts_every_approved_draft_once_and_no_other(&url, Some(&database)).await
}

/// Kills the server while a statement like this waits for the lock of a table, inside its transaction.
async fn kill_in_statement(
    server: &mut Server,
    database: &Database,
    (table, statement): (&'static str, &str),
    begin: impl AsyncFnOnce(&Server) -> Result<()>,
) -> Result<()> {
    let mut gate = PgConnection::connect(&database.url()).await?;
    sqlx::query("SET application_name = 'gate'").execute(&mut gate).await?;
    let mut closed = gate.begin().await?;
    let lock = format!("LOCK TABLE {table} IN EXCLUSIVE MODE");
    sqlx::query(AssertSqlSafe(lock)).execute(&mut *closed).await?;
    begin(&*server).await?;
    let waiting = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
             AND query LIKE '%{statement}%' AND pid <> pg_backend_pid()"
    );
    let is_waiting = || database.query(&waiting).is_ok_and(|count| count.trim() == "1");
    eventually("the statement to wait", is_waiting).await?;
    server.kill9()?;
    end_sessions(database)?;
    closed.rollback().await?;
    end_leases(database)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_inside_the_transactions_of_a_draft_and_of_its_approval_undoes_them() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "mode = \"draft\"")?;
    let mut server = serve(&place, &database.url())?;
    let storing = ("drafts", "INSERT INTO drafts");
    let asking = async |server: &Server| ask(server, 1, "Where is it?").await;
    kill_in_statement(&mut server, &database, storing, asking).await?;
    server = serve(&place, &database.url())?;
    let draft = id(&pending(&server, 1, 0).await?);
    all_idle(&server).await?;

    let approving = ("outbox", "headwater_enqueue_outbox");
    let approve = async |server: &Server| {
        let path = server.url(&format!("/api/v1/drafts/{draft}/approve"));
        tokio::spawn(server.client.post(path).json(&json!({})).send());
        Ok(())
    };
    kill_in_statement(&mut server, &database, approving, approve).await?;
    server = serve(&place, &database.url())?;
    let (_, page) = server.get("/api/v1/drafts").await?;
    assert_eq!(page["drafts"].as_array().map(Vec::len), Some(1), "{page:#}");
    assert_eq!(page["drafts"][0]["status"], "pending", "{page:#}");
    all_idle(&server).await?;
    assert_eq!(receiver.requests().len(), 0, "the approval was not committed");
    assert_eq!(decide(&server, draft, "approve", json!({})).await?.0, 200);
    eventually("the comment", || receiver.accepted().len() == 1).await?;
    Ok(())
}
