//! `headwater top`: throughput, lag, pending, owners and dead letters, as they are now.
//!
//! Upstream: `operator`. Downstream: the routes of topics and groups; `frame` makes numbers of two looks.
//! Promises: it only looks; it costs a few calls a topic and frame, whatever the topics hold.

use std::io::Write;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use crate::cli::api_client::{Client, escape};
use crate::cli::output;
use crate::cli::top_view::{Frame, Look};
use crate::cli::{Reach, time};
use crate::exit::Failure;
use crate::server::shutdown::Stopping;

/// Topics that are looked at.
const TOPICS_MAX: usize = 200;
/// The topics of this program that nobody creates.
const PLAIN: [&str; 2] = ["issue_work", "ticket_events"];
/// Another screen, so that the old one is there afterwards; and back.
const ENTER: &str = "\u{1b}[?1049h\u{1b}[?25l";
const CLEAR: &str = "\u{1b}[H\u{1b}[J";
const LEAVE: &str = "\u{1b}[?25h\u{1b}[?1049l";

/// Looks at topics again and again.
#[derive(Debug, clap::Args)]
pub(crate) struct Top {
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Only these topics.
    topics: Vec<String>,
    /// How often to look.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "1s")]
    every: Duration,
    /// Print one frame and end. With --json, a line for each topic and group.
    #[arg(long)]
    once: bool,
}

impl Top {
    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let stopping = Stopping::default();
        stopping.on_signals().map_err(|error| Failure::new(error.to_string()))?;
        let every = self.every.clamp(Duration::from_millis(100), Duration::from_secs(3600));
        let mut before = self.look(client).await?;
        let is_screen = !self.once && !self.reach.json;
        let _screen = is_screen.then(Screen::enter);
        loop {
            tokio::select! {
                () = tokio::time::sleep(every) => {}
                () = stopping.begun() => return Ok(()),
            }
            let now = self.look(client).await?;
            let frame = Frame::between(&before, &now);
            if self.reach.json {
                frame.lines().iter().try_for_each(|line| output::json(true, line))?;
            } else {
                if is_screen {
                    write(CLEAR);
                }
                output::line(&frame.table())?;
            }
            if self.once {
                return Ok(());
            }
            before = now;
        }
    }

    async fn look(&self, client: &Client) -> Result<Look, Failure> {
        let mut topics = Vec::new();
        if self.topics.is_empty() {
            client.pages("/topics", &[], "topics", TOPICS_MAX, |topic| topics.push(topic)).await?;
            for name in PLAIN {
                topics.extend(client.find(&path(name), &[]).await?);
            }
        } else {
            for name in &self.topics {
                topics.push(client.get(&path(name), &[]).await?);
            }
        }
        let mut groups = Vec::new();
        for topic in &topics {
            let name = topic["name"].as_str().unwrap_or_default();
            // One that was deleted meanwhile has none.
            let found = client.find(&format!("{}/groups", path(name)), &[]).await?;
            if let Some(Value::Array(found)) = found.map(|mut found| found["groups"].take()) {
                groups.extend(found);
            }
        }
        Ok(Look { at: Instant::now(), topics, groups })
    }
}

fn path(topic: &str) -> String {
    format!("/topics/{}", escape(topic))
}

/// The other screen; left when dropped.
struct Screen;

impl Screen {
    fn enter() -> Self {
        write(ENTER);
        Self
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        write(LEAVE);
    }
}

/// Tells the terminal what to do.
fn write(sequence: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(sequence.as_bytes()).and_then(|()| out.flush());
}
