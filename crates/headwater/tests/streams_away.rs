//! Model runs while Redis is away: the answer comes all the same, and every step reaches its session later.

mod support;

use anyhow::{Context, Result};
use headwater_testkit::{Proxy, Redis, Reply};

use crate::support::desk::{answered, by, open};
use crate::support::model::FakeModel;
use crate::support::{Place, Server, eventually};

/// The types of the steps in a session's stream, in order, without what stands before their last dot.
fn steps(redis: &Redis, session: &str) -> Vec<String> {
    let stream = format!("wink:events:{session}");
    let Ok(entries) = redis.command(&["XRANGE", &stream, "-", "+"]) else { return Vec::new() };
    let step = |entry: &Reply| {
        let fields = entry.items().get(1).map(Reply::items).unwrap_or_default();
        let place = fields.iter().position(|field| field.text() == "type")?;
        let name = fields.get(place + 1)?.text();
        name.rsplit('.').next().map(str::to_owned)
    };
    entries.items().iter().filter_map(step).collect()
}

/// The session of the last run of an issue, which its reply names, too.
async fn session(server: &Server, created: &serde_json::Value) -> Result<String> {
    let path = format!("/api/v1/issues/{}", created["issue_id"]);
    let has_session = |_: u16, issue: &serde_json::Value| issue["fields"]["session_id"].is_string();
    let issue = server.until(&path, has_session).await?;
    Ok(issue["fields"]["session_id"].as_str().context("a session")?.to_owned())
}

// The service of the test answers while the test waits.
#[tokio::test(flavor = "multi_thread")]
async fn the_steps_of_a_run_during_an_outage_reach_its_session_when_redis_is_back() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let (model, model_url) = FakeModel::start((5, 5)).await?;
    let place = Place::new()?;
    let way = redis.url_at(proxy.addr());
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];
    let model_at = ["--model-url", &model_url, "--model-name", "m"];
    let arguments = [&["--stream-url", &way][..], &quick, &model_at].concat();
    let server = place.serve(&arguments)?;

    // Redis goes away in the middle of a run, and stays away for a whole one.
    let first = open(&server, "first question").await?;
    eventually("a question", || !model.asked("first question").is_empty()).await?;
    proxy.cut()?;
    model.open_door();
    let second = open(&server, "second question").await?;
    let mut sessions = Vec::new();
    for created in [&first, &second] {
        let ticket = created["ticket_id"].as_str().context("a ticket")?;
        let shown = answered(&server, ticket, 1).await?;
        assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER]);
        sessions.push(session(&server, created).await?);
    }
    assert!(steps(&redis, &sessions[1]).is_empty());

    proxy.heal()?;
    for session in &sessions {
        eventually("the steps", || steps(&redis, session).len() >= 2).await?;
        assert_eq!(steps(&redis, session), ["PromptRendered", "PromptExecuted"]);
    }
    assert!(!server.log().contains("is not in its session"), "{}", server.log());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_during_an_outage_leaves_the_steps_to_the_next_process() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let (_model, model_url) = FakeModel::open((5, 5)).await?;
    let place = Place::new()?;
    let way = redis.url_at(proxy.addr());
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];
    let model_at = ["--model-url", &model_url, "--model-name", "m"];
    let arguments = [&["--stream-url", &way][..], &quick, &model_at].concat();
    let mut server = place.serve(&arguments)?;
    // Another process of the same directory has a spool of its own.
    let _other = place.worker(&arguments)?;
    proxy.cut()?;
    let created = open(&server, "a question").await?;
    let session = session(&server, &created).await?;
    server.kill9()?;

    proxy.heal()?;
    let _server = place.serve(&arguments)?;
    eventually("the steps", || steps(&redis, &session).len() >= 2).await?;
    assert_eq!(steps(&redis, &session), ["PromptRendered", "PromptExecuted"]);
    Ok(())
}
