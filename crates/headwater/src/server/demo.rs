//! `serve --demo`: the whole way once, through the front door, told in a dozen lines.
//!
//! Upstream: `command` prepares it, `run` starts it beside the server. Downstream: the server's own HTTP address; nothing here
//! knows more than any client does. Promises: it uses a directory that is removed at the end, unless the settings name
//! another place; a step that does not come about within its time is told and ends the process with exit code 1.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use axum::Router;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::{Client, RequestBuilder};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use crate::config::{Integration, Loaded, Provider, Role, Source, Token};
use crate::exit::Failure;
use crate::outbound::sign;
use crate::server::shutdown::Stopping;

/// The integration whose webhook the demo sends.
const INTEGRATION: &str = "demo";

/// How long one step may take on a slow machine.
const STEP_MAX: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The answer of a server without analytics.
const NO_ANALYTICS: u16 = 501;

/// Replies that wait to be looked at.
const CALLBACKS_MAX: usize = 16;

/// What the demo needs, made before the server starts.
pub(crate) struct Demo {
    callback: TcpListener,
    secret: SecretString,
    token: Option<SecretString>,
    place: String,
    then: Then,
}

/// What to do when everything was shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Go on serving.
    Serve,
    /// Stop in good order.
    Exit,
}

impl Demo {
    /// Adds to the settings what the demo needs: an integration, a token if tokens are needed, and a directory of its own.
    /// Keep the directory until the server has stopped.
    pub(crate) async fn prepare(
        loaded: &mut Loaded,
        then: Then,
    ) -> Result<(Self, TempDir), Failure> {
        let directory = tempfile::tempdir().context("no temporary directory for the demo")?;
        let callback = TcpListener::bind(("127.0.0.1", 0)).await;
        let callback = callback.context("no port for replies to the demo")?;
        let address = callback.local_addr().context("no port for replies to the demo")?;

        let is_default = |name| loaded.values.get(name).source == Source::Default;
        let (own_streams, own_database) = (is_default("stream.url"), is_default("database.url"));
        let own_analytics = is_default("analytics.path");
        let is_quiet = is_default("log.level");
        let settings = &mut loaded.settings;
        if is_quiet {
            // What the demo tells is to be read; what the parts tell would stand in between.
            settings.telemetry.level = "warn".to_owned();
        }
        if own_streams {
            settings.stream_url =
                format!("embedded:{}", directory.path().join("streams").display()).into();
        }
        if own_database {
            settings.database_url =
                format!("sqlite:{}", directory.path().join("headwater.db").display()).into();
        }
        if own_analytics {
            settings.analytics_path = Some(directory.path().join("analytics.duckdb"));
        }
        let place = match (own_streams, own_database) {
            (true, true) => "nothing is installed, data in a temporary directory".to_owned(),
            _ => format!("{} and {}", settings.stream_shown(), settings.database_shown()),
        };
        let secret: SecretString = format!("whsec_{}", STANDARD.encode(random())).into();
        settings.integrations.push(Integration {
            id: INTEGRATION.to_owned(),
            provider: Provider::Standard,
            secret: Some(secret.clone()),
            reply_token: None,
            base_url: Some(format!("http://{address}/")),
            bot_login: None,
        });
        let token =
            (!settings.tokens.is_empty()).then(|| SecretString::from(STANDARD.encode(random())));
        settings.tokens.extend(token.clone().map(|token| Token {
            name: INTEGRATION.to_owned(),
            role: Role::Admin,
            token,
        }));
        Ok((Self { callback, secret, token, place, then }, directory))
    }

    /// Shows everything, then waits for the stop or begins it. Returns before the stop only if something went wrong.
    pub(crate) async fn run(self, address: SocketAddr, stopping: Stopping) {
        let then = self.then;
        tokio::select! {
            shown = self.show(address) => match shown {
                Ok(()) if then == Then::Exit => stopping.begin(),
                Ok(()) => stopping.begun().await,
                Err(problem) => say("failed", &format!("{problem:#}")),
            },
            () = stopping.begun() => {}
        }
    }

    async fn show(self, address: SocketAddr) -> Result<()> {
        let (sender, mut callbacks) = mpsc::channel(CALLBACKS_MAX);
        // Ends with the demo.
        let mut receiving = JoinSet::new();
        receiving.spawn(receive(self.callback, sender));
        let client = Client::builder().no_proxy().timeout(STEP_MAX).build()?;
        let server = Visitor { client, root: format!("http://{address}"), token: self.token };
        say("started", &format!("everything in one process at {}; {}", server.root, self.place));

        server.show_tickets().await?;
        server.show_burst().await?;
        server.show_webhook(&self.secret).await?;
        show_callback(&mut callbacks).await?;
        server.show_books().await?;
        server.show_report().await?;
        match self.then {
            Then::Serve => say(
                "serving",
                &format!("{} has a status page; Ctrl-C stops in good order", server.root),
            ),
            Then::Exit => say("stopping", "in good order, as was asked for"),
        }
        Ok(())
    }
}

/// A client of the server.
struct Visitor {
    client: Client,
    root: String,
    token: Option<SecretString>,
}

impl Visitor {
    async fn send(&self, request: RequestBuilder) -> Result<(u16, Value)> {
        let request = match &self.token {
            Some(token) => request.bearer_auth(token.expose_secret()),
            None => request,
        };
        let response = request.send().await?;
        let status = response.status().as_u16();
        Ok((status, response.json().await.context("an answer that is no JSON")?))
    }

    async fn get(&self, path: &str) -> Result<Value> {
        let (status, body) = self.send(self.client.get(format!("{}{path}", self.root))).await?;
        ensure!(status == 200, "GET {path} was answered with {status}: {body}");
        Ok(body)
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let request = self.client.post(format!("{}{path}", self.root)).json(body);
        let (status, body) = self.send(request).await?;
        ensure!(status < 300, "POST {path} was answered with {status}: {body}");
        Ok(body)
    }

    /// Opens a few tickets; the desk answers each.
    async fn show_tickets(&self) -> Result<()> {
        let tickets = [
            ("My parcel is late", "It should have been here on Monday."),
            ("A broken cup", "One of the two cups arrived broken."),
            ("Invoice", "Could you send me the invoice once more?"),
        ];
        let mut opened = Vec::new();
        for (title, content) in tickets {
            let ticket =
                self.post("/api/v1/tickets", &json!({"title": title, "content": content})).await?;
            opened.push((title, text(&ticket, "ticket_id")?, Instant::now()));
        }
        say("opened", &format!("{} tickets, each committed before it was answered", opened.len()));
        for (title, id, since) in &opened {
            let replies = self.replies(id, 1).await?;
            let reply = replies.first().context("a reply")?;
            say(
                "answered",
                &format!("\"{title}\" after {} ms: {}", since.elapsed().as_millis(), short(reply)),
            );
        }
        Ok(())
    }

    /// Many messages at once; the desk answers them together.
    async fn show_burst(&self) -> Result<()> {
        let ticket = json!({"title": "Many questions", "content": "Hello?"});
        let ticket = text(&self.post("/api/v1/tickets", &ticket).await?, "ticket_id")?;
        let path = format!("/api/v1/tickets/{ticket}/messages");
        for number in 1..=5 {
            self.post(&path, &json!({"content": format!("Question {number}?")})).await?;
        }
        let replies = self.replies(&ticket, 1).await?;
        let (noun, count) =
            if replies.len() == 1 { ("reply", 1) } else { ("replies", replies.len()) };
        say(
            "gathered",
            &format!(
                "6 messages in a row got {count} {noun}: {}",
                replies.last().map_or_else(String::new, |it| short(it))
            ),
        );
        Ok(())
    }

    /// A signed webhook, the same once more, and a forged one.
    async fn show_webhook(&self, secret: &SecretString) -> Result<()> {
        let body = json!({"type": "order.late", "issue": "77", "project": "shop", "text": "Where is order 77?"}).to_string();
        let id = format!("demo-{}", Uuid::new_v4());
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let right = sign(secret, &id, seconds, body.as_bytes());
        let wrong = sign(&SecretString::from("a guess"), &id, seconds, body.as_bytes());
        let webhook = |signature: &str| {
            self.client
                .post(format!("{}/webhooks/standard/{INTEGRATION}", self.root))
                .header("content-type", "application/json")
                .header("webhook-id", &id)
                .header("webhook-timestamp", seconds)
                .header("webhook-signature", signature)
                .body(body.clone())
        };
        let (status, first) = self.send(webhook(&right)).await?;
        ensure!(
            status == 200 && first["status"] == "ok",
            "a webhook was answered with {status}: {first}"
        );
        say(
            "received",
            &format!(
                "a signed webhook, committed as event {} of issue {}",
                first["event_log_id"], first["issue_id"]
            ),
        );
        let (_, again) = self.send(webhook(&right)).await?;
        let (forged, _) = self.send(webhook(&wrong)).await?;
        ensure!(
            again["duplicate"] == true && forged == 401,
            "a copy or a forgery was taken: {again}, {forged}"
        );
        say(
            "refused",
            "the same webhook again is a duplicate, and a forged one is answered with 401",
        );
        Ok(())
    }

    /// Everything was processed, and every change is written down.
    async fn show_books(&self) -> Result<()> {
        let deadline = Instant::now() + STEP_MAX;
        loop {
            let issues = self.get("/api/v1/issues?limit=500").await?;
            let issues = issues["issues"].as_array().context("issues")?;
            let is_done = |issue: &Value| {
                issue["pending_events"] == 0 && issue["processing_status"] == "idle"
            };
            if issues.iter().all(is_done) {
                let changes = self.get("/api/v1/audit?limit=500").await?;
                let changes = changes["entries"].as_array().map_or(0, Vec::len);
                say(
                    "balanced",
                    &format!(
                        "{} issues, nothing pending; {changes} changes in the audit log",
                        issues.len()
                    ),
                );
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "issues are still pending: {issues:?}");
            sleep(LOOK_EVERY).await;
        }
    }

    /// What the reports say of it, where there are any.
    async fn show_report(&self) -> Result<()> {
        let deadline = Instant::now() + STEP_MAX;
        loop {
            let address = format!("{}/api/v1/reports/first-response", self.root);
            let (status, table) = self.send(self.client.get(address)).await?;
            if status == NO_ANALYTICS {
                return Ok(());
            }
            // A demo at midnight has two rows.
            let rows = table["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
            let answered: u64 = rows.iter().filter_map(|row| row[1].as_u64()).sum();
            if let (4.., Some(row)) = (answered, rows.last()) {
                let half = row[2].as_f64().unwrap_or_default();
                let sentence = format!(
                    "{answered} tickets in a DuckDB file, half of them answered within {half:.2} s (`headwater report`)"
                );
                say("reported", &sentence);
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "reports lack tickets: {status} {table}");
            sleep(LOOK_EVERY).await;
        }
    }

    /// Waits for so many replies of the desk to a ticket.
    async fn replies(&self, ticket: &str, count: usize) -> Result<Vec<String>> {
        let deadline = Instant::now() + STEP_MAX;
        loop {
            let shown = self.get(&format!("/api/v1/tickets/{ticket}")).await?;
            let messages = shown["messages"].as_array().context("messages")?;
            let of_the_desk = messages.iter().filter(|message| message["author"] == "assistant");
            let replies: Vec<_> =
                of_the_desk.filter_map(|it| it["content"].as_str().map(str::to_owned)).collect();
            if replies.len() >= count {
                return Ok(replies);
            }
            ensure!(Instant::now() < deadline, "no reply to ticket {ticket} within {STEP_MAX:?}");
            sleep(LOOK_EVERY).await;
        }
    }
}

/// The other side of the webhook: takes the reply.
async fn receive(listener: TcpListener, sender: mpsc::Sender<(bool, String)>) {
    let take = |State(sender): State<mpsc::Sender<(bool, String)>>,
                headers: HeaderMap,
                body: String| async move {
        let is_signed = headers.contains_key("webhook-signature");
        // If nobody looks any more, the reply is still taken.
        let _ = sender.try_send((is_signed, body));
    };
    let router = Router::new().route("/", post(take)).with_state(sender);
    // It ends when the demo does.
    let _ = axum::serve(listener, router).await;
}

async fn show_callback(callbacks: &mut mpsc::Receiver<(bool, String)>) -> Result<()> {
    let Ok(Some((is_signed, body))) = timeout(STEP_MAX, callbacks.recv()).await else {
        bail!("the reply to the webhook did not come back within {STEP_MAX:?}");
    };
    ensure!(is_signed, "the reply to the webhook is not signed");
    say("replied", &format!("to the webhook, signed, at its own address: {}", short(&body)));
    Ok(())
}

fn random() -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(Uuid::new_v4().as_bytes());
    bytes[16..].copy_from_slice(Uuid::new_v4().as_bytes());
    bytes
}

fn text(body: &Value, field: &str) -> Result<String> {
    body[field].as_str().map(str::to_owned).with_context(|| format!("no `{field}` in {body}"))
}

/// The beginning of a text, on one line, with nothing that a terminal would obey.
fn short(text: &str) -> String {
    const LETTERS_MAX: usize = 80;
    let plain = |letter: char| if letter.is_control() { ' ' } else { letter };
    let shown: String = text.chars().map(plain).take(LETTERS_MAX).collect();
    if shown.chars().count() < text.chars().count() { format!("{shown}...") } else { shown }
}

fn say(what: &str, sentence: &str) {
    println!("{what:<10} {}", crate::text::printable(sentence));
}
