//! Data of the demo for the screens of the console: a topic with a group, dead letters of two causes and a delayed message, a
//! refused reply, a draft, a ticket that is handed over, a replay plan, and a stream to assign. Other tickets and sessions come from the demo itself.
//!
//! Upstream: `demo.rs`. Downstream: only the server's HTTP API. Guarantees: a second demo on the same data adds to it and does not
//! fail.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use secrecy::SecretString;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{
    DemoClient, INTEGRATION, POLL_INTERVAL, REFUSED_ISSUE, REVIEWED, STEP_MAX, print_step,
};
use crate::outbound::sign;

const TOPIC: &str = "orders";
const GROUP: &str = "billing";

/// Messages sent to the topic, and how many of them the group processes; the others are its lag.
const MESSAGES: usize = 24;
const PROCESSED: usize = 20;

/// The topic of the replay plan, and its messages: more than a canary.
const PLANNED_TOPIC: &str = "refunds";
const PLANNED: usize = 7;

/// Messages that fail, by their position, with the reason.
const FAILURES: [(usize, &str); 3] = [
    (3, "order has no address"),
    (8, "order has no address"),
    (13, "connection refused by payments.example:443"),
];

impl DemoClient {
    /// Fills the screens that the demo has not filled.
    pub(super) async fn fill_console(&self, secret: &SecretString) -> Result<()> {
        print_step(
            "filling",
            "the console with data; one reply is refused on purpose, which the log reports as an error",
        );
        self.webhook(secret, INTEGRATION, REFUSED_ISSUE, "Please cancel order 78.").await?;
        self.webhook(secret, REVIEWED, "79", "The invoice of order 79 is wrong.").await?;
        // The scripted model hands over when it reads this.
        let for_a_person = json!({"title": "A refund", "content": "My refund is late. I want to talk to a person."});
        self.post("/api/v1/tickets", &for_a_person).await?;
        self.fill_topic().await?;
        self.fill_plan().await?;
        let path = "/api/v1/assignments/cameras/streams";
        let request = self.client.post(format!("{}{path}", self.root));
        let (status, answer) = self.send(request.json(&json!({"stream": "camera-1"}))).await?;
        // A second demo finds the stream of the first.
        ensure!(status < 300 || status == 409, "POST {path} returned {status}: {answer}");
        self.until("/api/v1/outbox/dead", "rows").await?;
        self.until("/api/v1/drafts", "drafts").await?;
        self.until("/api/v1/tickets?handed_over=true", "tickets").await?;
        let failed = FAILURES.len();
        print_step(
            "filled",
            &format!(
                "topic `{TOPIC}` with {MESSAGES} messages, {failed} dead letters and a delayed message; a refused reply; a draft; a ticket for a person; a replay plan"
            ),
        );
        Ok(())
    }

    async fn webhook(
        &self,
        secret: &SecretString,
        integration: &str,
        issue: &str,
        text: &str,
    ) -> Result<()> {
        let body =
            json!({"type": "order.question", "issue": issue, "project": "shop", "text": text});
        let (body, id) = (body.to_string(), format!("demo-{}", Uuid::new_v4()));
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let request = self
            .client
            .post(format!("{}/webhooks/standard/{integration}", self.root))
            .header("content-type", "application/json")
            .header("webhook-id", &id)
            .header("webhook-timestamp", seconds)
            .header("webhook-signature", sign(secret, &id, seconds, body.as_bytes()))
            .body(body);
        let (status, answer) = self.send(request).await?;
        ensure!(status == 200, "webhook of `{integration}` returned {status}: {answer}");
        Ok(())
    }

    async fn fill_topic(&self) -> Result<()> {
        let new = json!({"name": TOPIC, "partitions": 4});
        let request = self.client.post(format!("{}/api/v1/topics", self.root)).json(&new);
        let (status, answer) = self.send(request).await?;
        ensure!([201, 409].contains(&status), "POST /topics returned {status}: {answer}");
        let names = ["ada", "bob", "cleo", "dan", "eve", "finn"];
        let message = |number: usize| {
            let customer = names[number % names.len()];
            let order =
                json!({"order": 1000 + number, "customer": customer, "total": 9.5 + number as f64});
            json!({"key": customer, "payload": order.to_string(), "headers": {"source": "demo"}})
        };
        let mut messages: Vec<Value> = (0..MESSAGES).map(message).collect();
        let mut reminder = message(0);
        reminder["delay_ms"] = json!(60 * 60 * 1000);
        messages.push(reminder);
        let path = format!("/api/v1/topics/{TOPIC}");
        self.post(&format!("{path}/messages"), &json!({"messages": messages})).await?;

        let group = format!("{path}/groups/{GROUP}");
        let mut processed = 0;
        let deadline = Instant::now() + STEP_MAX;
        while processed < PROCESSED {
            let wanted = json!({"max": PROCESSED - processed, "wait_ms": 2000, "lease_ms": 30_000});
            let pulled = self.post(&format!("{group}/pull"), &wanted).await?;
            let pulled = pulled["messages"].as_array().context("no messages in the response")?;
            let settlements: Vec<Value> = pulled
                .iter()
                .zip(processed..)
                .map(|(message, number)| {
                    let failure = FAILURES.iter().find(|(position, _)| *position == number);
                    match failure {
                        None => json!({"lease": message["lease"], "outcome": "done"}),
                        Some((_, reason)) => {
                            json!({"lease": message["lease"], "outcome": "dead_letter", "reason": reason})
                        }
                    }
                })
                .collect();
            if !settlements.is_empty() {
                processed += settlements.len();
                self.post(&format!("{group}/settle"), &json!({"settlements": settlements})).await?;
            }
            ensure!(
                Instant::now() < deadline,
                "{processed} messages processed within {STEP_MAX:?}"
            );
        }
        Ok(())
    }

    /// Messages that all fail, and a plan that replays them after the cause is fixed.
    async fn fill_plan(&self) -> Result<()> {
        let new = json!({"name": PLANNED_TOPIC, "partitions": 2});
        let request = self.client.post(format!("{}/api/v1/topics", self.root)).json(&new);
        let (status, answer) = self.send(request).await?;
        ensure!([201, 409].contains(&status), "POST /topics returned {status}: {answer}");
        let message = |number: usize| json!({"payload": json!({"refund": number}).to_string()});
        let messages: Vec<Value> = (0..PLANNED).map(message).collect();
        let path = format!("/api/v1/topics/{PLANNED_TOPIC}/messages");
        self.post(&path, &json!({"messages": messages})).await?;
        let (mut failed, deadline) = (0, Instant::now() + STEP_MAX);
        while failed < PLANNED {
            let failure = json!({"outcome": "dead_letter", "reason": "the bank does not answer"});
            failed += self.settle_planned(&failure).await?;
            ensure!(Instant::now() < deadline, "{failed} messages failed within {STEP_MAX:?}");
        }
        let plan = self.post("/api/v1/plans", &json!({"topics": [PLANNED_TOPIC]})).await?;
        let path = format!("/api/v1/plans/{}", plan["id"]);
        let deadline = Instant::now() + STEP_MAX;
        while self.get(&path).await?["state"] == "running" {
            self.settle_planned(&json!({"outcome": "done"})).await?;
            ensure!(Instant::now() < deadline, "{path} still runs after {STEP_MAX:?}");
        }
        Ok(())
    }

    /// Settles the messages of the plan that wait. Returns how many.
    async fn settle_planned(&self, outcome: &Value) -> Result<usize> {
        let group = format!("/api/v1/topics/{PLANNED_TOPIC}/groups/{GROUP}");
        let wanted = json!({"max": PLANNED, "wait_ms": 200, "lease_ms": 30_000});
        let pulled = self.post(&format!("{group}/pull"), &wanted).await?;
        let pulled = pulled["messages"].as_array().context("no messages in the response")?;
        let settlement = |message: &Value| {
            let mut settlement = outcome.clone();
            settlement["lease"] = message["lease"].clone();
            settlement
        };
        let settlements: Vec<Value> = pulled.iter().map(settlement).collect();
        let count = settlements.len();
        if count > 0 {
            self.post(&format!("{group}/settle"), &json!({"settlements": settlements})).await?;
        }
        Ok(count)
    }

    /// Waits until a list has an item.
    async fn until(&self, path: &str, list: &str) -> Result<()> {
        let deadline = Instant::now() + STEP_MAX;
        loop {
            let page = self.get(path).await?;
            if page[list].as_array().is_some_and(|items| !items.is_empty()) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{path} is empty after {STEP_MAX:?}: {page}");
            sleep(POLL_INTERVAL).await;
        }
    }
}
