//! The real binary while the wall clock is set back or forward by an hour repeatedly: within a debounce window, a
//! run, a delivery, and between two events of an issue.

mod support;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use headwater_testkit::{Postgres, WallClock};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::support::desk::all_idle;
use crate::support::model::FakeModel;
use crate::support::sender::{SECRET, github, github_comment, github_issues, send};
use crate::support::{Server, ServerDir, eventually};

const HOUR_SECONDS: i64 = 3600;

/// Longer than the interval of sweeps and worker heartbeats.
const OBSERVE_FOR: Duration = Duration::from_secs(8);

/// A GitHub that stores comments and delays its response until permitted.
#[derive(Clone)]
struct GatedGithub {
    posts: Arc<Mutex<Vec<String>>>,
    gate: Arc<Semaphore>,
}

impl GatedGithub {
    async fn start() -> Result<(Self, String)> {
        let hub = Self { posts: Arc::default(), gate: Arc::new(Semaphore::new(0)) };
        let routes = post(comment).get(|| async { Json(json!([])) });
        let router = Router::new()
            .route("/repositories/{id}/issues/{number}/comments", routes)
            .with_state(hub.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        // Ends with the runtime of the test.
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((hub, format!("http://{address}")))
    }

    /// Counts every attempt: comments are never listed, so a second attempt is not suppressed.
    fn posts(&self) -> usize {
        self.posts.lock().expect("no panic").len()
    }
}

async fn comment(State(hub): State<GatedGithub>, Json(body): Json<Value>) -> StatusCode {
    hub.posts.lock().expect("no panic").push(body["body"].to_string());
    let passed = hub.gate.acquire().await;
    passed.expect("the semaphore is never closed").forget();
    StatusCode::CREATED
}

/// A server with a controlled clock, a model and a GitHub.
struct ClockScenario {
    clock: WallClock,
    offset: i64,
    step: i64,
    server: Server,
    model: FakeModel,
    hub: GatedGithub,
    _dir: ServerDir,
    _postgres: Option<Postgres>,
}

impl ClockScenario {
    async fn start(step: i64, on_postgres: bool) -> Result<Self> {
        let clock = WallClock::start()?;
        let (hub, hub_url) = GatedGithub::start().await?;
        let (model, model_url) = FakeModel::start((5, 5)).await?;
        let settings = format!(
            "[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\n\
             reply_token_env = \"SHOP_TOKEN\"\nbase_url = \"{hub_url}\"\n"
        );
        let mut dir = ServerDir::new()?.settings(&settings)?.variable("SHOP_TOKEN", "a token");
        for (name, value) in clock.environment() {
            dir = dir.variable(&name, &value);
        }
        let postgres = if on_postgres { Some(Postgres::start_at(&clock)?) } else { None };
        let database = match &postgres {
            // Not dropped before the server.
            Some(postgres) => {
                let database = postgres.database()?;
                let url = database.url();
                std::mem::forget(database);
                url
            }
            None => format!("sqlite:{}", dir.file("headwater.db")),
        };
        let arguments = [
            ["--database-url", &database],
            ["--issue-quiet", "4s"],
            ["--issue-max-wait", "8s"],
            ["--model-url", &model_url],
            ["--model-name", "m"],
        ];
        let server = dir.serve(&arguments.concat())?;
        // Before the first heartbeat of its worker it is not.
        server.until("/health/ready", |status, _| status == 200).await?;
        let (offset, _dir, _postgres) = (0, dir, postgres);
        Ok(Self { clock, offset, step, server, model, hub, _dir, _postgres })
    }

    /// Sets the clock by another step and observes the server for a while.
    async fn step(&mut self, is_well: impl Fn(&Self) -> Result<()>) -> Result<()> {
        self.offset += self.step;
        self.clock.set(self.offset)?;
        let until = Instant::now() + OBSERVE_FOR;
        while Instant::now() < until {
            let (status, body) = self.server.get("/health/ready").await?;
            ensure!(status == 200, "not ready: {body:#}\n{}", self.server.log());
            let (status, body) = self.server.get("/api/v1/issues/1/why").await?;
            ensure!(status == 200, "{body}");
            ensure!(!body.to_string().contains("no worker is alive"), "{body}");
            ensure!(!body.to_string().contains("worker heartbeat missing"), "{body}");
            is_well(self).with_context(|| self.server.log())?;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    fn questions(&self) -> usize {
        self.model.requests("").len()
    }
}

async fn everything_happens_once(step: i64, on_postgres: bool) -> Result<()> {
    let mut scenario = ClockScenario::start(step, on_postgres).await?;

    // Within the debounce window: the event is not lost. The window may end early, but there is one run.
    let body = github_issues("opened", 42, "Where is it?").to_string();
    let (status, answer) = send(github(&scenario.server, "issues", "d-1", body.as_bytes())).await?;
    ensure!(status < 300, "{status} {answer}");
    scenario.step(|scenario| check(scenario.questions() <= 1, "two runs")).await?;
    let asked = scenario.model.clone();
    eventually("a question to the model", || !asked.requests("Where is it?").is_empty()).await?;

    // Within the run: the worker keeps its claim, and the model is not called again.
    scenario.step(|scenario| check(scenario.questions() == 1, "the run was repeated")).await?;
    scenario.model.unblock();
    let hub = scenario.hub.clone();
    eventually("the comment to be posted", || hub.posts() == 1).await?;

    // Within the delivery: the reply is not sent twice.
    scenario.step(|scenario| check(scenario.hub.posts() == 1, "the reply was sent twice")).await?;
    scenario.hub.gate.add_permits(1_000);
    all_idle(&scenario.server).await?;

    // Between two events: the first reply stays.
    scenario.step(|scenario| check(scenario.questions() == 1, "an unnecessary run")).await?;
    let body = github_comment(42, "ann", "And now?").to_string();
    let comment = github(&scenario.server, "issue_comment", "d-2", body.as_bytes());
    let (status, answer) = send(comment).await?;
    ensure!(status < 300, "{status} {answer}");
    let hub = scenario.hub.clone();
    eventually("the second comment", || hub.posts() == 2).await?;
    all_idle(&scenario.server).await?;
    let questions = scenario.model.requests("");
    ensure!(questions.len() == 2, "{} questions", questions.len());
    // The prompt contains the conversation, one line of JSON for each text.
    let turns = questions[1].body["messages"].as_array().context("messages")?;
    let texts = turns.iter().filter_map(|turn| turn["content"].as_str()).flat_map(str::lines);
    let lines: Vec<Value> = texts.filter_map(|line| serde_json::from_str(line).ok()).collect();
    let pending = |line: &&Value| line["pending"] == true;
    ensure!(lines.iter().filter(pending).count() == 1, "only the comment is new: {lines:#?}");
    let answered = lines.iter().any(|line| line["author"] == "assistant");
    ensure!(answered, "the first reply is missing: {lines:#?}");
    ensure!(scenario.hub.posts() == 2, "{:?}", scenario.hub.posts.lock().expect("no panic"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_back_loses_and_duplicates_nothing_on_sqlite() -> Result<()> {
    everything_happens_once(-HOUR_SECONDS, false).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_forward_loses_and_duplicates_nothing_on_sqlite() -> Result<()> {
    everything_happens_once(HOUR_SECONDS, false).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_back_loses_and_duplicates_nothing_on_postgres() -> Result<()> {
    everything_happens_once(-HOUR_SECONDS, true).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_forward_loses_and_duplicates_nothing_on_postgres() -> Result<()> {
    everything_happens_once(HOUR_SECONDS, true).await
}

fn check(holds: bool, problem: &'static str) -> Result<()> {
    ensure!(holds, problem);
    Ok(())
}
