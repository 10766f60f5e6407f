//! `headwater top`: shows throughput, lag, pending messages, owners and dead letters.
//!
//! Upstream: `cli/mod.rs`. Downstream: the routes of topics and groups; `top_view.rs` compares two snapshots.
//! Guarantees: read-only; costs a few calls per topic and refresh, independent of the size of the topics. Only a terminal
//! receives control sequences.

use std::time::Duration;

use console::{Term, truncate_str};
use serde_json::Value;
use tokio::time::Instant;

use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output;
use crate::cli::top_view::{Frame, TopSnapshot};
use crate::cli::{ConnectionArgs, time};
use crate::exit::CliError;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::text::printable;

/// Maximum number of topics.
const TOPICS_MAX: usize = 200;
/// The server's own streams, which are not registered as topics.
const PLAIN: [&str; 2] = ["issue_work", "ticket_events"];
/// Terminal sequences: alternate screen on, clear, and off.
const ENTER: &str = "\u{1b}[?1049h\u{1b}[?25l";
const CLEAR: &str = "\u{1b}[H\u{1b}[J";
const LEAVE: &str = "\u{1b}[?25h\u{1b}[?1049l";

/// Watch topics and groups.
#[derive(Debug, clap::Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// Only these topics.
    topics: Vec<String>,
    /// Refresh interval.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "1s")]
    every: Duration,
    /// Print once and exit. With --json, one line for each topic and group.
    #[arg(long)]
    once: bool,
}

impl TopArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let shutdown = ShutdownSignal::default();
        shutdown.on_signals().map_err(|error| CliError::new(error.to_string()))?;
        let every = self.every.clamp(Duration::from_millis(100), Duration::from_secs(3600));
        let mut before = self.snapshot(client).await?;
        let term = Term::stdout();
        let is_screen = !self.once && !self.connection.json && term.is_term();
        let screen = is_screen.then(|| AlternateScreen::enter(term));
        loop {
            tokio::select! {
                () = tokio::time::sleep(every) => {}
                () = shutdown.wait() => return Ok(()),
            }
            let now = self.snapshot(client).await?;
            let frame = Frame::between(&before, &now);
            match &screen {
                Some(screen) => screen.show(&frame.table())?,
                None if self.connection.json => {
                    frame.lines().try_for_each(|line| output::json(true, line))?;
                }
                None => output::line(&frame.table().join("\n"))?,
            }
            if self.once {
                return Ok(());
            }
            before = now;
        }
    }

    async fn snapshot(&self, client: &ApiClient) -> Result<TopSnapshot, CliError> {
        let mut topics = Vec::new();
        if self.topics.is_empty() {
            client.pages("/topics", &[], "topics", TOPICS_MAX, |topic| topics.push(topic)).await?;
            for name in PLAIN {
                topics.extend(client.get_optional(&path(name), &[]).await?);
            }
        } else {
            for name in &self.topics {
                topics.push(client.get(&path(name), &[]).await?);
            }
        }
        let mut groups = Vec::new();
        for topic in &topics {
            let name = topic["name"].as_str().unwrap_or_default();
            // A topic deleted in the meantime has no groups.
            let found = client.get_optional(&format!("{}/groups", path(name)), &[]).await?;
            if let Some(Value::Array(found)) = found.map(|mut found| found["groups"].take()) {
                groups.extend(found);
            }
        }
        Ok(TopSnapshot { at: Instant::now(), topics, groups })
    }
}

fn path(topic: &str) -> String {
    format!("/topics/{}", escape(topic))
}

/// The alternate screen; left on drop.
struct AlternateScreen(Term);

impl AlternateScreen {
    fn enter(term: Term) -> Self {
        let _ = term.write_str(ENTER);
        Self(term)
    }

    /// Replaces the content of the screen.
    fn show(&self, lines: &[String]) -> Result<(), CliError> {
        let (rows, columns) = self.0.size();
        let written = self.0.write_str(&screen(lines, rows.into(), columns.into()));
        written.map_err(|error| CliError::new(format!("cannot write to the terminal: {error}")))
    }
}

impl Drop for AlternateScreen {
    fn drop(&mut self) {
        let _ = self.0.write_str(LEAVE);
    }
}

/// The lines, cut to the size of the terminal. The last row says how many lines do not fit.
fn screen(lines: &[String], rows: usize, columns: usize) -> String {
    let shown = if lines.len() > rows { rows.saturating_sub(1) } else { lines.len() };
    let left = lines.len() - shown;
    let left = (left > 0).then(|| format!("… {left} more lines"));
    let fitting = lines[..shown].iter().chain(&left);
    let fitting = fitting.map(|line| truncate_str(&printable(line), columns, "…").into_owned());
    format!("{CLEAR}{}", fitting.collect::<Vec<_>>().join("\r\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_fits_the_terminal() {
        let lines = ["TOPIC".to_owned(), "订单订单".to_owned(), "c\u{1b}[2J".to_owned()];
        assert_eq!(screen(&lines, 3, 80), format!("{CLEAR}TOPIC\r\n订单订单\r\nc\\u001b[2J"));
        assert_eq!(screen(&lines, 3, 5), format!("{CLEAR}TOPIC\r\n订单…\r\nc\\u0…"));
        assert_eq!(screen(&lines, 2, 4), format!("{CLEAR}TOP…\r\n… 2…"));
    }
}
