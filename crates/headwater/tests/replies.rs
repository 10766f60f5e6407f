//! Delivery of replies to external servers that respond, fail, lose responses and redirect.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod support;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::IntoResponse;
use headwater::desk::{DeskReply, ReplyTarget};
use headwater::outbound::{Destination, LocalDelivery, OutboxDeliverer, sign};
use headwater_issue::{
    Claim, ClaimOptions, DebounceWindow, Deliver, DeliverError, EventLogId, IssueId,
    IssueRetryPolicy, KeyedOutboxRow, NewEvent, NewOutboxRow, Outbox, OutboxConfig, OutboxDelivery,
    OutboxId, OutboxKind, OutboxRow, OutboxSettlement, RunCompletion, Store, StoreOptions, connect,
};
use headwater_stream::Backoff;
use headwater_stream::clock::{Clock, SystemClock, TestClock};
use serde_json::{Value as Json, json};

use crate::support::LIMIT;
use crate::support::receivers::{Fault, OWN_ACCOUNT, Receiver, SeededFaults};

type Header = (&'static str, &'static str);

#[derive(Default)]
struct Server {
    requests: Mutex<Vec<(Method, Uri, HeaderMap, Bytes)>>,
    /// Failures of the next POSTs; afterwards 201.
    failures: Mutex<Vec<(u16, Vec<Header>)>>,
    comments: Mutex<Vec<String>>,
    /// Whether repositories and projects answer 404.
    hides_projects: AtomicBool,
}

impl Server {
    async fn start() -> (Arc<Self>, String) {
        let server = Arc::new(Self::default());
        let router = Router::new().fallback(answer).with_state(Arc::clone(&server));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        (server, format!("http://{address}"))
    }

    fn fail_next(&self, status: u16, headers: &[Header]) {
        self.failures.lock().unwrap().push((status, headers.to_vec()));
    }

    fn posts(&self) -> Vec<(Uri, HeaderMap, Json)> {
        let requests = self.requests.lock().unwrap();
        let posts = requests.iter().filter(|(method, ..)| method == Method::POST);
        posts
            .map(|(_, uri, headers, body)| {
                (uri.clone(), headers.clone(), serde_json::from_slice(body).unwrap())
            })
            .collect()
    }
}

async fn answer(
    State(server): State<Arc<Server>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> axum::response::Response {
    let uri_path = uri.path().to_owned();
    server.requests.lock().unwrap().push((method.clone(), uri, headers, body.clone()));
    let is_hidden = server.hides_projects.load(Ordering::SeqCst);
    if method == Method::GET && (is_hidden || !uri_path.contains("/issues/")) {
        let status = if is_hidden { StatusCode::NOT_FOUND } else { StatusCode::OK };
        return (status, r#"{"id": 1}"#).into_response();
    }
    if method == Method::GET {
        let comments = server.comments.lock().unwrap();
        let comments: Vec<Json> =
            comments.iter().map(|body| json!({"id": 1, "body": body})).collect();
        return axum::Json(comments).into_response();
    }
    let failure = {
        let mut failures = server.failures.lock().unwrap();
        (!failures.is_empty()).then(|| failures.remove(0))
    };
    if let Some((status, extra)) = failure {
        // With a 502 the request was applied nevertheless.
        if status == 502 {
            let json: Json = serde_json::from_slice(&body).unwrap();
            server.comments.lock().unwrap().push(json["body"].as_str().unwrap().to_owned());
        }
        let mut response = (StatusCode::from_u16(status).unwrap(), "no").into_response();
        for (name, value) in extra {
            response.headers_mut().insert(name, value.parse().unwrap());
        }
        return response;
    }
    (StatusCode::CREATED, "{}").into_response()
}

struct NoLocalDelivery;

#[async_trait]
impl LocalDelivery for NoLocalDelivery {
    async fn deliver_reply(
        &self,
        _: &OutboxRow,
        _: ReplyTarget,
        _: DeskReply,
    ) -> Result<(), DeliverError> {
        Err(DeliverError::Dead("not a local delivery".into()))
    }

    async fn publish_event(&self, _: &OutboxRow) -> Result<(), DeliverError> {
        Err(DeliverError::Dead("not a local delivery".into()))
    }
}

async fn store() -> Arc<dyn Store> {
    connect("sqlite::memory:", &StoreOptions::default()).await.unwrap()
}

async fn delivery_to(destination: Destination) -> OutboxDeliverer {
    let destinations = HashMap::from([("it".to_owned(), destination)]);
    OutboxDeliverer::new(store().await, destinations, Arc::new(NoLocalDelivery)).unwrap()
}

fn github(base_url: String) -> Destination {
    Destination::Github {
        base_url,
        token: "hub-token".to_owned().into(),
        secret: "hub-secret".to_owned().into(),
    }
}

fn gitlab(base_url: String) -> Destination {
    Destination::Gitlab {
        base_url,
        token: "lab-token".to_owned().into(),
        secret: "lab-secret".to_owned().into(),
    }
}

fn row(project: &str, issue: &str, content: &str) -> OutboxRow {
    OutboxRow {
        id: OutboxId(1),
        issue_id: IssueId(1),
        integration: "it".into(),
        provider: "any".into(),
        external_project_id: project.into(),
        external_issue_id: issue.into(),
        kind: OutboxKind::Reply,
        target: String::new(),
        idempotency_key: "abc-1-2-0".into(),
        payload: json!({"content": content}).to_string(),
        deliveries: 1,
        attempts: 0,
        crashes: 0,
        created_at: SystemClock.now(),
    }
}

fn redelivered(row: &OutboxRow) -> OutboxRow {
    OutboxRow { deliveries: row.deliveries + 1, ..row.clone() }
}

#[tokio::test]
async fn github_gets_a_comment_with_a_hidden_marker() {
    let (server, url) = Server::start().await;
    let delivery = delivery_to(github(url)).await;
    delivery.deliver(&row("ada/engine", "7", "Hello <b>@ada</b>")).await.unwrap();
    let (uri, headers, body) = &server.posts()[0];
    assert_eq!(uri.path(), "/repos/ada/engine/issues/7/comments");
    assert_eq!(headers["authorization"], "Bearer hub-token");
    assert_eq!(headers["idempotency-key"], "abc-1-2-0");
    let body = body["body"].as_str().unwrap();
    assert!(body.starts_with("Hello &lt;b&gt;@\u{2060}ada&lt;/b&gt;"), "{body}");
    assert!(body.contains("\n\n<!-- headwater:reply abc-1-2-0 "), "{body}");
    assert!(body.ends_with(" -->"), "{body}");
    assert!(!format!("{delivery:?}").contains("hub-token"));
}

#[tokio::test]
async fn a_github_repository_is_addressed_by_its_id() {
    let (server, url) = Server::start().await;
    delivery_to(github(url)).await.deliver(&row("42", "7", "Hello")).await.unwrap();
    assert_eq!(server.posts()[0].0.path(), "/repositories/42/issues/7/comments");
}

#[tokio::test]
async fn gitlab_gets_a_note_for_a_project_id_or_path() {
    let (server, url) = Server::start().await;
    let delivery = delivery_to(gitlab(format!("{url}/"))).await;
    delivery.deliver(&row("17", "7", "Hello")).await.unwrap();
    delivery.deliver(&row("group/sub/project", "8", "/close\nHello")).await.unwrap();
    let posts = server.posts();
    assert_eq!(posts[0].0.path(), "/api/v4/projects/17/issues/7/notes");
    assert_eq!(posts[1].0.path(), "/api/v4/projects/group%2Fsub%2Fproject/issues/8/notes");
    assert_eq!(posts[0].1["private-token"], "lab-token");
    assert!(
        posts[1].2["body"].as_str().unwrap().starts_with("\\/close"),
        "a quick action of the model is escaped"
    );
}

#[tokio::test]
async fn a_callback_is_signed_by_standard_webhooks_with_the_same_id_for_every_attempt() {
    let (server, url) = Server::start().await;
    let secret: secrecy::SecretString = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0".to_owned().into();
    let delivery =
        delivery_to(Destination::Callback { url: format!("{url}/hook"), secret: secret.clone() })
            .await;
    let row = row("p", "7", "Hello");
    delivery.deliver(&row).await.unwrap();
    delivery.deliver(&redelivered(&row)).await.unwrap();
    let requests = server.requests.lock().unwrap();
    for (_, uri, headers, body) in requests.iter() {
        assert_eq!((uri.path(), &headers["webhook-id"]), ("/hook", &"abc-1-2-0".parse().unwrap()));
        let seconds: u64 = headers["webhook-timestamp"].to_str().unwrap().parse().unwrap();
        let expected = sign(&secret, "abc-1-2-0", seconds, body);
        assert_eq!(headers["webhook-signature"], *expected);
        let json: Json = serde_json::from_slice(body).unwrap();
        assert_eq!((&json["type"], &json["data"]["content"]), (&json!("reply"), &json!("Hello")));
    }
    assert_eq!(requests.len(), 2);
}

#[tokio::test]
async fn a_callback_gets_every_kind_of_reply() {
    let (server, url) = Server::start().await;
    let secret = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0".to_owned().into();
    let delivery = delivery_to(Destination::Callback { url, secret }).await;
    let kinds = [
        (ReplyTarget::Answer, "reply"),
        (ReplyTarget::Close, "close"),
        (ReplyTarget::HandOver, "hand_over"),
    ];
    for (target, _) in kinds {
        let row = OutboxRow { target: target.as_str().into(), ..row("p", "7", "Hello") };
        delivery.deliver(&row).await.unwrap();
    }
    let types: Vec<Json> =
        server.posts().into_iter().map(|(.., body)| body["type"].clone()).collect();
    assert_eq!(types, kinds.map(|(_, kind)| json!(kind)));
}

#[tokio::test]
async fn permanent_errors_are_dead_and_transient_errors_are_retried() {
    let (server, url) = Server::start().await;
    let delivery = delivery_to(github(url)).await;
    let limited = [("x-ratelimit-remaining", "0")];
    let later = [("retry-after", "60")];
    // An invalid token and a moved server concern the integration, denied access perhaps only one project.
    for (status, headers, dead) in [
        (400, &[][..], true),
        (401, &[], false),
        (403, &[], false),
        (404, &[], true),
        (410, &[], true),
        (422, &[], true),
        (301, &[], false),
        (403, &limited, false),
        (403, &later, false),
        (408, &[], false),
        (429, &later, false),
        (500, &[], false),
        (503, &[], false),
    ] {
        server.fail_next(status, headers);
        let error = delivery.deliver(&row("ada/engine", "7", "Hello")).await.unwrap_err();
        assert_eq!(matches!(error, DeliverError::Dead(_)), dead, "{status}: {error}");
        let held = matches!(status, 301 | 401);
        assert_eq!(matches!(error, DeliverError::Held(_)), held, "{status}: {error}");
        let denied = status == 403 && headers.is_empty();
        assert_eq!(matches!(error, DeliverError::Denied(_)), denied, "{status}: {error}");
        assert!(!error.to_string().contains("hub-token"));
    }
    // Connection refused.
    let unreachable = github("http://127.0.0.1:1".into());
    let error =
        delivery_to(unreachable).await.deliver(&row("ada/engine", "7", "Hello")).await.unwrap_err();
    assert!(matches!(error, DeliverError::Retry(_)), "{error}");
}

#[tokio::test]
async fn replies_to_a_project_that_the_token_cannot_see_are_held() {
    let (server, url) = Server::start().await;
    for destination in [github(url.clone()), gitlab(url.clone())] {
        let delivery = delivery_to(destination).await;
        let row = row("ada/engine", "7", "Hello");
        server.hides_projects.store(true, Ordering::SeqCst);
        // A repeated attempt searches the comments first, which are hidden as well.
        for row in [row.clone(), redelivered(&row)] {
            server.fail_next(404, &[]);
            let error = delivery.deliver(&row).await.unwrap_err();
            let names_it = |text: &str| text.contains("`ada/engine`") && text.contains("access");
            assert!(matches!(&error, DeliverError::Denied(text) if names_it(text)), "{error}");
        }
        server.failures.lock().unwrap().clear();

        // The project exists, so the issue was deleted.
        server.hides_projects.store(false, Ordering::SeqCst);
        server.fail_next(404, &[]);
        let error = delivery.deliver(&row).await.unwrap_err();
        assert!(matches!(error, DeliverError::Dead(_)), "{error}");
        delivery.deliver(&row).await.unwrap();
    }
}

#[tokio::test]
async fn a_comment_whose_response_was_lost_is_not_posted_again() {
    let (server, url) = Server::start().await;
    for destination in [github(url.clone()), gitlab(url.clone())] {
        let delivery = delivery_to(destination).await;
        let posts_before = server.posts().len();
        server.comments.lock().unwrap().clear();
        server.fail_next(502, &[]);
        let row = row("ada/engine", "7", "Hello");
        assert!(matches!(delivery.deliver(&row).await, Err(DeliverError::Retry(_))));
        delivery.deliver(&redelivered(&row)).await.unwrap();
        assert_eq!(server.posts().len() - posts_before, 1, "found by its marker");

        // A comment that was not stored is posted again.
        server.comments.lock().unwrap().clear();
        delivery.deliver(&redelivered(&redelivered(&row))).await.unwrap();
        assert_eq!(server.posts().len() - posts_before, 2);
    }
}

#[tokio::test]
async fn project_and_issue_names_cannot_change_the_url_path() {
    let (server, url) = Server::start().await;
    let delivery = delivery_to(github(url)).await;
    for (project, issue) in [
        ("ada", "7"),
        ("ada/engine/x", "7"),
        ("../admin", "7"),
        ("ada/engine", "7/../../x"),
        ("ada/engine", "x"),
        ("", ""),
    ] {
        let error = delivery.deliver(&row(project, issue, "Hello")).await.unwrap_err();
        assert!(matches!(error, DeliverError::Dead(_)), "{project} {issue}: {error}");
    }
    delivery.deliver(&row("ada?x=1/engine#y", "7", "Hello")).await.unwrap();
    let posts = server.posts();
    assert_eq!(posts.len(), 1);
    assert_eq!(posts[0].0.to_string(), "/repos/ada%3Fx%3D1/engine%23y/issues/7/comments");
}

#[tokio::test]
async fn invalid_rows_are_dead_with_a_reason() {
    let (_server, url) = Server::start().await;
    let delivery = delivery_to(github(url)).await;
    let good = row("ada/engine", "7", "Hello");
    for (row, reason) in [
        (OutboxRow { payload: "[]".into(), ..good.clone() }, "content"),
        (OutboxRow { target: "elsewhere".into(), ..good.clone() }, "unknown reply target"),
        (OutboxRow { integration: "gone".into(), ..good.clone() }, "no longer configured"),
    ] {
        let error = delivery.deliver(&row).await.unwrap_err();
        assert!(matches!(&error, DeliverError::Dead(text) if text.contains(reason)), "{error}");
    }
    let problem = "set reply_token_env".to_owned();
    let unconfigured = delivery_to(Destination::Unconfigured { problem }).await;
    let error = unconfigured.deliver(&good).await.unwrap_err();
    assert_eq!(error, DeliverError::Dead("set reply_token_env".into()));
}

#[tokio::test]
async fn a_reply_that_was_stale_at_commit_is_not_sent() {
    let (server, url) = Server::start().await;
    let clock = TestClock::default();
    let options = StoreOptions { clock: Arc::new(clock.clone()), ..StoreOptions::default() };
    let store = connect("sqlite::memory:", &options).await.unwrap();
    store.ensure_integration("it", "github").await.unwrap();
    let event = |key: &str| NewEvent {
        dedup_key: Some(key.into()),
        ..NewEvent::new("it", "7", "note", "{}")
    };
    let record = async |key: &str| {
        store.record(&[event(key)], &DebounceWindow::default()).await.remove(0).unwrap()
    };
    // Claims the issue, records `meanwhile`, and completes the run with replies that have seen events up to `up_to`.
    let run = async |meanwhile: &str, logs: &[EventLogId], up_to: &[Option<EventLogId>]| {
        let options = ClaimOptions::new("worker");
        let Claim::Won(claimed) = store.claim(&[IssueId(1)], &options).await.unwrap().remove(0)
        else {
            panic!("the issue cannot be claimed")
        };
        let meanwhile = record(meanwhile).await.event_log_id;
        let reply = |up_to: &Option<EventLogId>| NewOutboxRow {
            kind: OutboxKind::Reply,
            target: ReplyTarget::Answer.as_str().to_owned(),
            payload: json!({"content": "Hello", "up_to": up_to.map(|id| id.0)}).to_string(),
        };
        let completion = RunCompletion {
            issue_id: claimed.issue.id,
            epoch: claimed.epoch,
            event_log_ids: logs.to_vec(),
            outbox: up_to.iter().map(reply).collect(),
            ..RunCompletion::default()
        };
        store.complete(&[completion]).await.unwrap();
        meanwhile
    };
    let destinations = HashMap::from([("it".to_owned(), github(url))]);
    let delivery =
        OutboxDeliverer::new(Arc::clone(&store), destinations, Arc::new(NoLocalDelivery)).unwrap();
    let destinations = HashMap::from([("it".to_owned(), Destination::Tickets)]);
    let tickets =
        OutboxDeliverer::new(Arc::clone(&store), destinations, Arc::new(NoLocalDelivery)).unwrap();
    let deliver_all = async || {
        while let Some(row) =
            store.take_outbox("me", 1, Duration::from_secs(60)).await.unwrap().pop()
        {
            let (id, deliveries) = (row.id, row.deliveries);
            let row = OutboxRow { external_project_id: "ada/engine".into(), ..row };
            delivery.deliver(&row).await.unwrap();
            let hand_over = OutboxRow { target: ReplyTarget::HandOver.as_str().into(), ..row };
            let delivered = tickets.deliver(&hand_over).await;
            assert!(delivered.is_err(), "a hand-over is never stale, so it reaches the tickets");
            let delivery = OutboxDelivery::Delivered;
            let settlement = OutboxSettlement { id, deliveries, delivery };
            store.settle_outbox(&[settlement]).await.unwrap();
        }
    };
    let first = record("1").await.event_log_id;
    let second = EventLogId(first.0 + 1);
    // Of three replies, one has not seen the newer event, one has, and one is always sent.
    let came = run("2", &[first], &[Some(first), Some(second), None]).await;
    assert_eq!(came, second);
    deliver_all().await;
    assert_eq!(
        server.posts().len(),
        2,
        "the second event was recorded before the first reply was committed"
    );
    // A reply committed before the newest event is sent, even if the clock was set back in between.
    let third = EventLogId(second.0 + 1);
    run("3", &[second, third], &[Some(third)]).await;
    clock.step_back(Duration::from_secs(3600));
    record("4").await;
    deliver_all().await;
    assert_eq!(server.posts().len(), 3);
}

const COMMENTS: &str = "/repos/ada/engine/issues/7/comments";
const NOTES: &str = "/api/v4/projects/ada%2Fengine/issues/7/notes";

#[tokio::test]
async fn every_form_of_retry_after_pauses_the_delivery() {
    let (receiver, url) = Receiver::start().await.unwrap();
    let secret = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0".to_owned().into();
    let callback = Destination::Callback { url: format!("{url}/hook"), secret };
    let deliveries = [delivery_to(github(url.clone())).await, delivery_to(callback).await];
    let (now, in_90_s) = ("Sun, 01 Nov 2026 08:00:00 GMT", "Sun, 01 Nov 2026 08:01:30 GMT");
    for (status, headers, seconds) in [
        (429, vec![("retry-after", "120")], 120),
        (503, vec![("retry-after", "120")], 120),
        (403, vec![("retry-after", "120")], 120),
        (429, vec![("retry-after", in_90_s), ("date", now)], 90),
        (503, vec![("retry-after", in_90_s), ("date", now)], 90),
        (429, vec![("retry-after", "86400")], 3600),
        (
            403,
            vec![
                ("x-ratelimit-remaining", "0"),
                ("x-ratelimit-reset", "1793520040"),
                ("date", now),
            ],
            40,
        ),
    ] {
        for delivery in &deliveries {
            let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned()));
            receiver.fail_next(Fault::Respond(status, headers.collect()));
            let error = delivery.deliver(&row("ada/engine", "7", "Hello")).await.unwrap_err();
            let DeliverError::Paused { after, .. } = error else { panic!("{status}: {error}") };
            assert_eq!(after.as_secs(), seconds, "{status}");
        }
    }
    receiver
        .fail_next(Fault::RespondWithBody(403, "You have exceeded a secondary rate limit. Wait."));
    let error = deliveries[0].deliver(&row("ada/engine", "7", "Hello")).await.unwrap_err();
    assert!(matches!(error, DeliverError::Paused { after, .. } if after.as_secs() == 60));
    assert!(receiver.accepted().is_empty());
}

#[tokio::test]
async fn a_posted_reply_is_found_among_many_older_and_newer_comments() {
    for (thread, destination) in [(COMMENTS, github as fn(String) -> _), (NOTES, gitlab)] {
        let (receiver, url) = Receiver::start().await.unwrap();
        let delivery = delivery_to(destination(url)).await;
        let row = row("ada/engine", "7", "Hello");
        let others = |count| (0..count).for_each(|_| receiver.add_comment(thread, 1, "me too"));
        others(1250);
        receiver.fail_next(Fault::LoseResponse);
        assert!(matches!(delivery.deliver(&row).await, Err(DeliverError::Retry(_))));
        others(1250);
        delivery.deliver(&redelivered(&row)).await.unwrap();
        assert_eq!(receiver.accepted().len(), 1, "found on page 13 of {thread}");
    }
}

#[tokio::test]
async fn comments_older_than_the_reply_are_not_searched() {
    for (thread, destination) in [(COMMENTS, github as fn(String) -> _), (NOTES, gitlab)] {
        let (receiver, url) = Receiver::start().await.unwrap();
        let delivery = delivery_to(destination(url)).await;
        let long_ago = SystemClock.now().before(Duration::from_secs(48 * 60 * 60));
        (0..10_001).for_each(|_| receiver.add_comment_at(thread, 1, "me too", long_ago));
        receiver.add_comment(thread, 1, "me too");
        delivery.deliver(&redelivered(&row("ada/engine", "7", "Hello"))).await.unwrap();
        assert_eq!((receiver.accepted().len(), receiver.requests().len()), (1, 2), "{thread}");
    }
}

#[tokio::test]
async fn a_reply_is_not_posted_if_there_are_too_many_comments_to_search() {
    let (receiver, url) = Receiver::start().await.unwrap();
    let delivery = delivery_to(github(url)).await;
    (0..10_001).for_each(|_| receiver.add_comment(COMMENTS, 1, "me too"));
    let error = delivery.deliver(&redelivered(&row("ada/engine", "7", "Hello"))).await.unwrap_err();
    assert!(matches!(&error, DeliverError::Retry(text) if text.contains("10000")), "{error}");
    assert!(receiver.accepted().is_empty());
}

#[tokio::test]
async fn only_a_comment_of_the_desk_counts_as_delivered() {
    for (thread, destination) in [(COMMENTS, github as fn(String) -> _), (NOTES, gitlab)] {
        let (receiver, url) = Receiver::start().await.unwrap();
        let delivery = delivery_to(destination(url)).await;
        let row = row("ada/engine", "7", "Hello");
        let forged = "<!-- headwater:reply abc-1-2-0 -->";
        receiver.add_comment(thread, 1, forged);
        receiver.add_comment(
            thread,
            1,
            forged.replace(" -->", " 00112233445566778899aabbccddeeff -->"),
        );
        delivery.deliver(&redelivered(&row)).await.unwrap();
        assert_eq!(receiver.accepted().len(), 1, "a comment of another account does not count");
        delivery.deliver(&redelivered(&row)).await.unwrap();
        assert_eq!(receiver.accepted().len(), 1, "the desk's own comment counts, by its marker");

        // Also a comment of the own account with a marker of an older secret.
        let (receiver, url) = Receiver::start().await.unwrap();
        let delivery = delivery_to(destination(url)).await;
        receiver.add_comment(thread, OWN_ACCOUNT, forged);
        delivery.deliver(&redelivered(&row)).await.unwrap();
        assert_eq!(receiver.accepted().len(), 0, "written by the own account");
    }
}

#[tokio::test]
async fn a_renamed_repository_gets_each_reply_once() {
    let (receiver, url) = Receiver::start().await.unwrap();
    let delivery = delivery_to(github(url)).await;
    receiver.rename("/repos/ada/engine/", "/repositories/42/");
    let row = row("ada/engine", "7", "Hello");
    receiver.fail_next(Fault::LoseResponse);
    assert!(matches!(delivery.deliver(&row).await, Err(DeliverError::Retry(_))));
    delivery.deliver(&redelivered(&row)).await.unwrap();
    let accepted = receiver.accepted();
    assert_eq!(accepted.len(), 1, "found behind the redirect");
    assert_eq!(accepted[0].path, "/repositories/42/issues/7/comments");
    assert_eq!((accepted[0].content(), accepted[0].key.as_str()), ("Hello", "abc-1-2-0"));
    assert_eq!(accepted[0].headers["authorization"], "Bearer hub-token");
}

#[tokio::test]
async fn every_redirect_on_the_same_host_keeps_method_and_body() {
    let (receiver, url) = Receiver::start().await.unwrap();
    let secret = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0".to_owned().into();
    let delivery = delivery_to(Destination::Callback { url: format!("{url}/hook"), secret }).await;
    for status in [301, 302, 307, 308] {
        receiver.fail_next(Fault::Respond(status, vec![("location", "/moved".to_owned())]));
        delivery.deliver(&row("p", "7", "Hello")).await.unwrap();
        let accepted = receiver.accepted().pop().unwrap();
        assert_eq!((accepted.path.as_str(), accepted.content()), ("/moved", "Hello"), "{status}");
    }
    // An endless redirect loop is an error.
    receiver.rename("/loop", "/loop");
    receiver.fail_next(Fault::Respond(307, vec![("location", "/loop".to_owned())]));
    let error = delivery.deliver(&row("p", "7", "Hello")).await.unwrap_err();
    assert!(matches!(&error, DeliverError::Retry(text) if text.contains("redirects")), "{error}");
    assert_eq!(receiver.accepted().len(), 4);
}

#[tokio::test]
async fn a_redirect_to_another_host_is_not_followed_and_gets_no_token() {
    let ((receiver, url), (other, other_url)) =
        (Receiver::start().await.unwrap(), Receiver::start().await.unwrap());
    let delivery = delivery_to(github(url)).await;
    for status in [301, 308, 302, 307] {
        let location = format!("{other_url}/repos/ada/engine/issues/7/comments");
        receiver.fail_next(Fault::Respond(status, vec![("location", location)]));
        let error = delivery.deliver(&row("ada/engine", "7", "Hello")).await.unwrap_err();
        assert!(matches!(error, DeliverError::Held(_)), "{status}: {error}");
        assert!(error.to_string().contains("base_url"), "{error}");
    }
    assert!(other.requests().is_empty());
    assert!(receiver.accepted().is_empty());
}

#[tokio::test]
async fn each_comment_is_posted_once_despite_receiver_faults() {
    let (receiver, url) = Receiver::start().await.unwrap();
    receiver.fail_randomly(SeededFaults::new(15, 40));
    let store = store().await;
    store.ensure_integration("it", "github").await.unwrap();
    let issues = 1..=20;
    for issue in issues.clone() {
        let event = NewEvent {
            external_project_id: "ada/engine".into(),
            ..NewEvent::new("it", issue.to_string(), "note", "{}")
        };
        let recorded = store.record(&[event], &DebounceWindow::default()).await.remove(0).unwrap();
        let payload = json!({"content": format!("ACK {issue}")}).to_string();
        let row = NewOutboxRow { kind: OutboxKind::Reply, target: String::new(), payload };
        let mut transaction = store.begin().await.unwrap();
        let rows = [KeyedOutboxRow { key: "1".into(), row }];
        transaction.write_outbox(recorded.issue_id, &rows).await.unwrap();
        transaction.commit().await.unwrap();
    }
    let destinations = HashMap::from([("it".to_owned(), github(url))]);
    let delivery =
        OutboxDeliverer::new(Arc::clone(&store), destinations, Arc::new(NoLocalDelivery)).unwrap();
    let backoff_max = Duration::from_millis(50);
    let retry = IssueRetryPolicy {
        attempts_max: 1000,
        backoff: Backoff::Fixed(backoff_max),
        ..IssueRetryPolicy::default()
    };
    let config = OutboxConfig { retry, every: backoff_max, ..OutboxConfig::default() };
    let outbox = Outbox::new(Arc::clone(&store), delivery, config).unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(async move { outbox.run(async { drop(stopped.await) }).await });
    let deadline = Instant::now() + LIMIT;
    while store.backlog().await.unwrap().outbox_pending > 0 {
        assert!(Instant::now() < deadline, "{:?}", receiver.effects());
        tokio::time::sleep(backoff_max).await;
    }
    drop(stop);
    running.await.unwrap();
    let effects = receiver.effects();
    assert_eq!(effects.len(), issues.clone().count());
    assert!(effects.values().all(|count| *count == 1), "{effects:?}");
    for issue in issues {
        let comments = receiver.comments(&format!("/repos/ada/engine/issues/{issue}/comments"));
        assert_eq!(comments.len(), 1);
        assert!(comments[0].starts_with(&format!("ACK {issue}\n")), "{comments:?}");
    }
}
