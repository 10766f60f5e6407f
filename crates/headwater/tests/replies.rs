//! Replies on their way to servers of others, which answer, refuse, lose answers and repeat.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod support;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::IntoResponse;
use headwater::desk::{Reply, ReplyTarget};
use headwater::outbound::{Destination, Inside, Replies, sign};
use headwater_issue::{
    Claim, ClaimOptions, Completion, Deliver, DeliverError, Delivery, EventLogId, IssueId,
    KeyedOutbox, NewEvent, NewOutbox, Outbox, OutboxConfig, OutboxId, OutboxKind, OutboxRow,
    OutboxSettlement, Quiet, RetryPolicy, Store, StoreOptions, connect,
};
use headwater_stream::clock::{Clock, SystemClock, TestClock};
use serde_json::{Value as Json, json};

use crate::support::LIMIT;
use crate::support::receivers::{Fault, OUR_ACCOUNT, Receiver, Seeded};

type Header = (&'static str, &'static str);

#[derive(Default)]
struct Server {
    requests: Mutex<Vec<(Method, Uri, HeaderMap, Bytes)>>,
    /// What to answer to the next posts; then 201.
    refusals: Mutex<Vec<(u16, Vec<Header>)>>,
    comments: Mutex<Vec<String>>,
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

    fn refuse(&self, status: u16, headers: &[Header]) {
        self.refusals.lock().unwrap().push((status, headers.to_vec()));
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
    server.requests.lock().unwrap().push((method.clone(), uri, headers, body.clone()));
    if method == Method::GET {
        let comments = server.comments.lock().unwrap();
        let comments: Vec<Json> =
            comments.iter().map(|body| json!({"id": 1, "body": body})).collect();
        return axum::Json(comments).into_response();
    }
    let refusal = {
        let mut refusals = server.refusals.lock().unwrap();
        (!refusals.is_empty()).then(|| refusals.remove(0))
    };
    if let Some((status, extra)) = refusal {
        // A server that fails may have done the work all the same.
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

struct NoInside;

#[async_trait]
impl Inside for NoInside {
    async fn reply(&self, _: &OutboxRow, _: ReplyTarget, _: Reply) -> Result<(), DeliverError> {
        Err(DeliverError::Dead("not inside".into()))
    }

    async fn event(&self, _: &OutboxRow) -> Result<(), DeliverError> {
        Err(DeliverError::Dead("not inside".into()))
    }
}

async fn store() -> Arc<dyn Store> {
    connect("sqlite::memory:", &StoreOptions::default()).await.unwrap()
}

async fn replies(destination: Destination) -> Replies {
    let destinations = HashMap::from([("it".to_owned(), destination)]);
    Replies::new(store().await, destinations, Arc::new(NoInside)).unwrap()
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

fn again(row: &OutboxRow) -> OutboxRow {
    OutboxRow { deliveries: row.deliveries + 1, ..row.clone() }
}

#[tokio::test]
async fn github_gets_a_comment_with_a_hidden_mark() {
    let (server, url) = Server::start().await;
    let replies = replies(github(url)).await;
    replies.deliver(&row("ada/engine", "7", "Hello <b>@ada</b>")).await.unwrap();
    let (uri, headers, body) = &server.posts()[0];
    assert_eq!(uri.path(), "/repos/ada/engine/issues/7/comments");
    assert_eq!(headers["authorization"], "Bearer hub-token");
    assert_eq!(headers["idempotency-key"], "abc-1-2-0");
    let body = body["body"].as_str().unwrap();
    assert!(body.starts_with("Hello &lt;b&gt;@\u{2060}ada&lt;/b&gt;"), "{body}");
    assert!(body.contains("\n\n<!-- headwater:reply abc-1-2-0 "), "{body}");
    assert!(body.ends_with(" -->"), "{body}");
    assert!(!format!("{replies:?}").contains("hub-token"));
}

#[tokio::test]
async fn gitlab_gets_a_note_below_its_project_whether_number_or_path() {
    let (server, url) = Server::start().await;
    let replies = replies(gitlab(format!("{url}/"))).await;
    replies.deliver(&row("17", "7", "Hello")).await.unwrap();
    replies.deliver(&row("group/sub/project", "8", "/close\nHello")).await.unwrap();
    let posts = server.posts();
    assert_eq!(posts[0].0.path(), "/api/v4/projects/17/issues/7/notes");
    assert_eq!(posts[1].0.path(), "/api/v4/projects/group%2Fsub%2Fproject/issues/8/notes");
    assert_eq!(posts[0].1["private-token"], "lab-token");
    assert!(
        posts[1].2["body"].as_str().unwrap().starts_with("\\/close"),
        "no command of a model is carried out"
    );
}

#[tokio::test]
async fn a_callback_is_signed_by_standard_webhooks_with_the_same_id_at_every_try() {
    let (server, url) = Server::start().await;
    let secret: secrecy::SecretString = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0".to_owned().into();
    let replies =
        replies(Destination::Callback { url: format!("{url}/hook"), secret: secret.clone() }).await;
    let row = row("p", "7", "Hello");
    replies.deliver(&row).await.unwrap();
    replies.deliver(&again(&row)).await.unwrap();
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
async fn a_callback_is_told_of_everything_that_a_run_decides() {
    let (server, url) = Server::start().await;
    let secret = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0".to_owned().into();
    let replies = replies(Destination::Callback { url, secret }).await;
    let kinds = [
        (ReplyTarget::Answer, "reply"),
        (ReplyTarget::Close, "close"),
        (ReplyTarget::HandOver, "hand_over"),
    ];
    for (target, _) in kinds {
        let row = OutboxRow { target: target.as_str().into(), ..row("p", "7", "Hello") };
        replies.deliver(&row).await.unwrap();
    }
    let told: Vec<Json> =
        server.posts().into_iter().map(|(.., body)| body["type"].clone()).collect();
    assert_eq!(told, kinds.map(|(_, kind)| json!(kind)));
}

#[tokio::test]
async fn what_cannot_succeed_is_dead_and_what_may_is_tried_again() {
    let (server, url) = Server::start().await;
    let replies = replies(github(url)).await;
    let limited = [("x-ratelimit-remaining", "0")];
    let later = [("retry-after", "60")];
    for (status, headers, dead) in [
        (400, &[][..], true),
        (401, &[], true),
        (403, &[], true),
        (404, &[], true),
        (410, &[], true),
        (422, &[], true),
        (301, &[], true),
        (403, &limited, false),
        (403, &later, false),
        (408, &[], false),
        (429, &later, false),
        (500, &[], false),
        (503, &[], false),
    ] {
        server.refuse(status, headers);
        let error = replies.deliver(&row("ada/engine", "7", "Hello")).await.unwrap_err();
        assert_eq!(matches!(error, DeliverError::Dead(_)), dead, "{status}: {error}");
        assert!(!error.to_string().contains("hub-token"));
    }
    // Nobody there at all.
    let nobody = github("http://127.0.0.1:1".into());
    let error =
        replies_to(nobody).await.deliver(&row("ada/engine", "7", "Hello")).await.unwrap_err();
    assert!(matches!(error, DeliverError::Retry(_)), "{error}");
}

async fn replies_to(destination: Destination) -> Replies {
    replies(destination).await
}

#[tokio::test]
async fn a_comment_that_arrived_though_its_answer_did_not_is_not_posted_again() {
    let (server, url) = Server::start().await;
    for destination in [github(url.clone()), gitlab(url.clone())] {
        let replies = replies(destination).await;
        let posts_before = server.posts().len();
        server.comments.lock().unwrap().clear();
        server.refuse(502, &[]);
        let row = row("ada/engine", "7", "Hello");
        assert!(matches!(replies.deliver(&row).await, Err(DeliverError::Retry(_))));
        replies.deliver(&again(&row)).await.unwrap();
        assert_eq!(server.posts().len() - posts_before, 1, "found by its mark");

        // One that did not arrive is posted again.
        server.comments.lock().unwrap().clear();
        replies.deliver(&again(&again(&row))).await.unwrap();
        assert_eq!(server.posts().len() - posts_before, 2);
    }
}

#[tokio::test]
async fn names_of_projects_and_issues_cannot_lead_elsewhere() {
    let (server, url) = Server::start().await;
    let replies = replies(github(url)).await;
    for (project, issue) in [
        ("ada", "7"),
        ("ada/engine/x", "7"),
        ("../admin", "7"),
        ("ada/engine", "7/../../x"),
        ("ada/engine", "x"),
        ("", ""),
    ] {
        let error = replies.deliver(&row(project, issue, "Hello")).await.unwrap_err();
        assert!(matches!(error, DeliverError::Dead(_)), "{project} {issue}: {error}");
    }
    replies.deliver(&row("ada?x=1/engine#y", "7", "Hello")).await.unwrap();
    let posts = server.posts();
    assert_eq!(posts.len(), 1);
    assert_eq!(posts[0].0.to_string(), "/repos/ada%3Fx%3D1/engine%23y/issues/7/comments");
}

#[tokio::test]
async fn rows_that_make_no_sense_are_dead_with_a_reason() {
    let (_server, url) = Server::start().await;
    let replies = replies(github(url)).await;
    let good = row("ada/engine", "7", "Hello");
    for (row, reason) in [
        (OutboxRow { payload: "[]".into(), ..good.clone() }, "content"),
        (OutboxRow { target: "elsewhere".into(), ..good.clone() }, "no target"),
        (OutboxRow { integration: "gone".into(), ..good.clone() }, "no [[integration]]"),
    ] {
        let error = replies.deliver(&row).await.unwrap_err();
        assert!(matches!(&error, DeliverError::Dead(text) if text.contains(reason)), "{error}");
    }
    let problem = "set reply_token_env".to_owned();
    let nowhere = replies_to(Destination::Nowhere { problem }).await;
    let error = nowhere.deliver(&good).await.unwrap_err();
    assert_eq!(error, DeliverError::Dead("set reply_token_env".into()));
}

#[tokio::test]
async fn a_reply_that_was_stale_when_it_was_committed_is_not_sent() {
    let (server, url) = Server::start().await;
    let clock = TestClock::default();
    let options = StoreOptions { clock: Arc::new(clock.clone()), ..StoreOptions::default() };
    let store = connect("sqlite::memory:", &options).await.unwrap();
    store.ensure_integration("it", "github").await.unwrap();
    let event = |key: &str| NewEvent {
        dedup_key: Some(key.into()),
        ..NewEvent::new("it", "7", "note", "{}")
    };
    let record =
        async |key: &str| store.record(&[event(key)], &Quiet::default()).await.remove(0).unwrap();
    // Claims the issue, lets something happen, and completes the run with replies that have seen events up to these.
    let run = async |meanwhile: &str, logs: &[EventLogId], up_to: &[Option<EventLogId>]| {
        let options = ClaimOptions::new("worker");
        let Claim::Won(claimed) = store.claim(&[IssueId(1)], &options).await.unwrap().remove(0)
        else {
            panic!("the issue is not to be had")
        };
        let meanwhile = record(meanwhile).await.event_log_id;
        let reply = |up_to: &Option<EventLogId>| NewOutbox {
            kind: OutboxKind::Reply,
            target: ReplyTarget::Answer.as_str().to_owned(),
            payload: json!({"content": "Hello", "up_to": up_to.map(|id| id.0)}).to_string(),
        };
        let completion = Completion {
            issue_id: claimed.issue.id,
            epoch: claimed.epoch,
            event_log_ids: logs.to_vec(),
            outbox: up_to.iter().map(reply).collect(),
            ..Completion::default()
        };
        store.complete(&[completion]).await.unwrap();
        meanwhile
    };
    let destinations = HashMap::from([("it".to_owned(), github(url))]);
    let replies = Replies::new(Arc::clone(&store), destinations, Arc::new(NoInside)).unwrap();
    let deliver_all = async || {
        while let Some(row) =
            store.take_outbox("me", 1, Duration::from_secs(60)).await.unwrap().pop()
        {
            let (id, deliveries) = (row.id, row.deliveries);
            let row = OutboxRow { external_project_id: "ada/engine".into(), ..row };
            replies.deliver(&row).await.unwrap();
            let delivery = Delivery::Delivered;
            let settlement = OutboxSettlement { id, deliveries, delivery };
            store.settle_outbox(&[settlement]).await.unwrap();
        }
    };
    let first = record("1").await.event_log_id;
    let second = EventLogId(first.0 + 1);
    // Of three replies, one has not seen what came meanwhile, one has, and one does not care.
    let came = run("2", &[first], &[Some(first), Some(second), None]).await;
    assert_eq!(came, second);
    deliver_all().await;
    assert_eq!(server.posts().len(), 2, "the second event had come before the first reply");
    // One that was committed before the newest event came is sent, also if the clock was set back in between.
    let third = EventLogId(second.0 + 1);
    run("3", &[second, third], &[Some(third)]).await;
    clock.step_back(Duration::from_secs(3600));
    record("4").await;
    deliver_all().await;
    assert_eq!(server.posts().len(), 3);
}

const THREAD: &str = "/repos/ada/engine/issues/7/comments";
const NOTES: &str = "/api/v4/projects/ada%2Fengine/issues/7/notes";

#[tokio::test]
async fn a_pause_that_the_receiver_asks_for_is_told_to_the_outbox_in_every_form() {
    let (receiver, url) = Receiver::start().await.unwrap();
    let secret = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0".to_owned().into();
    let callback = Destination::Callback { url: format!("{url}/hook"), secret };
    let replies = [replies(github(url.clone())).await, replies_to(callback).await];
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
        for replies in &replies {
            let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned()));
            receiver.fail_next(Fault::Refuse(status, headers.collect()));
            let error = replies.deliver(&row("ada/engine", "7", "Hello")).await.unwrap_err();
            let DeliverError::Paused { after, .. } = error else { panic!("{status}: {error}") };
            assert_eq!(after.as_secs(), seconds, "{status}");
        }
    }
    receiver.fail_next(Fault::Say(403, "You have exceeded a secondary rate limit. Wait."));
    let error = replies[0].deliver(&row("ada/engine", "7", "Hello")).await.unwrap_err();
    assert!(matches!(error, DeliverError::Paused { after, .. } if after.as_secs() == 60));
    assert!(receiver.accepted().is_empty());
}

#[tokio::test]
async fn a_reply_is_found_however_many_comments_came_after_it_and_before() {
    for (thread, destination) in [(THREAD, github as fn(String) -> _), (NOTES, gitlab)] {
        let (receiver, url) = Receiver::start().await.unwrap();
        let replies = replies(destination(url)).await;
        let row = row("ada/engine", "7", "Hello");
        let others = |count| (0..count).for_each(|_| receiver.add_comment(thread, 1, "me too"));
        others(1250);
        receiver.fail_next(Fault::LoseResponse);
        assert!(matches!(replies.deliver(&row).await, Err(DeliverError::Retry(_))));
        others(1250);
        replies.deliver(&again(&row)).await.unwrap();
        assert_eq!(receiver.accepted().len(), 1, "found on page 13 of {thread}");
    }
}

#[tokio::test]
async fn comments_from_before_the_reply_are_not_searched() {
    for (thread, destination) in [(THREAD, github as fn(String) -> _), (NOTES, gitlab)] {
        let (receiver, url) = Receiver::start().await.unwrap();
        let replies = replies(destination(url)).await;
        let long_ago = SystemClock.now().before(Duration::from_secs(48 * 60 * 60));
        (0..10_001).for_each(|_| receiver.add_comment_at(thread, 1, "me too", long_ago));
        receiver.add_comment(thread, 1, "me too");
        replies.deliver(&again(&row("ada/engine", "7", "Hello"))).await.unwrap();
        assert_eq!((receiver.accepted().len(), receiver.requests().len()), (1, 2), "{thread}");
    }
}

#[tokio::test]
async fn a_reply_is_not_posted_into_a_thread_that_is_too_long_to_search() {
    let (receiver, url) = Receiver::start().await.unwrap();
    let replies = replies(github(url)).await;
    (0..10_001).for_each(|_| receiver.add_comment(THREAD, 1, "me too"));
    let error = replies.deliver(&again(&row("ada/engine", "7", "Hello"))).await.unwrap_err();
    assert!(matches!(&error, DeliverError::Retry(text) if text.contains("10000")), "{error}");
    assert!(receiver.accepted().is_empty());
}

#[tokio::test]
async fn only_a_comment_of_our_own_counts_as_delivered() {
    for (thread, destination) in [(THREAD, github as fn(String) -> _), (NOTES, gitlab)] {
        let (receiver, url) = Receiver::start().await.unwrap();
        let replies = replies(destination(url)).await;
        let row = row("ada/engine", "7", "Hello");
        let forged = "<!-- headwater:reply abc-1-2-0 -->";
        receiver.add_comment(thread, 1, forged);
        receiver.add_comment(
            thread,
            1,
            forged.replace(" -->", " 00112233445566778899aabbccddeeff -->"),
        );
        replies.deliver(&again(&row)).await.unwrap();
        assert_eq!(receiver.accepted().len(), 1, "another person's comment is not our reply");
        replies.deliver(&again(&row)).await.unwrap();
        assert_eq!(receiver.accepted().len(), 1, "but our own is, by its mark");

        // Also one that we have marked with another secret, since changed.
        let (receiver, url) = Receiver::start().await.unwrap();
        let replies = replies_to(destination(url)).await;
        receiver.add_comment(thread, OUR_ACCOUNT, forged);
        replies.deliver(&again(&row)).await.unwrap();
        assert_eq!(receiver.accepted().len(), 0, "written by our account");
    }
}

#[tokio::test]
async fn a_repository_that_was_renamed_gets_its_replies_once() {
    let (receiver, url) = Receiver::start().await.unwrap();
    let replies = replies(github(url)).await;
    receiver.rename("/repos/ada/engine/", "/repositories/42/");
    let row = row("ada/engine", "7", "Hello");
    receiver.fail_next(Fault::LoseResponse);
    assert!(matches!(replies.deliver(&row).await, Err(DeliverError::Retry(_))));
    replies.deliver(&again(&row)).await.unwrap();
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
    let replies = replies(Destination::Callback { url: format!("{url}/hook"), secret }).await;
    for status in [301, 302, 307, 308] {
        receiver.fail_next(Fault::Refuse(status, vec![("location", "/moved".to_owned())]));
        replies.deliver(&row("p", "7", "Hello")).await.unwrap();
        let accepted = receiver.accepted().pop().unwrap();
        assert_eq!((accepted.path.as_str(), accepted.content()), ("/moved", "Hello"), "{status}");
    }
    // One that never ends does.
    receiver.rename("/loop", "/loop");
    receiver.fail_next(Fault::Refuse(307, vec![("location", "/loop".to_owned())]));
    let error = replies.deliver(&row("p", "7", "Hello")).await.unwrap_err();
    assert!(matches!(&error, DeliverError::Retry(text) if text.contains("redirects")), "{error}");
    assert_eq!(receiver.accepted().len(), 4);
}

#[tokio::test]
async fn a_redirect_to_another_host_is_not_followed_and_gets_no_token() {
    let ((receiver, url), (other, other_url)) =
        (Receiver::start().await.unwrap(), Receiver::start().await.unwrap());
    let replies = replies(github(url)).await;
    for (status, is_dead) in [(301, true), (308, true), (302, false), (307, false)] {
        let location = format!("{other_url}/repos/ada/engine/issues/7/comments");
        receiver.fail_next(Fault::Refuse(status, vec![("location", location)]));
        let error = replies.deliver(&row("ada/engine", "7", "Hello")).await.unwrap_err();
        assert_eq!(matches!(error, DeliverError::Dead(_)), is_dead, "{status}: {error}");
        assert!(error.to_string().contains("base_url"), "{error}");
    }
    assert!(other.requests().is_empty());
    assert!(receiver.accepted().is_empty());
}

#[tokio::test]
async fn however_the_receiver_fails_each_comment_is_there_once() {
    let (receiver, url) = Receiver::start().await.unwrap();
    receiver.fail_by(Seeded::new(15, 40));
    let store = store().await;
    store.ensure_integration("it", "github").await.unwrap();
    let issues = 1..=20;
    for issue in issues.clone() {
        let event = NewEvent {
            external_project_id: "ada/engine".into(),
            ..NewEvent::new("it", issue.to_string(), "note", "{}")
        };
        let recorded = store.record(&[event], &Quiet::default()).await.remove(0).unwrap();
        let payload = json!({"content": format!("ACK {issue}")}).to_string();
        let row = NewOutbox { kind: OutboxKind::Reply, target: String::new(), payload };
        let mut transaction = store.begin().await.unwrap();
        let rows = [KeyedOutbox { key: "1".into(), row }];
        transaction.write_outbox(recorded.issue_id, &rows).await.unwrap();
        transaction.commit().await.unwrap();
    }
    let destinations = HashMap::from([("it".to_owned(), github(url))]);
    let replies = Replies::new(Arc::clone(&store), destinations, Arc::new(NoInside)).unwrap();
    let backoff_max = Duration::from_millis(50);
    let retry = RetryPolicy {
        attempts_max: 1000,
        backoff_first: backoff_max,
        backoff_max,
        ..RetryPolicy::default()
    };
    let config = OutboxConfig { retry, every: backoff_max, ..OutboxConfig::default() };
    let outbox = Outbox::new(Arc::clone(&store), replies, config).unwrap();
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
