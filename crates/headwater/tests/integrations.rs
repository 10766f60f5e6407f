//! Settings of integrations on the real binary: people who answer, authors who are not handled, and budgets of their own.

mod support;

use anyhow::Result;
use serde_json::{Value, json};

use crate::support::desk::all_idle;
use crate::support::model::FakeModel;
use crate::support::receivers::Receiver;
use crate::support::sender::{
    SECRET, STANDARD_SECRET, github, github_comment, github_issues, gitlab, gitlab_issue,
    gitlab_note, now, send, standard,
};
use crate::support::{Server, ServerDir, eventually};

/// Integrations of all three providers that reply to `url`, each with more settings.
fn settings(url: &str, of_github: &str, of_others: &str) -> String {
    let token = "reply_token_env = \"TOKEN\"";
    format!(
        "
[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\nbase_url = \"{url}\"\n{token}\n{of_github}
[[integration]]\nid = \"works\"\nprovider = \"gitlab\"\nsecret = \"{SECRET}\"\nbase_url = \"{url}\"\n{token}\n{of_others}
[[integration]]\nid = \"anybody\"\nprovider = \"standard\"\nsecret = \"{STANDARD_SECRET}\"\nbase_url = \"{url}/callback\"\n{of_others}
"
    )
}

fn place(url: &str, of_github: &str, of_others: &str) -> Result<ServerDir> {
    let settings = settings(url, of_github, of_others);
    Ok(ServerDir::new()?.settings(&settings)?.variable("TOKEN", "a token"))
}

async fn ok(request: reqwest::RequestBuilder) -> Result<Value> {
    let (status, body) = send(request).await?;
    anyhow::ensure!(status == 200 && body["status"] == "ok", "{status} {body}");
    Ok(body)
}

async fn replies(receiver: &Receiver, count: usize) -> Result<()> {
    eventually("replies", || receiver.accepted().len() >= count).await
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_agent_has_answered_on_gitlab_the_model_is_silent_until_the_issue_is_reopened()
-> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "", "agents = [\"bob\"]")?;
    let server = place.serve(&["--issue-quiet", "10ms"])?;
    let note = |id: &'static str, by, text| {
        gitlab(&server, "Note Hook", id, &gitlab_note(7, by, text, json!({})))
    };
    ok(note("n-1", "ann", "Where is it?")).await?;
    replies(&receiver, 1).await?;
    for (id, by, text) in [("n-2", "Bob", "I take care of it."), ("n-3", "ann", "Thank you!")] {
        ok(note(id, by, text)).await?;
        all_idle(&server).await?;
    }
    let reopened = gitlab_issue("reopen", 7, json!({}));
    ok(gitlab(&server, "Issue Hook", "i-1", &reopened)).await?;
    all_idle(&server).await?;
    ok(note("n-4", "ann", "It is late again.")).await?;
    replies(&receiver, 2).await?;
    all_idle(&server).await?;
    assert_eq!(receiver.accepted().len(), 2, "{:#?}", receiver.accepted());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_agent_has_answered_in_any_program_the_model_is_silent_until_the_issue_is_reopened()
-> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "", "agents = [\"bob\"]")?;
    let server = place.serve(&["--issue-quiet", "10ms"])?;
    let said = async |id: &str, user: &str, text: &str| {
        let body = json!({"type": "message", "issue": "77", "user": user, "text": text});
        ok(standard(&server, id, now(), body.to_string().as_bytes())).await
    };
    said("m-1", "ann", "Where is it?").await?;
    replies(&receiver, 1).await?;
    for (id, user) in [("m-2", "bob"), ("m-3", "ann")] {
        said(id, user, "Hello").await?;
        all_idle(&server).await?;
    }
    let reopened = json!({"type": "issue.reopened", "issue": "77"}).to_string();
    ok(standard(&server, "m-4", now(), reopened.as_bytes())).await?;
    all_idle(&server).await?;
    said("m-5", "ann", "It is late again.").await?;
    replies(&receiver, 2).await?;
    all_idle(&server).await?;
    assert_eq!(receiver.accepted().len(), 2, "{:#?}", receiver.accepted());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_authors_with_another_association_are_ignored() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "author_associations = [\"CONTRIBUTOR\", \"MEMBER\"]", "")?;
    let server = place.serve(&["--issue-quiet", "10ms"])?;
    let mut opened = github_issues("opened", 1, "A stranger asks.");
    let body = opened.to_string();
    let (status, ignored) = send(github(&server, "issues", "d-1", body.as_bytes())).await?;
    assert_eq!((status, &ignored["status"]), (200, &json!("ignored")), "{ignored}");
    let mut comment = github_comment(1, "eve", "I ask, too.");
    comment["comment"]["author_association"] = Value::Null;
    let body = comment.to_string();
    let (_, ignored) = send(github(&server, "issue_comment", "d-2", body.as_bytes())).await?;
    assert!(ignored["reason"].as_str().is_some_and(|it| it.contains("author_associations")));

    opened["issue"]["author_association"] = json!("CONTRIBUTOR");
    ok(github(&server, "issues", "d-3", opened.to_string().as_bytes())).await?;
    replies(&receiver, 1).await?;
    let (_, issues) = server.get("/api/v1/issues").await?;
    assert_eq!(issues["issues"].as_array().map(Vec::len), Some(1), "{issues:#}");
    Ok(())
}

#[test]
fn unknown_associations_and_agents_without_a_name_are_rejected() -> Result<()> {
    for (of_github, of_others, expected) in [
        ("author_associations = [\"FRIEND\"]", "", "unknown association `FRIEND`"),
        ("agents = [\" \"]", "", "an empty name in `agents`"),
        ("", "author_associations = [\"OWNER\"]", "remove `author_associations`"),
    ] {
        let output = place("http://localhost", of_github, of_others)?.run(&["config"])?;
        let error = support::text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    Ok(())
}

/// An issue of this author, which waits for a budget or is answered.
async fn ask(server: &Server, number: u64, login: &str, association: &str) -> Result<String> {
    let mut opened = github_issues("opened", number, &format!("question {number}"));
    opened["sender"]["login"] = login.into();
    opened["issue"]["user"]["login"] = login.into();
    opened["issue"]["author_association"] = association.into();
    let delivery = format!("d-{number}");
    let body = opened.to_string();
    let recorded = ok(github(server, "issues", &delivery, body.as_bytes())).await?;
    Ok(format!("/api/v1/issues/{}", recorded["issue_id"]))
}

fn waits_for(budget: &str) -> impl Fn(u16, &Value) -> bool {
    move |_, issue: &Value| issue["last_error"].as_str().is_some_and(|error| error.contains(budget))
}

async fn a_spent_budget_of_strangers_stops_no_contributor(database: &str) -> Result<()> {
    let (_model, model_url) = FakeModel::open((9_000, 500)).await?;
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "", "")?;
    let always = ["--issue-quiet", "10ms", "--model-url", &model_url, "--model-name", "m"];
    let always = [&always[..], &["--database-url", database]].concat();
    let mut server =
        place.serve(&[&always[..], &["--desk-strangers-tokens-max", "10000"]].concat())?;
    ask(&server, 1, "eve", "NONE").await?;
    replies(&receiver, 1).await?;
    // Another account has a budget of its own, but not that of all strangers.
    let second = ask(&server, 2, "mallory", "FIRST_TIME_CONTRIBUTOR").await?;
    server.until(&second, waits_for("desk.strangers_tokens_max")).await?;
    ask(&server, 3, "ann", "CONTRIBUTOR").await?;
    replies(&receiver, 2).await?;

    // A raised budget releases the issue.
    assert!(server.stop()?.success(), "{}", server.log());
    let _server =
        place.serve(&[&always[..], &["--desk-strangers-tokens-max", "90000"]].concat())?;
    replies(&receiver, 3).await?;
    let paths: Vec<String> = receiver.accepted().iter().map(|one| one.path.clone()).collect();
    let of = |number| format!("/repositories/35129377/issues/{number}/comments");
    assert_eq!(paths, [of(1), of(3), of(2)]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_of_strangers_stops_no_contributor_on_sqlite() -> Result<()> {
    a_spent_budget_of_strangers_stops_no_contributor("sqlite:headwater-data/headwater.db").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_of_strangers_stops_no_contributor_on_postgres() -> Result<()> {
    let database = headwater_testkit::Postgres::shared()?.database()?;
    a_spent_budget_of_strangers_stops_no_contributor(&database.url()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_of_one_integration_stops_no_other() -> Result<()> {
    let (_model, model_url) = FakeModel::open((19_000, 500)).await?;
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "", "")?;
    let model = ["--model-url", &model_url, "--model-name", "m"];
    let budget = ["--issue-quiet", "10ms", "--desk-day-tokens-max", "20000"];
    let server = place.serve(&[&model[..], &budget].concat())?;
    ask(&server, 1, "ann", "MEMBER").await?;
    replies(&receiver, 1).await?;
    let second = ask(&server, 2, "bob", "MEMBER").await?;
    let waiting = server.until(&second, waits_for("desk.day_tokens_max")).await?;
    assert!(waiting["quarantined_at"].is_null(), "{waiting:#}");

    let note = gitlab_note(7, "ann", "Where is it?", json!({}));
    ok(gitlab(&server, "Note Hook", "n-1", &note)).await?;
    let body = json!({"type": "message", "issue": "77", "text": "Where is it?"}).to_string();
    ok(standard(&server, "m-1", now(), body.as_bytes())).await?;
    replies(&receiver, 3).await?;
    let (_, waiting) = server.get(&second).await?;
    assert_eq!(waiting["processing_status"], "queued", "{waiting:#}");
    Ok(())
}
