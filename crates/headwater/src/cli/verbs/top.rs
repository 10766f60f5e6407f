//! `headwater top`: shows issues, workers and the model, and throughput, lag, pending messages, owners and dead letters of
//! topics.
//!
//! Upstream: `cli/mod.rs`. Downstream: the routes of topics, groups and `/status`; `top_view.rs` compares two snapshots.
//! Guarantees: read-only; costs a few calls per topic and refresh, independent of the size of the topics. Only a terminal
//! receives control sequences.

use std::time::Duration;

use console::{Term, truncate_str};
use serde_json::Value;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output;
use crate::cli::top_view::{Frame, TopSnapshot, is_read};
use crate::cli::units::time;
use crate::exit::CliError;
use crate::server::shutdown_signal::ShutdownSignal;

/// Maximum number of topics.
const TOPICS_MAX: usize = 200;
/// Terminal sequences: alternate screen on, clear, and off.
const ENTER: &str = "\u{1b}[?1049h\u{1b}[?25l";
const CLEAR: &str = "\u{1b}[H\u{1b}[J";
const LEAVE: &str = "\u{1b}[?25h\u{1b}[?1049l";

/// Watch topics, groups, issues, workers and the model.
#[derive(Debug, clap::Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// Only these topics; all by default.
    topics: Vec<String>,
    /// Refresh interval.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "1s")]
    every: Duration,
    /// Print once and exit. With --json, one line for each topic and group, and one for issues, workers and the model.
    #[arg(long)]
    once: bool,
}

impl TopArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let shutdown = ShutdownSignal::default();
        shutdown.on_signals().map_err(|error| CliError::new(error.to_string()))?;
        let every = self.every.clamp(Duration::from_millis(100), Duration::from_secs(3600));
        let mut before = snapshot(client, &self.topics).await?;
        let term = Term::stdout();
        let is_screen = !self.once && !self.connection.json && term.is_term();
        let screen = is_screen.then(|| AlternateScreen::enter(term));
        loop {
            tokio::select! {
                () = tokio::time::sleep(every) => {}
                () = shutdown.wait() => return Ok(()),
            }
            let now = snapshot(client, &self.topics).await?;
            let frame = Frame::between(&before, &now);
            let mut lines = frame.screen();
            if now.left_out {
                lines.push(left_out());
            }
            match &screen {
                Some(screen) => screen.show(&lines)?,
                None if self.connection.json => {
                    frame
                        .lines()
                        .try_for_each(|line| output::json(self.connection.style(), line))?;
                    if now.left_out {
                        output::note(&left_out());
                    }
                }
                None => output::exact(&lines.join("\n"))?,
            }
            if self.once {
                return Ok(());
            }
            before = now;
        }
    }
}

/// Says that topics are not shown.
pub(super) fn left_out() -> String {
    format!("only the first {TOPICS_MAX} topics are shown; name others: `headwater top TOPIC`")
}

/// Reads these topics, or all, with their groups and the status.
pub(super) async fn snapshot(
    client: &ApiClient,
    names: &[String],
) -> Result<TopSnapshot, CliError> {
    let mut snapshot = TopSnapshot::empty();
    if names.is_empty() {
        let topics = &mut snapshot.topics;
        let show = |topic| topics.push(topic);
        let all = [("all", "true".to_owned())];
        snapshot.left_out = client.pages("/topics", &all, "topics", TOPICS_MAX, show).await?;
    }
    for name in names {
        snapshot.topics.push(client.get(&path(name), &[]).await?);
    }
    // A server that does not answer does not hide the topics of the others.
    for topic in snapshot.topics.iter().filter(|topic| is_read(topic)) {
        let name = topic["name"].as_str().unwrap_or_default();
        // A topic deleted in the meantime has no groups.
        let found = match client.get_optional(&format!("{}/groups", path(name)), &[]).await {
            Err(CliError::Unreachable(_)) => None,
            found => found?,
        };
        if let Some(Value::Array(found)) = found.map(|mut found| found["groups"].take()) {
            snapshot.groups.extend(found);
        }
    }
    // Commands that open only streams have no such route.
    snapshot.status = client.get_optional("/status", &[]).await?;
    Ok(snapshot)
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

/// The escaped lines, cut to the size of the terminal. The last row says how many lines do not fit.
fn screen(lines: &[String], rows: usize, columns: usize) -> String {
    let shown = if lines.len() > rows { rows.saturating_sub(1) } else { lines.len() };
    let left = lines.len() - shown;
    let left = (left > 0).then(|| format!("… {left} more lines"));
    let fitting = lines[..shown].iter().chain(&left);
    let fitting = fitting.map(|line| truncate_str(line, columns, "…").into_owned());
    format!("{CLEAR}{}", fitting.collect::<Vec<_>>().join("\r\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_fits_the_terminal() {
        let lines = ["TOPIC".to_owned(), "订单订单".to_owned(), "c\\u001b[2J".to_owned()];
        assert_eq!(screen(&lines, 3, 80), format!("{CLEAR}TOPIC\r\n订单订单\r\nc\\u001b[2J"));
        assert_eq!(screen(&lines, 3, 5), format!("{CLEAR}TOPIC\r\n订单…\r\nc\\u0…"));
        assert_eq!(screen(&lines, 2, 4), format!("{CLEAR}TOP…\r\n… 2…"));
    }
}
