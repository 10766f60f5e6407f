//! The desk against a model endpoint that fails in every way: no issue is quarantined, and each is answered once.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use headwater::desk::model::{LanguageModel, ModelError, ModelPrompt, ResponseStream};
use headwater::desk::{
    Desk, DeskConfig, DeskReply, MemoryLedger, NoTickets, OpenAiConfig, OpenAiModel, ReplyTarget,
    TokenBudget,
};
use headwater::outbound::{Destination, LocalDelivery, OutboxDeliverer};
use headwater_issue::{
    DeliverError, Inbox, InboxConfig, IssueId, IssueRetryPolicy, NewEvent, Nudger, Outbox,
    OutboxConfig, OutboxRow, ProcessingStatus, Store, StoreOptions, Worker, WorkerConfig, connect,
};
use headwater_queue::Queue;
use headwater_stream::Backoff;
use serde_json::json;
use tokio::sync::watch;
use uuid::Uuid;

use crate::support::model::{FakeModel, ModelFault};

const TIMEOUT: Duration = Duration::from_secs(90);

/// Uses `broken` for a number of calls, then `working`.
#[derive(Debug)]
struct RepairedModel {
    broken: OpenAiModel,
    working: OpenAiModel,
    failures: AtomicUsize,
}

#[async_trait]
impl LanguageModel for RepairedModel {
    fn name(&self) -> &str {
        "repaired"
    }

    async fn complete(&self, prompt: &ModelPrompt) -> Result<ResponseStream, ModelError> {
        let left = self
            .failures
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        let model = if left.is_ok() { &self.broken } else { &self.working };
        model.complete(prompt).await
    }
}

#[derive(Default)]
struct DeliveredReplies(Mutex<Vec<(ReplyTarget, String)>>);

#[async_trait]
impl LocalDelivery for DeliveredReplies {
    async fn deliver_reply(
        &self,
        _: &OutboxRow,
        target: ReplyTarget,
        reply: DeskReply,
    ) -> Result<(), DeliverError> {
        self.0.lock().unwrap().push((target, reply.content));
        Ok(())
    }

    async fn publish_event(&self, _: &OutboxRow) -> Result<(), DeliverError> {
        Ok(())
    }
}

fn model(url: &str) -> OpenAiModel {
    OpenAiModel::new(OpenAiConfig {
        total_timeout: Duration::from_secs(10),
        idle_timeout: Duration::from_secs(2),
        attempts_max: 1,
        backoff: Backoff::Fixed(Duration::ZERO),
        ..OpenAiConfig::new(url, "test-model", None)
    })
    .unwrap()
}

async fn run(model: impl LanguageModel + 'static, content: &str) -> Vec<(ReplyTarget, String)> {
    run_within(TokenBudget::default(), model, content).await
}

/// Runs a desk, whose first counted attempt quarantines an issue, until one issue is idle. Returns its replies.
async fn run_within(
    budget: TokenBudget,
    model: impl LanguageModel + 'static,
    content: &str,
) -> Vec<(ReplyTarget, String)> {
    let store = connect("sqlite::memory:", &StoreOptions::default()).await.unwrap();
    let streams = headwater_stream::connect("embedded:memory", &Default::default()).await.unwrap();
    store.ensure_integration("desk", "desk").await.unwrap();
    let nudger = Nudger::new(Arc::clone(&streams));
    let config = DeskConfig {
        quiet: Duration::from_millis(10),
        unreachable_pause: Duration::from_millis(10),
        budget,
        ..DeskConfig::default()
    };
    let inbox = InboxConfig { debounce: config.debounce_window(), ..InboxConfig::default() };
    let inbox = Inbox::new(Arc::clone(&store), nudger.clone(), inbox).unwrap();
    let desk = Desk::new(
        Arc::new(model),
        Arc::new(NoTickets),
        Arc::new(MemoryLedger::default()),
        Arc::clone(&store),
        config,
    );
    let retry = IssueRetryPolicy { attempts_max: 1, ..IssueRetryPolicy::default() };
    let others = WorkerConfig { retry, ..WorkerConfig::default() };
    let worker = Worker::new(Arc::clone(&store), nudger, desk, config.worker(others)).unwrap();
    let (stop, mut stopped) = watch::channel(false);
    let working = tokio::spawn(async move {
        let shutdown = async move { drop(stopped.wait_for(|stop| *stop).await) };
        worker.run(&Queue::new(streams), shutdown).await;
    });

    let ticket = Uuid::now_v7();
    let payload = json!({"event_type": "MESSAGE_RECEIVED", "ticket_id": ticket, "message_id": Uuid::now_v7(),
        "user_id": "ada", "payload": {"content": content, "timestamp": "2026-01-01T00:00:00Z"}});
    let event = NewEvent::new("desk", ticket.to_string(), "MESSAGE_RECEIVED", payload.to_string());
    let issue_id = inbox.record(event).await.unwrap().issue_id;
    wait_until_answered(&store, issue_id, content).await;
    stop.send(true).unwrap();
    working.await.unwrap();

    let delivered = Arc::new(DeliveredReplies::default());
    let destinations = HashMap::from([("desk".to_owned(), Destination::Tickets)]);
    let local = Arc::clone(&delivered) as Arc<dyn LocalDelivery>;
    let deliverer = OutboxDeliverer::new(Arc::clone(&store), destinations, local).unwrap();
    let outbox = Outbox::new(store, deliverer, OutboxConfig::default()).unwrap();
    outbox.run_once().await.unwrap();
    std::mem::take(&mut *delivered.0.lock().unwrap())
}

async fn wait_until_answered(store: &Arc<dyn Store>, issue_id: IssueId, name: &str) {
    let waiting = async {
        loop {
            let issue = store.issue(issue_id).await.unwrap().unwrap();
            assert!(issue.quarantined_at.is_none(), "{name}: {:?}", issue.last_error);
            if issue.status == ProcessingStatus::Idle {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, waiting).await.unwrap_or_else(|_| panic!("{name} in time"));
}

const JSON: &str = "application/json";
const HTML: &str = "text/html";
const PAGE: &str = "<html>Bad gateway</html>";

/// Two responses each: the second run fails as well.
fn faults() -> Vec<(&'static str, Vec<ModelFault>)> {
    let respond = |status, body| vec![ModelFault::Respond(status, JSON, body); 2];
    vec![
        ("case-400", respond(400, r#"{"error":{"message":"Unknown parameter: 'x'","param":"x"}}"#)),
        ("case-401", respond(401, r#"{"error":{"message":"Incorrect API key provided"}}"#)),
        ("case-403", respond(403, r#"{"error":{"message":"Country not supported"}}"#)),
        ("case-404", respond(404, r#"{"error":{"message":"The model `x` does not exist"}}"#)),
        ("case-408", respond(408, "")),
        ("case-422", respond(422, r#"{"detail":[{"type":"missing","loc":["body","n"]}]}"#)),
        ("case-429", respond(429, "")),
        (
            "case-quota",
            respond(429, r#"{"error":{"message":"quota","code":"insufficient_quota"}}"#),
        ),
        ("case-500", respond(500, "")),
        ("case-502", vec![ModelFault::Respond(502, HTML, PAGE); 2]),
        ("case-503", respond(503, "")),
        ("case-529", respond(529, r#"{"error":{"message":"Overloaded"}}"#)),
        ("case-timeout", vec![ModelFault::Stall; 2]),
        ("case-slow", vec![ModelFault::StallMidAnswer; 2]),
        ("case-cut", vec![ModelFault::HangUpMidAnswer; 2]),
        ("case-garbage", vec![ModelFault::Respond(200, "text/event-stream", "data: {\n\n"); 2]),
        ("case-empty", vec![ModelFault::Finish(" \n", "stop"); 2]),
        ("case-no-body", respond(200, "")),
        ("case-html", vec![ModelFault::Respond(200, HTML, PAGE); 2]),
        ("case-redirect", respond(302, "")),
        ("case-length", vec![ModelFault::Finish("The first half of an ans", "length")]),
        // A reasoning model that spends its output tokens before it writes.
        ("case-reasoning", vec![ModelFault::Finish("", "length"); 2]),
        (
            "case-context",
            respond(
                400,
                r#"{"error":{"message":"This model's maximum context length is 8 tokens","code":"context_length_exceeded"}}"#,
            ),
        ),
    ]
}

// The fake model runs on the runtime of the test.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_endpoint_that_fails_in_any_way_quarantines_nothing_and_each_issue_is_answered_once()
 {
    let (fake, url) = FakeModel::open((5, 5)).await.unwrap();
    let cases = faults();
    for (word, faults) in &cases {
        fake.plan(word, faults);
    }
    let results = join_all(cases.iter().map(|(word, _)| run(model(&url), word))).await;
    for ((word, faults), replies) in cases.iter().zip(results) {
        assert_eq!(replies, [(ReplyTarget::Answer, FakeModel::ANSWER.to_owned())], "{word}");
        assert_eq!(fake.requests(word).len(), faults.len() + 1, "{word}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_with_a_tls_or_dns_error_quarantines_nothing() {
    let (_fake, url) = FakeModel::open((5, 5)).await.unwrap();
    let refused = "http://127.0.0.1:1/v1".to_owned();
    let urls = [url.replace("http:", "https:"), "http://no-such-host.invalid/v1".into(), refused];
    let runs = urls.iter().map(|broken| {
        let failures = AtomicUsize::new(2);
        let repaired = RepairedModel { broken: model(broken), working: model(&url), failures };
        run(repaired, "Hello")
    });
    for (replies, broken) in join_all(runs).await.iter().zip(&urls) {
        assert_eq!(replies, &[(ReplyTarget::Answer, FakeModel::ANSWER.to_owned())], "{broken}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_or_endless_answer_is_handed_over_and_never_posted() {
    let (fake, url) = FakeModel::open((5, 5)).await.unwrap();
    let policy =
        r#"{"error":{"message":"Your prompt was flagged","code":"content_policy_violation"}}"#;
    let context = r#"{"error":{"message":"too long","code":"context_length_exceeded"}}"#;
    let cases = [
        ("case-refusal", vec![ModelFault::Refusal]),
        ("case-filter", vec![ModelFault::Finish("The first half of", "content_filter")]),
        ("case-policy", vec![ModelFault::Respond(400, JSON, policy)]),
        ("case-too-long", vec![ModelFault::Respond(400, JSON, context); 9]),
        ("case-endless", vec![ModelFault::Finish("The first half of", "length"); 9]),
    ];
    for (word, faults) in &cases {
        fake.plan(word, faults);
    }
    let results = join_all(cases.iter().map(|(word, _)| run(model(&url), word))).await;
    for ((word, faults), replies) in cases.iter().zip(results) {
        let targets: Vec<ReplyTarget> = replies.iter().map(|(target, _)| *target).collect();
        assert_eq!(targets, [ReplyTarget::Answer, ReplyTarget::HandOver], "{word}: {replies:?}");
        assert!(replies[0].1.contains("A person will take over"), "{word}: {replies:?}");
        assert!(fake.requests(word).len() <= faults.len(), "{word}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_does_not_use_up_the_token_budget_of_an_issue() {
    let (fake, url) = FakeModel::open((5, 5)).await.unwrap();
    // The failures that open the breaker count their prompts; the budget has no room for those of all failures.
    let failures = 12;
    fake.plan("case-budget", &vec![ModelFault::HangUpMidAnswer; failures]);
    let budget = TokenBudget { issue_tokens_max: 6000, ..TokenBudget::default() };
    let content = format!("case-budget {}", "x".repeat(2000));
    let replies = run_within(budget, model(&url), &content).await;
    assert_eq!(replies, [(ReplyTarget::Answer, FakeModel::ANSWER.to_owned())]);
    let requests = fake.requests("case-budget");
    assert_eq!(requests.len(), failures + 1);
    let prompt_tokens = requests[0].body["messages"].to_string().len() / 5;
    assert!(prompt_tokens * failures > 6000, "{prompt_tokens} tokens of a prompt");
}
