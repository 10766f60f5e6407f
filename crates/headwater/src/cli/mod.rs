//! The verbs of operators on the command line: each asks the routes of `admin`, over the network or in this process.
//!
//! Upstream: `command`. Downstream: `client`, which has one way to a server and one to the same routes on streams that
//! this process opens itself; `print` shows the answers.
//! Promises: `--json` gives one JSON value a line on standard output and nothing else; what destroys asks first, or takes
//! `--yes`; texts from strangers reach no terminal unescaped.

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
use crate::exit::Failure;

use crate::cli::api_client::Client;
use crate::cli::in_process::Needs;

/// What an operator wants.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Verb {
    /// Create, list, describe, grow, trim or delete topics.
    Topic(verbs::topic::Topic),
    /// Send messages.
    Produce(verbs::produce::Produce),
    /// Take messages as a member of a group.
    Consume(verbs::consume::Consume),
    /// Follow a topic without taking part in a group.
    Tail(verbs::tail::Tail),
    /// List, describe, reset or delete the groups of a topic.
    Group(verbs::group::Group),
    /// List the messages that a group has in hand.
    Pending(verbs::group::Pending),
    /// List, show, replay or purge the dead letters of a topic.
    Dlq(verbs::dlq::Dlq),
    /// List, show, explain, retry or release issues.
    Issue(verbs::issue::Issue),
    /// Open, list, show, reply to, close or reopen tickets.
    Ticket(verbs::ticket::Ticket),
    /// List, show, replay, fork, export or import sessions.
    Session(verbs::session::Session),
    /// List replies and events that were given up, or send them again.
    Outbox(verbs::outbox::Outbox),
    /// Say whether every event is accounted for, or who changed what.
    Audit(verbs::audit::Audit),
    /// Watch topics and groups.
    Top(verbs::top::Top),
    /// Ask what happened: one SELECT to the DuckDB file.
    Sql(verbs::sql::Sql),
    /// Ask one of the questions that have names.
    Report(verbs::report::Report),
    /// Rebuild the DuckDB file from the database.
    Analytics(verbs::analytics::Analytics),
    /// Measure how fast this program is on these servers.
    Bench(verbs::bench::Bench),
    /// Look at the servers and say what to change.
    Doctor(verbs::doctor::Doctor),
    /// Print what a shell needs to complete the words of this program.
    Completion(verbs::completion::Completion),
}

impl Verb {
    /// Does it.
    pub(crate) async fn run(&self, settings: &Settings) -> Result<(), Failure> {
        let (reach, needs) = match self {
            // These need the servers themselves, or none.
            Self::Bench(bench) => return bench.run(settings).await,
            Self::Doctor(doctor) => return doctor.run(settings).await,
            Self::Completion(completion) => return completion.run(),
            // And these the DuckDB file.
            Self::Sql(sql) => return sql.run(settings).await,
            Self::Report(report) => return report.run(settings).await,
            Self::Analytics(analytics) => return analytics.run(settings).await,
            Self::Topic(topic) => (&topic.reach, Needs::streams(topic.is_look())),
            Self::Produce(produce) => (&produce.reach, Needs::streams(false)),
            Self::Consume(consume) => (&consume.reach, Needs::streams(false)),
            Self::Tail(tail) => (&tail.reach, Needs::streams(true)),
            Self::Group(group) => (&group.reach, Needs::streams(group.is_look())),
            Self::Pending(pending) => (&pending.reach, Needs::streams(true)),
            Self::Dlq(dlq) => (&dlq.reach, Needs::streams(dlq.is_look())),
            Self::Top(top) => (&top.reach, Needs::streams(true)),
            Self::Issue(issue) => (&issue.reach, issue.needs()),
            Self::Ticket(ticket) => (&ticket.reach, ticket.needs()),
            Self::Session(session) => (&session.reach, Needs::everything(session.is_look())),
            Self::Outbox(outbox) => (&outbox.reach, Needs::database(outbox.is_look())),
            Self::Audit(audit) => (&audit.reach, Needs::database(true)),
        };
        let client = match reach.url() {
            Some(url) => Client::network(&url)?,
            None => {
                if let Self::Audit(_) = self {
                    in_process::given_database_is_there(settings)?;
                }
                Client::in_process(settings, needs).await?
            }
        };
        let outcome = self.ask(&client).await;
        client.close().await;
        outcome
    }

    async fn ask(&self, client: &Client) -> Result<(), Failure> {
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

/// Where a verb goes, and how it answers.
#[derive(Debug, clap::Args)]
pub(crate) struct Reach {
    /// Ask this server instead of opening the streams; HEADWATER_URL says the same. Its token is read from
    /// HEADWATER_TOKEN.
    #[arg(long, global = true, value_name = "URL")]
    url: Option<String>,
    /// One JSON value a line.
    #[arg(long, global = true)]
    json: bool,
}

impl Reach {
    fn url(&self) -> Option<String> {
        let known = || std::env::var("HEADWATER_URL").ok().filter(|url| !url.is_empty());
        self.url.clone().or_else(known)
    }
}

/// Asks before something is destroyed.
#[derive(Debug, clap::Args)]
pub(crate) struct Confirm {
    /// Do not ask.
    #[arg(long, short)]
    yes: bool,
}

impl Confirm {
    fn ask(&self, question: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        if !std::io::stdin().is_terminal() {
            return Err(Failure::usage(format!("{question} Say so with --yes.")));
        }
        eprint!("{question} [y/N] ");
        let _ = std::io::stderr().flush();
        let mut answer = String::new();
        let _ = std::io::stdin().read_line(&mut answer);
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => Err(Failure::new("nothing was done")),
        }
    }
}

/// A length of time as an argument: `500ms`, `5s`, `2h`.
fn time(text: &str) -> Result<Duration, String> {
    crate::config::time(text).ok_or_else(|| "a number with ms, s, m, h or d, such as 5s".to_owned())
}

/// The number of an issue or a row of the outbox as an argument.
fn number(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| "an id is a number; `list` shows them".to_owned())
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
