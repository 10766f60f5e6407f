//! Providers of an embedding program: the example's provider conforms, its webhooks are answered through a real second service,
//! and its failures stop nothing else.

mod support;

#[path = "../examples/extensions/chat.rs"]
mod chat;

use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use headwater::desk::provider::{
    DeliverError, MappedWebhook, Provider, ProviderReply, ReceivedWebhook,
};
use headwater::desk::provider_conformance::{self, ProviderSample};
use headwater_testkit::Postgres;
use serde_json::{Value, json};

use crate::chat::Chat;
use crate::support::desk::all_idle;
use crate::support::receivers::{Fault, Receiver};
use crate::support::sender::{SECRET, github_signature};
use crate::support::{Server, ServerDir, answer, eventually, text};

/// A program of the examples, built with this test.
fn example(name: &str) -> Result<std::path::PathBuf> {
    let this = std::env::current_exe()?;
    let built = this.ancestors().nth(2).context("no examples directory")?.join("examples");
    let program = built.join(name).with_extension(std::env::consts::EXE_EXTENSION);
    ensure!(program.exists(), "{} does not exist; build it with --examples", program.display());
    Ok(program)
}

fn message(id: &str, room: &str, from: &str) -> Value {
    json!({"event": "message", "id": id, "room": room, "from": from, "text": "Where is it?"})
}

fn signature(body: &[u8]) -> String {
    github_signature(body).trim_start_matches("sha256=").to_owned()
}

/// Sends a webhook with this signature, or the right one.
async fn send(server: &Server, body: &Value, signed: Option<&str>) -> Result<(u16, Value)> {
    let body = body.to_string();
    let right = signature(body.as_bytes());
    let request = server
        .client
        .post(server.url("/webhooks/chat/rooms"))
        .header("content-type", "application/json")
        .header("x-chat-signature", signed.unwrap_or(&right));
    answer(request.body(body).send().await?).await
}

/// A program with the provider, whose replies go to `url`.
fn place(program: &str, url: &str) -> Result<ServerDir> {
    let settings = format!(
        "[[integration]]\nid = \"rooms\"\nprovider = \"chat\"\nsecret = \"{SECRET}\"\nagents = [\"grace\"]\n\
         base_url = \"{url}\"\nreply_token_env = \"CHAT_TOKEN\"\n"
    );
    let place = ServerDir::new()?.program(example(program)?).settings(&settings)?;
    Ok(place.variable("CHAT_TOKEN", "a chat token"))
}

fn serve(place: &ServerDir, more: &[&str]) -> Result<Server> {
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms", "--analytics-path", ""];
    place.serve(&[&quick[..], more].concat())
}

fn sample() -> ProviderSample {
    let body = message("m-1", "r-1", "ada").to_string().into_bytes();
    ProviderSample {
        secret: SECRET.to_owned(),
        headers: vec![("X-Chat-Signature".to_owned(), signature(&body))],
        body,
        token: "a token".to_owned(),
        accepted: "{}".to_owned(),
    }
}

#[tokio::test]
async fn the_provider_of_the_example_conforms() {
    provider_conformance::check(&Chat, &sample()).await.unwrap();
}

/// What is wrong with a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    AcceptsEverything,
    PanicsWithoutSignature,
    PanicsOnPayloads,
    NewKeyEachTime,
    IgnoresTheSample,
    SaysDelivered,
    LosesRepliesWhileDown,
    GivesUpOn401,
    ForgetsTheText,
}

#[derive(Debug)]
struct DefectiveChat(Defect, AtomicUsize);

#[async_trait]
impl Provider for DefectiveChat {
    fn name(&self) -> &str {
        "defective"
    }

    async fn verify(&self, webhook: &ReceivedWebhook<'_>) -> Result<(), String> {
        match self.0 {
            Defect::AcceptsEverything => Ok(()),
            Defect::PanicsWithoutSignature => {
                let _ = webhook.header("x-chat-signature").expect("a signature");
                Chat.verify(webhook).await
            }
            _ => Chat.verify(webhook).await,
        }
    }

    fn map(&self, webhook: &ReceivedWebhook<'_>, payload: &Value) -> Result<MappedWebhook, String> {
        if self.0 == Defect::PanicsOnPayloads {
            let _ = payload["text"].as_str().expect("a text");
        }
        if self.0 == Defect::IgnoresTheSample {
            return Ok(MappedWebhook::Ignored("all of them".to_owned()));
        }
        let mut mapped = Chat.map(webhook, payload)?;
        if let (Defect::NewKeyEachTime, MappedWebhook::Event(event)) = (self.0, &mut mapped) {
            event.dedup_key = Some(self.1.fetch_add(1, Ordering::SeqCst).to_string());
        }
        Ok(mapped)
    }

    async fn deliver(&self, reply: &ProviderReply<'_>) -> Result<(), DeliverError> {
        let mut reply = reply.clone();
        if self.0 == Defect::ForgetsTheText {
            reply.content = "";
        }
        match (self.0, Chat.deliver(&reply).await) {
            (Defect::SaysDelivered, _) => Ok(()),
            (Defect::GivesUpOn401, Err(DeliverError::Held(error))) => {
                Err(DeliverError::Dead(error))
            }
            (Defect::LosesRepliesWhileDown, Err(DeliverError::Retry(error))) => {
                Err(DeliverError::Dead(error))
            }
            (_, delivered) => delivered,
        }
    }
}

#[tokio::test]
async fn the_conformance_suite_names_what_is_wrong_with_a_provider() {
    for (defect, expected) in [
        (Defect::AcceptsEverything, "the secret `` is rejected"),
        (Defect::PanicsWithoutSignature, "`verify` does not panic"),
        (Defect::PanicsOnPayloads, "`map` does not panic"),
        (Defect::NewKeyEachTime, "mapped to the same event"),
        (Defect::IgnoresTheSample, "the sample is an event"),
        (Defect::SaysDelivered, "answered with 401"),
        (Defect::GivesUpOn401, "answered with 401"),
        (Defect::LosesRepliesWhileDown, "answered with 429"),
        (Defect::ForgetsTheText, "the text of the reply"),
    ] {
        let provider = DefectiveChat(defect, AtomicUsize::new(0));
        let error = provider_conformance::check(&provider, &sample()).await.unwrap_err();
        assert!(error.contains(expected), "{defect:?}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_of_the_provider_is_answered_once_and_a_wrong_signature_stores_nothing()
-> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place("extensions", &url)?;
    let server = serve(&place, &[])?;

    // Nothing of a stranger is stored, or even parsed.
    let right = message("m-1", "r-1", "ada");
    let other = signature(b"another body");
    for wrong in ["", "zz", other.as_str()] {
        let (status, body) = send(&server, &right, Some(wrong)).await?;
        assert_eq!((status, &body["error"]["code"]), (401, &json!("unauthorized")), "{body}");
    }
    let (_, issues) = server.get("/api/v1/issues").await?;
    assert_eq!(issues["issues"], json!([]), "{issues:#}");

    let (status, stored) = send(&server, &right, None).await?;
    assert_eq!((status, &stored["duplicate"]), (200, &json!(false)), "{stored}");
    eventually("the reply", || receiver.accepted().len() == 1).await?;
    let (status, again) = send(&server, &right, None).await?;
    assert_eq!((status, &again["duplicate"]), (200, &json!(true)), "{again}");
    // The same id with another text is another event, or a mistake of the sender.
    let mut changed = right.clone();
    changed["text"] = json!("another text");
    let (status, body) = send(&server, &changed, None).await?;
    assert_eq!((status, &body["error"]["code"]), (400, &json!("delivery_id_reused")), "{body}");

    // Ignored and invalid ones.
    let mut by_bot = message("m-2", "r-1", "another bot");
    by_bot["bot"] = json!(true);
    for ignored in [by_bot, json!({"event": "typing", "room": "r-1"})] {
        let (status, body) = send(&server, &ignored, None).await?;
        assert_eq!((status, &body["status"]), (200, &json!("ignored")), "{body}");
    }
    let (status, body) = send(&server, &json!({"event": "message", "id": "m-3"}), None).await?;
    assert_eq!(status, 400, "{body}");
    assert!(body["error"]["message"].to_string().contains("`room` is missing"), "{body}");

    all_idle(&server).await?;
    let accepted = receiver.accepted();
    assert_eq!(accepted.len(), 1, "{accepted:?}");
    assert_eq!(accepted[0].path, "/rooms/r-1/messages");
    assert_eq!(accepted[0].headers["authorization"], "Bearer a chat token");
    let expected = json!({"text": "Thank you for your message.", "client_id": accepted[0].key});
    assert_eq!(accepted[0].body, expected);

    // What is stored is a Standard Webhook.
    let issue = stored["issue_id"].to_string();
    let (_, events) = server.get(&format!("/api/v1/issues/{issue}/events")).await?;
    let expected = json!({"type": "message", "project": "", "issue": "r-1", "user": "ada", "content": "Where is it?"});
    assert_eq!(events["events"][0]["payload"], expected, "{events:#}");
    assert_eq!(events["events"].as_array().map(Vec::len), Some(1), "{events:#}");
    let (_, webhooks) = server.get("/api/v1/webhooks").await?;
    let shown = &webhooks["integrations"][0];
    assert_eq!(
        (&shown["provider"], &shown["path"]),
        (&json!("chat"), &json!("/webhooks/chat/rooms"))
    );
    let metrics = server.client.get(server.url("/metrics")).send().await?.text().await?;
    let counted = r#"headwater_webhooks_total{provider="chat",result="recorded"} 1"#;
    assert!(metrics.contains(counted), "{metrics}");

    // A person of the team takes the issue over: the desk is silent.
    send(&server, &message("m-4", "r-1", "grace"), None).await?;
    send(&server, &message("m-5", "r-1", "ada"), None).await?;
    send(&server, &message("m-6", "r-2", "ada"), None).await?;
    eventually("the reply in the other room", || receiver.accepted().len() == 2).await?;
    all_idle(&server).await?;
    let paths: Vec<String> = receiver.accepted().into_iter().map(|one| one.path).collect();
    assert_eq!(paths, ["/rooms/r-1/messages", "/rooms/r-2/messages"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_delivery_is_repeated_with_the_same_key_and_a_401_holds_it() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place("extensions", &url)?;
    let database = Postgres::shared()?.database()?;
    let database_url = database.url();
    let mut server = serve(&place, &["--database-url", &database_url])?;
    receiver.fail_next(Fault::Respond(500, Vec::new()));
    // Carried out, and the response is lost.
    receiver.fail_next(Fault::LoseResponse);
    send(&server, &message("m-1", "r-1", "ada"), None).await?;
    eventually("the third attempt", || receiver.accepted().len() == 2).await?;
    let keys = |room: &str| -> Vec<String> {
        let requests = receiver.requests().into_iter();
        let of_room =
            requests.filter(|(_, uri, _)| uri.path() == format!("/rooms/{room}/messages"));
        of_room.map(|(.., headers)| format!("{:?}", headers["idempotency-key"])).collect()
    };
    let first = keys("r-1");
    assert!(first.len() == 3 && first.iter().all(|key| *key == first[0]), "{first:?}");
    let shown = receiver.accepted();
    assert_eq!(shown[0].body["client_id"], shown[1].body["client_id"], "the service shows one");

    // A wrong token concerns the integration: the reply waits, without an attempt, also over a restart.
    receiver.fail_next(Fault::Respond(401, Vec::new()));
    send(&server, &message("m-2", "r-2", "ada"), None).await?;
    let is_held = |_: u16, page: &Value| {
        let row = page["rows"].as_array().and_then(|rows| rows.last());
        row.is_some_and(|row| row["error"].to_string().contains("401"))
    };
    let page = server.until("/api/v1/outbox?status=pending", is_held).await?;
    let rows = page["rows"].as_array().context("rows")?;
    assert_eq!((rows.len(), &rows[0]["attempts"]), (1, &json!(0)), "{page:#}");
    server.stop()?;
    // Instead of waiting for the end of the hold.
    database.query("UPDATE outbox SET due_at = now() WHERE status = 'pending'")?;
    let server = serve(&place, &["--database-url", &database_url])?;
    eventually("the reply after the hold", || receiver.accepted().len() == 3).await?;
    let second = keys("r-2");
    assert!(second.len() == 2 && second[0] == second[1] && second[0] != first[0], "{second:?}");
    all_idle(&server).await?;
    assert_eq!(receiver.accepted().len(), 3);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_panics_stops_nothing_else() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place("faulty_extensions", &url)?;
    let server = serve(&place, &[])?;
    let failed = json!("provider_failed");
    let (status, body) = send(&server, &message("m-1", "panic-map", "ada"), None).await?;
    assert_eq!((status, &body["error"]["code"]), (500, &failed), "{body}");
    let body = message("m-2", "r-1", "ada").to_string();
    let request = server
        .client
        .post(server.url("/webhooks/chat/rooms"))
        .header("content-type", "application/json")
        .header("x-chat-signature", signature(body.as_bytes()))
        .header("x-panic", "now");
    let (status, body) = answer(request.body(body).send().await?).await?;
    assert_eq!((status, &body["error"]["code"]), (500, &failed), "{body}");
    let (_, issues) = server.get("/api/v1/issues").await?;
    assert_eq!(issues["issues"], json!([]), "{issues:#}");

    // One reply cannot be delivered; the others are.
    send(&server, &message("m-3", "panic-deliver", "ada"), None).await?;
    let has_panicked = |_: u16, page: &Value| {
        page["rows"].as_array().is_some_and(|rows| {
            rows.iter().any(|row| row["error"].to_string().contains("a defect in `deliver`"))
        })
    };
    server.until("/api/v1/outbox", has_panicked).await?;
    for room in 1..=5 {
        let (status, body) =
            send(&server, &message(&format!("n-{room}"), &format!("r-{room}"), "ada"), None)
                .await?;
        assert_eq!(status, 200, "{body}");
    }
    eventually("the other replies", || receiver.accepted().len() == 5).await?;
    let (status, ready) = server.get("/health/ready").await?;
    assert_eq!(status, 200, "{ready}");
    let (_, page) = server.get("/api/v1/outbox/dead").await?;
    assert_eq!(page["rows"], json!([]), "it is retried: {page:#}");
    Ok(())
}

#[test]
fn an_unknown_provider_is_an_error_that_names_the_known_ones() -> Result<()> {
    let unknown = "[[integration]]\nid = \"rooms\"\nprovider = \"chats\"\nsecret = \"a\"\n";
    for (program, known) in [
        (None, "github, gitlab, standard, desk;"),
        (Some("extensions"), "github, gitlab, standard, desk, chat;"),
    ] {
        let mut place = ServerDir::new()?;
        if let Some(program) = program {
            place = place.program(example(program)?);
        }
        let output = place.settings(unknown)?.run(&["serve"])?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(
            error.contains("[[integration]] `rooms` has an unknown provider `chats`"),
            "{error}"
        );
        assert!(error.contains(known), "{error}");
    }
    // Known to its own program only; its commands know it, too.
    let chat = unknown.replace("chats", "chat");
    let output = ServerDir::new()?.settings(&chat)?.run(&["config"])?;
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stdout));
    let place = ServerDir::new()?.program(example("extensions")?).settings(&chat)?;
    let output = place.run(&["config"])?;
    assert!(text(&output.stdout).contains("id=rooms provider=chat"), "{}", text(&output.stderr));
    Ok(())
}
