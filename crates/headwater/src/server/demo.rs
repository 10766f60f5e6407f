//! `serve --demo`: sends a few tickets and a signed webhook through the running server, prints each step, and fills the
//! screens of the console (`demo/data.rs`).
//!
//! Upstream: `entry.rs` prepares it, `run.rs` starts it. Downstream: only the server's HTTP API. Guarantees: data goes
//! to a temporary directory that is removed at the end, unless the settings name another location; a step that
//! exceeds its timeout is printed and ends the process with exit code 1.

mod data;

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
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

use crate::config::{
    IntegrationSettings, ProviderKind, ResolvedSettings, Role, SettingSource, TokenSettings,
};
use crate::desk::ReplyMode;
use crate::exit::CliError;
use crate::outbound::sign;
use crate::server::shutdown_signal::ShutdownSignal;

/// Id of the integration that the demo adds.
const INTEGRATION: &str = "demo";

/// Id of the integration whose answers wait for a person.
const REVIEWED: &str = "demo-review";

/// The receiver of callbacks refuses the reply to this issue.
const REFUSED_ISSUE: &str = "78";

/// Timeout of one step, for slow machines.
const STEP_MAX: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Status returned by a server without analytics.
const NO_ANALYTICS: u16 = 501;

/// Capacity of the queue of received callbacks.
const CALLBACKS_MAX: usize = 16;

/// The prepared demo.
pub(crate) struct Demo {
    callback: TcpListener,
    secret: SecretString,
    token: Option<SecretString>,
    location: String,
    after: AfterDemo,
}

/// What to do after the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterDemo {
    /// Keep serving.
    Serve,
    /// Shut down gracefully.
    Exit,
}

impl Demo {
    /// Adds what the demo needs to the settings: an integration, a token if tokens are configured, and a temporary
    /// directory. Keep the directory until the server has stopped.
    pub(crate) async fn prepare(
        loaded: &mut ResolvedSettings,
        after: AfterDemo,
    ) -> Result<(Self, TempDir), CliError> {
        let directory =
            tempfile::tempdir().context("failed to create a temporary directory for the demo")?;
        let callback = TcpListener::bind(("127.0.0.1", 0)).await;
        let callback = callback.context("failed to bind a port for demo callbacks")?;
        let address = callback.local_addr().context("failed to bind a port for demo callbacks")?;

        let is_default = |name| loaded.values.get(name).source == SettingSource::Default;
        let (own_streams, own_database) = (is_default("stream.url"), is_default("database.url"));
        let own_analytics = is_default("analytics.path");
        let is_quiet = is_default("log.level");
        let settings = &mut loaded.settings;
        if is_quiet {
            // Keep the demo's own output readable.
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
            settings.analytics.path = Some(directory.path().join("analytics.duckdb"));
        }
        let location = match (own_streams, own_database) {
            (true, true) => "no other services, data in a temporary directory".to_owned(),
            _ => format!("{} and {}", settings.stream_shown(), settings.database_shown()),
        };
        let secret: SecretString = format!("whsec_{}", STANDARD.encode(random())).into();
        let integration = |id: &str, mode: ReplyMode| IntegrationSettings {
            id: id.to_owned(),
            provider: ProviderKind::Standard,
            secret: Some(secret.clone()),
            reply_token: None,
            app: None,
            base_url: Some(format!("http://{address}/")),
            bot_login: None,
            agents: Vec::new(),
            author_associations: Vec::new(),
            mode,
            rules: Vec::new(),
            models: Vec::new(),
            is_built_in: true,
        };
        settings.integrations.push(integration(INTEGRATION, ReplyMode::Auto));
        settings.integrations.push(integration(REVIEWED, ReplyMode::Draft));
        let token =
            (!settings.tokens.is_empty()).then(|| SecretString::from(STANDARD.encode(random())));
        settings.tokens.extend(token.clone().map(|token| TokenSettings {
            name: INTEGRATION.to_owned(),
            role: Role::Admin,
            token,
            integrations: None,
        }));
        Ok((Self { callback, secret, token, location, after }, directory))
    }

    /// Runs all steps, then waits for shutdown or triggers it. Returns before shutdown only on failure.
    pub(crate) async fn run(self, address: SocketAddr, shutdown: ShutdownSignal) {
        let after = self.after;
        tokio::select! {
            shown = self.show(address) => match shown {
                Ok(()) if after == AfterDemo::Exit => shutdown.trigger(),
                Ok(()) => shutdown.wait().await,
                Err(problem) => print_step("failed", &format!("{problem:#}")),
            },
            () = shutdown.wait() => {}
        }
    }

    async fn show(self, address: SocketAddr) -> Result<()> {
        let (sender, mut callbacks) = mpsc::channel(CALLBACKS_MAX);
        // Aborted when the demo ends.
        let mut receiving = JoinSet::new();
        receiving.spawn(receive(self.callback, sender));
        let client = Client::builder().no_proxy().timeout(STEP_MAX).build()?;
        let server = DemoClient { client, root: format!("http://{address}"), token: self.token };
        print_step(
            "started",
            &format!("everything in one process at {}; {}", server.root, self.location),
        );

        server.show_tickets().await?;
        server.show_burst().await?;
        server.show_webhook(&self.secret).await?;
        show_callback(&mut callbacks).await?;
        server.show_consistency().await?;
        server.show_report().await?;
        server.fill_console(&self.secret).await?;
        match self.after {
            AfterDemo::Serve => print_step(
                "serving",
                &format!("web console at {}/console; Ctrl-C shuts down gracefully", server.root),
            ),
            AfterDemo::Exit => print_step("stopping", "shutting down gracefully (--demo-exit)"),
        }
        Ok(())
    }
}

/// HTTP client for the demo's server.
struct DemoClient {
    client: Client,
    root: String,
    token: Option<SecretString>,
}

impl DemoClient {
    async fn send(&self, request: RequestBuilder) -> Result<(u16, Value)> {
        let request = match &self.token {
            Some(token) => request.bearer_auth(token.expose_secret()),
            None => request,
        };
        let response = request.send().await?;
        let status = response.status().as_u16();
        Ok((status, response.json().await.context("response is not JSON")?))
    }

    async fn get(&self, path: &str) -> Result<Value> {
        let (status, body) = self.send(self.client.get(format!("{}{path}", self.root))).await?;
        ensure!(status == 200, "GET {path} returned {status}: {body}");
        Ok(body)
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let request = self.client.post(format!("{}{path}", self.root)).json(body);
        let (status, body) = self.send(request).await?;
        ensure!(status < 300, "POST {path} returned {status}: {body}");
        Ok(body)
    }

    /// Opens three tickets and waits for a reply to each.
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
        print_step(
            "opened",
            &format!("{} tickets, each committed before the response", opened.len()),
        );
        for (title, id, since) in &opened {
            let replies = self.replies(id, 1).await?;
            let reply = replies.first().context("missing reply")?;
            print_step(
                "answered",
                &format!(
                    "\"{title}\" after {} ms: {}",
                    since.elapsed().as_millis(),
                    truncated(reply)
                ),
            );
        }
        Ok(())
    }

    /// Sends several messages at once; the desk batches them into one run.
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
        print_step(
            "batched",
            &format!(
                "6 messages in a row got {count} {noun}: {}",
                replies.last().map_or_else(String::new, |it| truncated(it))
            ),
        );
        Ok(())
    }

    /// Sends a signed webhook, a duplicate of it, and one with an invalid signature.
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
        ensure!(status == 200 && first["status"] == "ok", "webhook returned {status}: {first}");
        print_step(
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
            "duplicate or forged webhook was accepted: {again}, {forged}"
        );
        print_step("rejected", "a resent webhook is a duplicate, a forged one gets 401");
        Ok(())
    }

    /// Waits until all issues are processed, and counts the audit log.
    async fn show_consistency(&self) -> Result<()> {
        let deadline = Instant::now() + STEP_MAX;
        loop {
            let issues = self.get("/api/v1/issues?limit=500").await?;
            let issues = issues["issues"].as_array().context("no issues in the response")?;
            let is_done = |issue: &Value| {
                issue["pending_events"] == 0 && issue["processing_status"] == "idle"
            };
            if issues.iter().all(is_done) {
                let changes = self.get("/api/v1/audit?limit=500").await?;
                let changes = changes["entries"].as_array().map_or(0, Vec::len);
                print_step(
                    "checked",
                    &format!(
                        "{} issues, nothing pending; {changes} changes in the audit log",
                        issues.len()
                    ),
                );
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "issues are still pending: {issues:?}");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Prints a report, if analytics is available.
    async fn show_report(&self) -> Result<()> {
        let deadline = Instant::now() + STEP_MAX;
        loop {
            let address = format!("{}/api/v1/reports/first-response", self.root);
            let (status, table) = self.send(self.client.get(address)).await?;
            if status == NO_ANALYTICS {
                return Ok(());
            }
            // A demo that runs over midnight has two rows.
            let rows = table["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
            let answered: u64 = rows.iter().filter_map(|row| row[1].as_u64()).sum();
            if let (4.., Some(row)) = (answered, rows.last()) {
                let half = row[2].as_f64().unwrap_or_default();
                let sentence = format!(
                    "{answered} tickets in a DuckDB file, half of them answered within {half:.2} s (`headwater report`)"
                );
                print_step("reported", &sentence);
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "report is incomplete: {status} {table}");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits for `count` replies of the desk to a ticket.
    async fn replies(&self, ticket: &str, count: usize) -> Result<Vec<String>> {
        let deadline = Instant::now() + STEP_MAX;
        loop {
            let shown = self.get(&format!("/api/v1/tickets/{ticket}")).await?;
            let messages = shown["messages"].as_array().context("no messages in the response")?;
            let of_the_desk = messages.iter().filter(|message| message["author"] == "assistant");
            let replies: Vec<_> =
                of_the_desk.filter_map(|it| it["content"].as_str().map(str::to_owned)).collect();
            if replies.len() >= count {
                return Ok(replies);
            }
            ensure!(Instant::now() < deadline, "no reply to ticket {ticket} within {STEP_MAX:?}");
            sleep(POLL_INTERVAL).await;
        }
    }
}

/// Callback server: receives the reply to the webhook.
async fn receive(listener: TcpListener, sender: mpsc::Sender<(bool, String)>) {
    let take = |State(sender): State<mpsc::Sender<(bool, String)>>,
                headers: HeaderMap,
                body: String| async move {
        let is_signed = headers.contains_key("webhook-signature");
        let reply: Value = serde_json::from_str(&body).unwrap_or_default();
        if reply["data"]["external_issue_id"] == REFUSED_ISSUE {
            return StatusCode::GONE;
        }
        // The reply is accepted even if the queue is full or closed.
        let _ = sender.try_send((is_signed, body));
        StatusCode::OK
    };
    let router = Router::new().route("/", post(take)).with_state(sender);
    // Runs until the demo ends.
    let _ = axum::serve(listener, router).await;
}

async fn show_callback(callbacks: &mut mpsc::Receiver<(bool, String)>) -> Result<()> {
    let Ok(Some((is_signed, body))) = timeout(STEP_MAX, callbacks.recv()).await else {
        bail!("no reply to the webhook within {STEP_MAX:?}");
    };
    ensure!(is_signed, "the reply to the webhook is not signed");
    print_step("replied", &format!("signed callback received: {}", truncated(&body)));
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

/// The first characters of a text on one line, without control characters.
fn truncated(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    let plain = |letter: char| if letter.is_control() { ' ' } else { letter };
    let shown: String = text.chars().map(plain).take(CHARS_MAX).collect();
    if shown.chars().count() < text.chars().count() { format!("{shown}...") } else { shown }
}

fn print_step(what: &str, sentence: &str) {
    println!("{what:<10} {}", crate::text::printable(sentence));
}
