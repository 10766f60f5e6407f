//! Operator commands: each calls the HTTP API, over the network or in this process.
//!
//! Upstream: `entry.rs`. Flow: `args.rs` parses the command line -> [`OperatorCommand::run`] picks an API client
//! (`api_client.rs`: a server at `--url`, or `in_process.rs` on backends that this process opens) -> a file of
//! `verbs/` sends the requests -> `output.rs` prints tables or JSON, `progress.rs` shows progress. `local_audit.rs`
//! records local changes; `consume_exec.rs` and `supervise.rs` run commands for `consume --exec`; `top_view.rs`
//! computes what `top` shows.
//! Guarantees: `--json` prints one JSON value per line on standard output and nothing else; destructive commands ask
//! for confirmation or require `--yes`; text from outside is escaped for the terminal.

// In dependency order: each module uses only those above it.
mod output;
mod progress;

mod local_audit;

mod in_process;

mod api_client;

pub(crate) mod supervise;

mod consume_exec;
mod top_view;

mod verbs;

pub(crate) mod args;

use std::io::{IsTerminal, Write};
use std::time::Duration;

use crate::config::Settings;
use crate::exit::CliError;

use crate::cli::api_client::ApiClient;
use crate::cli::in_process::Requirements;

/// The operator commands.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum OperatorCommand {
    /// Create, list, describe, grow, trim or delete topics.
    Topic(verbs::topic::TopicArgs),
    /// Send messages.
    Produce(verbs::produce::ProduceArgs),
    /// Consume messages as a member of a group.
    Consume(verbs::consume::ConsumeArgs),
    /// Follow a topic without joining a group.
    Tail(verbs::tail::TailArgs),
    /// List, describe, reset or delete the groups of a topic.
    Group(verbs::group::GroupArgs),
    /// List the pending messages of a group.
    Pending(verbs::group::PendingArgs),
    /// List, show, replay or purge the dead letters of a topic.
    Dlq(verbs::dlq::DlqArgs),
    /// List, show, explain, retry or release issues.
    Issue(verbs::issue::IssueArgs),
    /// Open, list, show, reply to, close or reopen tickets.
    Ticket(verbs::ticket::TicketArgs),
    /// List, show, replay, fork, export or import sessions.
    Session(verbs::session::SessionArgs),
    /// List or retry dead replies and events.
    Outbox(verbs::outbox::OutboxArgs),
    /// Check that every event is accounted for, or list changes.
    Audit(verbs::audit::AuditArgs),
    /// Watch topics and groups.
    Top(verbs::top::TopArgs),
    /// Run an SQL query on the DuckDB file.
    Sql(verbs::sql::SqlArgs),
    /// Run a built-in report.
    Report(verbs::report::ReportArgs),
    /// Rebuild the DuckDB file from the database.
    Analytics(verbs::analytics::AnalyticsArgs),
    /// Measure throughput and latency on these backends.
    Bench(verbs::bench::BenchArgs),
    /// Check the servers and suggest changes.
    Doctor(verbs::doctor::DoctorArgs),
    /// Print a shell completion script.
    Completion(verbs::completion::CompletionArgs),
}

impl OperatorCommand {
    /// Runs the command.
    pub(crate) async fn run(&self, settings: &Settings) -> Result<(), CliError> {
        let (connection, requirements) = match self {
            // Commands that open the backends themselves, or none.
            Self::Bench(bench) => return bench.run(settings).await,
            Self::Doctor(doctor) => return doctor.run(settings).await,
            Self::Completion(completion) => return completion.run(),
            // Commands on the DuckDB file.
            Self::Sql(sql) => return sql.run(settings).await,
            Self::Report(report) => return report.run(settings).await,
            Self::Analytics(analytics) => return analytics.run(settings).await,
            Self::Topic(topic) => (&topic.connection, Requirements::streams(topic.is_read_only())),
            Self::Produce(produce) => (&produce.connection, Requirements::streams(false)),
            Self::Consume(consume) => (&consume.connection, Requirements::streams(false)),
            Self::Tail(tail) => (&tail.connection, Requirements::streams(true)),
            Self::Group(group) => (&group.connection, Requirements::streams(group.is_read_only())),
            Self::Pending(pending) => (&pending.connection, Requirements::streams(true)),
            Self::Dlq(dlq) => (&dlq.connection, Requirements::streams(dlq.is_read_only())),
            Self::Top(top) => (&top.connection, Requirements::streams(true)),
            Self::Issue(issue) => (&issue.connection, issue.requirements()),
            Self::Ticket(ticket) => (&ticket.connection, ticket.requirements()),
            Self::Session(session) => {
                (&session.connection, Requirements::everything(session.is_read_only()))
            }
            Self::Outbox(outbox) => {
                (&outbox.connection, Requirements::database(outbox.is_read_only()))
            }
            Self::Audit(audit) => (&audit.connection, Requirements::database(true)),
        };
        let client = match connection.url() {
            Some(url) => ApiClient::network(&url)?,
            None => {
                if let Self::Audit(_) = self {
                    in_process::require_given_database(settings)?;
                }
                ApiClient::in_process(settings, requirements).await?
            }
        };
        let outcome = self.ask(&client).await;
        client.close().await;
        outcome
    }

    async fn ask(&self, client: &ApiClient) -> Result<(), CliError> {
        match self {
            Self::Topic(topic) => topic.run(client).await,
            Self::Produce(produce) => produce.run(client).await,
            Self::Consume(consume) => consume.run(client).await,
            Self::Tail(tail) => tail.run(client).await,
            Self::Group(group) => group.run(client).await,
            Self::Pending(pending) => pending.run(client).await,
            Self::Dlq(dlq) => dlq.run(client).await,
            Self::Top(top) => top.run(client).await,
            Self::Issue(issue) => issue.run(client).await,
            Self::Ticket(ticket) => ticket.run(client).await,
            Self::Session(session) => session.run(client).await,
            Self::Outbox(outbox) => outbox.run(client).await,
            Self::Audit(audit) => audit.run(client).await,
            Self::Bench(_) | Self::Doctor(_) | Self::Completion(_) => Ok(()),
            Self::Sql(_) | Self::Report(_) | Self::Analytics(_) => Ok(()),
        }
    }
}

/// Options to select the server and the output format.
#[derive(Debug, clap::Args)]
pub(crate) struct ConnectionArgs {
    /// Connect to this server instead of opening the data directly (or set HEADWATER_URL). The token is read from
    /// HEADWATER_TOKEN.
    #[arg(long, global = true, value_name = "URL")]
    url: Option<String>,
    /// Print one JSON value per line.
    #[arg(long, global = true)]
    json: bool,
}

impl ConnectionArgs {
    fn url(&self) -> Option<String> {
        let known = || std::env::var("HEADWATER_URL").ok().filter(|url| !url.is_empty());
        self.url.clone().or_else(known)
    }
}

/// Confirmation of destructive commands.
#[derive(Debug, clap::Args)]
pub(crate) struct ConfirmArgs {
    /// Skip the confirmation.
    #[arg(long, short)]
    yes: bool,
}

impl ConfirmArgs {
    fn ask(&self, question: &str) -> Result<(), CliError> {
        if self.yes {
            return Ok(());
        }
        if !std::io::stdin().is_terminal() {
            return Err(CliError::usage(format!(
                "{question} Refusing to continue without confirmation; pass --yes."
            )));
        }
        eprint!("{question} [y/N] ");
        let _ = std::io::stderr().flush();
        let mut answer = String::new();
        let _ = std::io::stdin().read_line(&mut answer);
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => Err(CliError::new("cancelled; nothing was changed")),
        }
    }
}

/// Parses a duration: `500ms`, `5s`, `2h`.
fn time(text: &str) -> Result<Duration, String> {
    crate::config::time(text)
        .ok_or_else(|| "expected a number with ms, s, m, h or d, such as 5s".to_owned())
}

/// Parses the id of an issue or an outbox row.
fn number(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| "expected a numeric id; `list` shows the ids".to_owned())
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
