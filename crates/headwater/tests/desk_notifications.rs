//! Notifications about drafts that wait and issues that are handed over: committed with what they report, delivered at least once.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Postgres, Redis, RedisReply};
use serde_json::{Value, json};

use crate::support::desk::open;
use crate::support::receivers::{Accepted, Fault, Receiver};
use crate::support::sender::{SECRET, github, github_comment, github_issues, send};
use crate::support::{Server, ServerDir, eventually, text};

const HUMAN: &str = "I want to speak to a human";
const ALL: &str = r#"events = ["DRAFT_WAITING", "DRAFT_OVERDUE", "ISSUE_HANDED_OVER"]"#;

/// An integration `shop` with these lines, and a receiver `team` of all events of the desk.
fn place(url: &str, shop: &str, more: &str) -> Result<ServerDir> {
    let settings = format!(
        "{more}\n[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\nbase_url = \"{url}\"\n\
         reply_token_env = \"TOKEN\"\n{shop}\n\
         [[notification]]\nid = \"team\"\nurl = \"{url}/team\"\nsecret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\n{ALL}\nfrom = \"beginning\"\n"
    );
    let place = ServerDir::new()?.settings(&settings)?.variable("TOKEN", "a token");
    Ok(place.variable("HEADWATER_DESK_LINK_SECRET", "sixteen letters or more"))
}

fn serve(place: &ServerDir, arguments: &[&str]) -> Result<Server> {
    let quick = ["--issue-quiet", "10ms", "--analytics-path", "", "--sweep-every", "100ms"];
    place.serve(&[&quick[..], arguments].concat())
}

async fn ask(server: &Server, number: u64, text: &str) -> Result<()> {
    let body = github_issues("opened", number, text).to_string();
    let delivery = format!("d-{number}");
    let (status, body) = send(github(server, "issues", &delivery, body.as_bytes())).await?;
    ensure!(status == 200 && body["status"] == "ok", "{status} {body}");
    Ok(())
}

/// What the team has received: by id, with how often.
fn received(receiver: &Receiver) -> BTreeMap<String, Vec<Accepted>> {
    let mut by_id = BTreeMap::<_, Vec<Accepted>>::new();
    for one in receiver.accepted().into_iter().filter(|one| one.path == "/team") {
        by_id.entry(one.key.clone()).or_default().push(one);
    }
    by_id
}

/// The events of a type, each once.
fn events(receiver: &Receiver, event_type: &str) -> Vec<Value> {
    let received = received(receiver);
    let bodies = received.values().map(|all| all[0].body.clone());
    bodies.filter(|body| body["type"] == event_type).map(|body| body["data"].clone()).collect()
}

async fn until_received(receiver: &Receiver, event_type: &str, count: usize) -> Result<Vec<Value>> {
    let what = format!("{count} x {event_type}");
    eventually(&what, || events(receiver, event_type).len() >= count).await?;
    let events = events(receiver, event_type);
    assert_eq!(events.len(), count, "{events:#?}");
    Ok(events)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_draft_is_reported_once_with_links_that_decide() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "mode = \"draft\"", "")?;
    let server = serve(&place, &[])?;
    ask(&server, 1, "Where is it?").await?;
    let event = until_received(&receiver, "DRAFT_WAITING", 1).await?.remove(0);
    assert_eq!((&event["integration"], &event["draft"]["version"]), (&json!("shop"), &json!(1)));
    assert_eq!(event["external_issue_id"], "1", "{event:#}");
    assert!(event["link"].as_str().is_some_and(|link| link.ends_with("/console/drafts")));
    // The text of the draft is on the page only.
    let approve = event["approve_link"].as_str().context("a link")?;
    let page = server.client.get(approve).send().await?.text().await?;
    assert!(page.contains("Approve and post"), "{page}");
    let (page, link) = approve.split_once('?').context("a link")?;
    let form = "application/x-www-form-urlencoded";
    let pressed = server.client.post(page).header("content-type", form).body(link.to_owned());
    assert_eq!(pressed.send().await?.status().as_u16(), 200);
    let comments = "/repositories/35129377/issues/1/comments";
    eventually("the comment", || receiver.comments(comments).len() == 1).await?;
    assert_eq!(received(&receiver).len(), 1, "no other event");
    Ok(())
}

async fn an_overdue_draft_is_reported_once_by_all_processes(
    database: &str,
    streams: &str,
) -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "mode = \"draft\"", "[desk]\ndraft_max_wait = \"500ms\"")?;
    let given = ["--database-url", database, "--stream-url", streams];
    let server = serve(&place, &given)?;
    let quick = ["--sweep-every", "100ms"];
    let _second = place.worker(&[&given[..], &quick].concat())?;
    let _third = place.worker(&[&given[..], &quick].concat())?;
    for number in [1, 2] {
        ask(&server, number, "Where is it?").await?;
    }
    until_received(&receiver, "DRAFT_OVERDUE", 2).await?;
    let (_, page) = server.get("/api/v1/drafts?status=pending").await?;
    let drafts = page["drafts"].as_array().context("drafts")?;
    assert_eq!(drafts.len(), 2, "they still wait");
    assert!(drafts.iter().all(|draft| draft["overdue_at"].is_string()), "{drafts:#?}");
    // Many sweeps later there is no other one. A third draft shows that sweeps go on.
    ask(&server, 3, "Where is it?").await?;
    until_received(&receiver, "DRAFT_OVERDUE", 3).await?;
    assert_eq!(events(&receiver, "ISSUE_HANDED_OVER"), Vec::<Value>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overdue_draft_is_reported_once_by_all_processes_on_postgres() -> Result<()> {
    let (database, redis) = (Postgres::shared()?.database()?, Redis::start()?);
    an_overdue_draft_is_reported_once_by_all_processes(&database.url(), &redis.url()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overdue_draft_hands_its_issue_over_if_the_settings_say_so() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let desk = "[desk]\ndraft_max_wait = \"300ms\"\ndraft_overdue = \"hand_over\"\n\
        [[integration]]\nid = \"desk\"\nprovider = \"desk\"\nmode = \"draft\"";
    let place = place(&url, "mode = \"draft\"", desk)?;
    let server = serve(&place, &[])?;
    let created = open(&server, "Where is my parcel?").await?;
    let ticket = created["ticket_id"].as_str().context("a ticket")?.to_owned();
    ask(&server, 1, "Where is it?").await?;

    let path = format!("/api/v1/tickets/{ticket}");
    let shown = server.until(&path, |_, shown| shown["handed_over"] == true).await?;
    let reason = shown["hand_over_reason"].as_str().context("a reason")?;
    assert!(reason.contains("waited for a decision longer than 300ms"), "{reason}");
    let events = until_received(&receiver, "ISSUE_HANDED_OVER", 2).await?;
    until_received(&receiver, "DRAFT_OVERDUE", 2).await?;
    let of_ticket = events.iter().find(|event| event["ticket_id"] == *ticket).context("one")?;
    assert_eq!(of_ticket["reason"], reason, "{of_ticket:#}");
    let link = of_ticket["link"].as_str().context("a link")?;
    assert!(link.ends_with(&format!("/console/tickets/{ticket}")), "{link}");
    let issue = events.iter().find(|event| event["integration"] == "shop").context("one")?;

    // A person may still approve the draft; the desk itself does not answer any more.
    let why = format!("/api/v1/issues/{}/why", issue["issue_id"]);
    let comment = github_comment(1, "ann", "Hello?").to_string();
    send(github(&server, "issue_comment", "c-1", comment.as_bytes())).await?;
    server.until(&why, |_, why| why["reason"] == "handed_over").await?;
    let pending = "/api/v1/drafts?status=pending&integration=shop";
    let (_, page) = server.get(pending).await?;
    assert_eq!(page["drafts"], json!([]), "no new draft after the hand-over");
    // Reopened, the desk answers again.
    let reopened = github_issues("reopened", 1, "Where is it?").to_string();
    send(github(&server, "issues", "r-1", reopened.as_bytes())).await?;
    let comment = github_comment(1, "ann", "Still there?").to_string();
    send(github(&server, "issue_comment", "c-2", comment.as_bytes())).await?;
    server.until(pending, |_, page| page["drafts"] != json!([])).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn hand_overs_of_tickets_and_issues_are_reported_although_replies_are_held() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "agents = [\"grace\"]", "")?;
    let server = serve(&place, &[])?;
    // GitHub rejects the token, so the reply, and everything behind it, waits.
    receiver.fail_next(Fault::Respond(401, vec![]));
    ask(&server, 1, HUMAN).await?;
    let event = until_received(&receiver, "ISSUE_HANDED_OVER", 1).await?.remove(0);
    assert!(event["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{event:#}");
    let link = event["link"].as_str().context("a link")?;
    assert!(link.ends_with(&format!("/console/issues/{}", event["issue_id"])), "{link}");

    let created = open(&server, HUMAN).await?;
    let ticket = created["ticket_id"].as_str().context("a ticket")?.to_owned();
    until_received(&receiver, "ISSUE_HANDED_OVER", 2).await?;
    // An agent answers another ticket, and an issue: both are handed over. Further answers report nothing.
    let second = open(&server, "Where is it?").await?;
    let second = second["ticket_id"].as_str().context("a ticket")?.to_owned();
    for content in ["I look.", "Found it."] {
        let path = format!("/api/v1/tickets/{second}/messages");
        let body = json!({"content": content, "agent": "grace"});
        assert_eq!(server.post(&path, &body).await?.0, 201);
    }
    let events = until_received(&receiver, "ISSUE_HANDED_OVER", 3).await?;
    assert!(events.iter().any(|event| event["reason"] == "a person answered"), "{events:#?}");
    ask(&server, 2, "Where is it?").await?;
    for text in ["I look.", "Found it."] {
        let comment = github_comment(2, "grace", text).to_string();
        send(github(&server, "issue_comment", text, comment.as_bytes())).await?;
    }
    until_received(&receiver, "ISSUE_HANDED_OVER", 4).await?;
    // Reopened and handed over again: that is another hand-over.
    let path = format!("/api/v1/tickets/{ticket}");
    assert_eq!(server.post(&format!("{path}/reopen"), &json!({})).await?.0, 200);
    let again = json!({ "content": HUMAN });
    assert_eq!(server.post(&format!("{path}/messages"), &again).await?.0, 201);
    until_received(&receiver, "ISSUE_HANDED_OVER", 5).await?;
    Ok(())
}

/// Number of entries of a stream.
fn length(redis: &Redis, stream: &str) -> i64 {
    let length = redis.command(&["XLEN", stream]);
    length.ok().and_then(|length| length.int()).unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_at_any_step_loses_no_hand_over_notification() -> Result<()> {
    let redis = Redis::start()?;
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "", "")?;
    let given = ["--stream-url", &redis.url()];
    let mut server = serve(&place, &given)?;
    let mut expected = 0;
    for round in 0..4 {
        // The receiver does not answer the first attempts, so that kills come before and after the acknowledgement.
        receiver.fail_next(Fault::Respond(500, vec![]));
        let created = open(&server, HUMAN).await?;
        expected += 1;
        let path = format!("/api/v1/tickets/{}", created["ticket_id"].as_str().unwrap_or_default());
        match round {
            // Directly after the ticket is stored.
            0 => {}
            // After the hand-over is committed.
            1 => drop(server.until(&path, |_, shown| shown["handed_over"] == true).await?),
            // While the notification is sent.
            2 => {
                let before = receiver.requests().len();
                eventually("an attempt", || receiver.requests().len() > before).await?;
            }
            // After the receiver has it.
            _ => {
                let count = expected;
                eventually("the event", || events(&receiver, "ISSUE_HANDED_OVER").len() >= count)
                    .await?;
            }
        }
        server.kill9()?;
        server = serve(&place, &given)?;
    }
    let events = until_received(&receiver, "ISSUE_HANDED_OVER", expected).await?;
    let tickets: std::collections::BTreeSet<_> =
        events.iter().map(|event| event["ticket_id"].to_string()).collect();
    assert_eq!(tickets.len(), expected, "{events:#?}");
    // Other readers of `ticket_events` see only the types that they know.
    assert_eq!(length(&redis, "desk_events"), expected as i64);
    let entries = redis.command(&["XRANGE", "ticket_events", "-", "+"])?;
    let text = entries.items().iter().map(all_text).collect::<String>();
    assert!(text.contains("TICKET_CREATED") && !text.contains("HANDED_OVER"), "{text}");
    assert_eq!(length(&redis, "ticket_events:dlq"), 0);
    Ok(())
}

fn all_text(reply: &RedisReply) -> String {
    match reply.items() {
        [] => reply.text(),
        items => items.iter().map(all_text).collect(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_wait_in_sql_while_redis_is_away() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "", "")?;
    let redis = Redis::start()?;
    let proxy = headwater_testkit::Proxy::start(redis.addr())?;
    let server = serve(&place, &["--stream-url", &redis.url_at(proxy.addr())])?;
    // The group exists: events before it are not for this receiver.
    let ready = || {
        let groups = redis.command(&["XINFO", "GROUPS", "desk_events"]);
        groups.is_ok_and(|groups| all_text(&groups).contains("notification:team"))
    };
    eventually("the group", ready).await?;
    proxy.cut()?;
    let created = open(&server, HUMAN).await?;
    let path = format!("/api/v1/tickets/{}", created["ticket_id"].as_str().unwrap_or_default());
    server.until(&path, |_, shown| shown["handed_over"] == true).await?;
    assert_eq!(events(&receiver, "ISSUE_HANDED_OVER").len(), 0);
    proxy.heal()?;
    until_received(&receiver, "ISSUE_HANDED_OVER", 1).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn slack_gets_a_message_with_reason_and_link() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let settings = format!(
        "[[notification]]\nid = \"chat\"\nurl = \"{url}/services/T0/B0/x\"\nformat = \"slack\"\n\
         events = [\"ISSUE_HANDED_OVER\", \"TICKET_CREATED\"]\nfrom = \"beginning\"\n"
    );
    let place = ServerDir::new()?.settings(&settings)?;
    let server = serve(&place, &["--http-public-url", "https://desk.example"])?;
    receiver.fail_next(Fault::Respond(503, vec![]));
    let created = open(&server, &format!("{HUMAN} <!channel>")).await?;
    let ticket = created["ticket_id"].as_str().context("a ticket")?.to_owned();
    let texts = || -> Vec<String> {
        let accepted = receiver.accepted();
        accepted.iter().filter_map(|one| one.body["text"].as_str().map(str::to_owned)).collect()
    };
    eventually("both messages", || texts().len() == 2).await?;
    let texts = texts();
    let handed_over = texts.iter().find(|text| text.contains("handed over")).context("one")?;
    assert!(
        handed_over.starts_with(&format!("Ticket {ticket}: handed over to a person\nReason: "))
    );
    let link = format!("https://desk.example/console/tickets/{ticket}");
    assert!(handed_over.ends_with(&link), "{handed_over}");
    let new = texts.iter().find(|text| text.starts_with("TICKET_CREATED")).context("one")?;
    assert!(new.contains("&lt;!channel&gt;") && !new.contains("<!channel>"), "{new}");
    assert!(!server.log().contains("/services/T0"), "the address is the secret");
    Ok(())
}

#[test]
fn invalid_notifications_are_rejected() -> Result<()> {
    let section = |more: &str| {
        format!("[[notification]]\nid = \"a\"\nurl = \"https://chat.example/x\"\n{more}\n")
    };
    for (more, expected) in [
        ("format = \"slack\"\nsecret = \"x\"", "the format `slack` is not signed"),
        ("format = \"teams\"", "unknown variant `teams`"),
        ("", "has no secret"),
        (
            "secret = \"x\"\nevents = [\"DRAFT\"]",
            "unknown event `DRAFT`; allowed: `TICKET_CREATED`",
        ),
        ("secret = \"x\"\nevents = []", "must name at least one"),
    ] {
        let output = ServerDir::new()?.settings(&section(more))?.run(&["config"])?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{more}: {error}");
        assert!(error.contains(expected), "{more}: {error}");
    }
    let shown = ServerDir::new()?.settings(&section("format = \"slack\""))?.run(&["config"])?;
    let shown = text(&shown.stdout);
    assert!(shown.contains("format=slack") && shown.contains("chat.example"), "{shown}");
    Ok(())
}
