//! Two workers share the requests of a namespace; a requester submits requests with a budget and gets the replies.
//!
//! `cargo run -p headwater-bus --example distributed_main_loop`, or with a Redis URL after `--` and
//! `--features redis`: then workers and requesters may be processes on different machines.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_bus::{
    Budget, EventBus, EventRegistry, ExecuteError, Folds, MainLoop, MainLoopClient,
    MainLoopClientConfig, MainLoopConfig, MainLoopWorker, PromptExecuted, RequestContext,
    RequestFailure, RequestId, Requester, Session, Sessions, SessionsConfig, StreamedBus,
    StreamedBusConfig, Submission,
};
use headwater_stream::{Backend, Options, connect};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Review {
    file: String,
    lines: u64,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Opinion {
    file: String,
    words: String,
}

/// A stand-in for a model that reviews code, at 10 tokens per line.
struct Reviewer;

#[async_trait]
impl MainLoop for Reviewer {
    type Request = Review;
    type Output = Opinion;

    async fn execute(
        &self,
        request: Review,
        session: &Session,
        context: &RequestContext,
    ) -> Result<Opinion, ExecuteError> {
        // Reuse the result if an earlier worker got it from the model before it crashed.
        if let Some(before) = session.latest::<PromptExecuted>() {
            let words = before.result.to_string();
            return Ok(Opinion { file: request.file, words });
        }
        context.meter().charge_model(request.lines * 10, 5, 0)?;
        let words = format!("{} lines, all fine", request.lines);
        session
            .publish(PromptExecuted { result: words.as_str().into(), ..Default::default() })
            .await?;
        Ok(Opinion { file: request.file, words })
    }
}

type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

#[tokio::main]
async fn main() -> Result {
    let url = std::env::args().nth(1);
    run(url.as_deref().unwrap_or("embedded:memory")).await.map(drop)
}

/// Each process has its own bus.
async fn bus(backend: &Arc<dyn Backend>) -> Result<Arc<dyn EventBus>> {
    let config = StreamedBusConfig::default();
    Ok(Arc::new(StreamedBus::open(Arc::clone(backend), EventRegistry::builtin(), config).await?))
}

async fn worker(backend: &Arc<dyn Backend>) -> Result<MainLoopWorker> {
    let folds = Folds::none().latest::<PromptExecuted>();
    let sessions = Sessions::new(bus(backend).await?, folds, SessionsConfig::default()).await?;
    Ok(MainLoopWorker::start(sessions, Reviewer, MainLoopConfig::default()).await?)
}

async fn run(url: &str) -> Result<Vec<String>> {
    let backend = connect(url, &Options::default()).await?;
    let workers = [worker(&backend).await?, worker(&backend).await?];
    let config = MainLoopClientConfig::default();
    let desk = MainLoopClient::open(bus(&backend).await?, Requester::new("desk")?, config).await?;

    let mut said = Vec::new();
    for (file, lines) in [("main.rs", 12), ("lib.rs", 40)] {
        let review = Review { file: file.to_owned(), lines };
        let budget = Budget { max_total_tokens: Some(1000), ..Default::default() };
        let submit = Submission::new(review).budget(budget).within(Duration::from_secs(30));
        let done = desk.submit::<_, Opinion>(submit).await?;
        println!("{}: {} ({:?})", done.output.file, done.output.words, done.usage);
        said.push(done.output.words);
    }

    // Submitting the same request again is idempotent, also for other requesters.
    let again = || {
        let review = Review { file: "build.rs".to_owned(), lines: 3 };
        Submission::new(review).id(RequestId::new("build").expect("it is a valid id"))
    };
    let (one, other) =
        tokio::join!(desk.submit::<_, Opinion>(again()), desk.submit::<_, Opinion>(again()));
    assert_eq!(one?.output, other?.output);

    // Exceeds its budget: the run ends at once.
    let huge = Review { file: "generated.rs".to_owned(), lines: 1_000_000 };
    let budget = Budget { max_total_tokens: Some(1000), ..Default::default() };
    let failed = desk.submit::<_, Opinion>(Submission::new(huge).budget(budget)).await;
    let failed = failed.expect_err("it exceeds its budget");
    assert_eq!(failed.failure(), Some(RequestFailure::OverBudget));
    println!("{failed}");

    for worker in &workers {
        worker.stop().await?;
    }
    Ok(said)
}

#[tokio::test]
async fn files_are_reviewed_within_their_budget() -> Result {
    let said = run("embedded:memory").await?;
    assert_eq!(said, ["12 lines, all fine", "40 lines, all fine"]);
    Ok(())
}
