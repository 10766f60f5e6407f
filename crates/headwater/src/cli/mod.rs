//! Operator commands: each calls the HTTP API, over the network or in this process.
//!
//! Upstream: `entry.rs`. Flow: `args.rs` parses the command line -> [`OperatorCommand::run`] picks an API client
//! (`api_client.rs`: a server at `--url`, or `in_process.rs` on backends that this process opens) -> a file of
//! `verbs/` sends the requests -> `output.rs` prints tables or JSON in the order of `fields.rs`, `progress.rs` shows
//! progress; `advice.rs` prints errors. `units.rs` reads and shows durations, sizes and times. `local_audit.rs`
//! records local changes; `consume_exec.rs` and `supervise.rs` run commands for `--exec`; `top_view.rs`
//! computes what `top` shows, `status_view.rs` what `status` shows; `help.rs` has examples, `completion.rs` completes
//! names in a shell.
//! Guarantees: `--json` prints one JSON value per line on standard output and nothing else; destructive commands ask
//! for confirmation or require `--yes`; text from outside is escaped for the terminal.

// In dependency order: each module uses only those above it.
mod units;

mod fields;
mod help;
mod progress;

mod output;

mod local_audit;

mod in_process;

mod api_client;

pub(crate) mod supervise;

mod consume_exec;
mod status_view;
mod top_view;

mod verbs;

// These refer to each other: completions and errors need the definition of the command line.
pub(crate) mod advice;
pub(crate) mod args;
pub(crate) mod completion;

use std::io::{IsTerminal, Write};

use crate::config::Settings;
use crate::exit::CliError;

use crate::cli::api_client::ApiClient;
use crate::cli::in_process::Requirements;
use crate::cli::output::OutputStyle;

/// The operator commands.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum OperatorCommand {
    /// Show health, topics, issues, workers, outbox, model and budget on one screen.
    Status(verbs::status::StatusArgs),
    /// Say whether all is well, and what should be done.
    Overview(verbs::overview::OverviewArgs),
    /// Find anything by number, id, name, key or word.
    Search(verbs::search::SearchArgs),
    /// Show dead letters, quarantined issues and dead replies by cause.
    Failure(verbs::failure::FailureArgs),
    /// List the processes that work on issues; show the settings of a server.
    Process(verbs::overview::ProcessArgs),
    /// Show name and role of the token.
    Me(verbs::overview::MeArgs),
    /// Create, list, describe, alter, grow, trim or delete topics.
    Topic(verbs::topic::TopicArgs),
    /// Send messages.
    Produce(verbs::produce::ProduceArgs),
    /// Consume messages as a member of a group.
    Consume(verbs::consume::ConsumeArgs),
    /// Follow a topic without joining a group.
    Tail(verbs::tail::TailArgs),
    /// List, show or explain messages.
    Message(verbs::message::MessageArgs),
    /// List, describe, explain, reset or delete the groups of a topic; list who owns which partition, and which moved.
    Group(verbs::group::GroupArgs),
    /// List the pending messages of a group.
    Pending(verbs::group::PendingArgs),
    /// List, show, replay or purge the dead letters of a topic.
    Dlq(verbs::dlq::DlqArgs),
    /// Replay many dead letters a few at a time; list, show, pause, resume or cancel such plans.
    Plan(verbs::plan::PlanArgs),
    /// Add streams to a service, own them and run a command for each, list or release them.
    Assign(verbs::assign::AssignArgs),
    /// Send requests to workers and wait for their replies, or execute requests with a command.
    Loop(verbs::main_loop::MainLoopArgs),
    /// List, show, explain, retry or release issues.
    Issue(verbs::issue::IssueArgs),
    /// Open, list, show, reply to, take, assign, close or reopen tickets.
    Ticket(verbs::ticket::TicketArgs),
    /// List, show, approve, edit or reject answers that wait for a person.
    Draft(verbs::draft::DraftArgs),
    /// List or show the calls of tools that change something.
    Effect(verbs::effect::EffectArgs),
    /// List, show, set, compare or roll back the prompts of integrations.
    Prompt(verbs::prompt::PromptArgs),
    /// List, show, replay, fork, export or import sessions.
    Session(verbs::session::SessionArgs),
    /// Export the tickets, messages, events and sessions of a user.
    Export(verbs::user::ExportArgs),
    /// Erase the tickets, messages, events and sessions of a user.
    Erase(verbs::user::EraseArgs),
    /// List, explain or retry replies and events.
    Outbox(verbs::outbox::OutboxArgs),
    /// Show what became of the webhooks of a server.
    Webhook(verbs::webhook::WebhookArgs),
    /// Check that every event is accounted for, or list changes.
    Audit(verbs::audit::AuditArgs),
    /// Show how metrics changed over time.
    History(verbs::history::HistoryArgs),
    /// Watch topics, groups, issues, workers and the model.
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
    /// Create the tables in the database, or bring them up to date.
    Migrate(verbs::migrate::MigrateArgs),
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
            Self::Migrate(migrate) => return migrate.run(settings).await,
            Self::Completion(completion) => return completion.run(),
            // Commands on the DuckDB file.
            Self::Sql(sql) => return sql.run(settings).await,
            Self::Report(report) => return report.run(settings).await,
            Self::Analytics(analytics) => return analytics.run(settings).await,
            Self::Topic(topic) => {
                topic.require_server()?;
                (&topic.connection, Requirements::streams(topic.is_read_only()))
            }
            Self::Produce(produce) => (&produce.connection, Requirements::streams(false)),
            Self::Consume(consume) => (&consume.connection, Requirements::streams(false)),
            Self::Tail(tail) => (&tail.connection, Requirements::streams(true)),
            Self::Message(message) => (&message.connection, Requirements::streams(true)),
            Self::Group(group) => {
                group.require_server()?;
                (&group.connection, Requirements::streams(group.is_read_only()))
            }
            Self::Pending(pending) => (&pending.connection, Requirements::streams(true)),
            Self::Dlq(dlq) => (&dlq.connection, Requirements::streams(dlq.is_read_only())),
            Self::Assign(assign) => {
                (&assign.connection, Requirements::streams(assign.is_read_only()))
            }
            Self::Loop(main_loop) => (&main_loop.connection, Requirements::streams(false)),
            Self::Top(top) => (&top.connection, Requirements::everything(true)),
            Self::Status(status) => (&status.connection, Requirements::everything(true)),
            Self::Overview(overview) => (&overview.connection, Requirements::everything(true)),
            Self::Search(search) => (&search.connection, Requirements::everything(true)),
            Self::Failure(failure) => (&failure.connection, Requirements::everything(true)),
            Self::Process(process) => {
                process.require_server()?;
                (&process.connection, Requirements::database(true))
            }
            Self::Me(me) => (&me.connection, Requirements::database(true)),
            Self::Issue(issue) => (&issue.connection, issue.requirements()),
            Self::Ticket(ticket) => (&ticket.connection, ticket.requirements()),
            Self::Plan(plan) => (&plan.connection, plan.requirements()),
            Self::Draft(draft) => (&draft.connection, draft.requirements()),
            Self::Effect(effect) => (&effect.connection, effect.requirements()),
            Self::Prompt(prompt) => (&prompt.connection, prompt.requirements()),
            Self::Session(session) => {
                (&session.connection, Requirements::everything(session.is_read_only()))
            }
            Self::Export(export) => (&export.connection, Requirements::everything(true)),
            Self::Erase(erase) => (&erase.connection, Requirements::everything(false)),
            Self::Outbox(outbox) => {
                (&outbox.connection, Requirements::database(outbox.is_read_only()))
            }
            Self::Audit(audit) => (&audit.connection, Requirements::database(true)),
            Self::Webhook(webhook) => {
                webhook.require_server()?;
                (&webhook.connection, Requirements::database(true))
            }
            Self::History(history) => {
                history.require_server()?;
                (&history.connection, Requirements::database(true))
            }
        };
        let client = match connection.url() {
            Some(url) => ApiClient::network(&url)?,
            None => {
                if let Self::Audit(_) = self {
                    in_process::require_given_database(settings)?;
                }
                let opening = self.open(settings, requirements);
                progress::waiting("opening streams and database", opening).await?
            }
        };
        let outcome = self.ask(&client).await;
        client.close().await;
        outcome
    }

    /// Opens the backends. `top` also works without the database: it shows topics then.
    async fn open(
        &self,
        settings: &Settings,
        requirements: Requirements,
    ) -> Result<ApiClient, CliError> {
        let opened = ApiClient::in_process(settings, requirements).await;
        let is_without_database = match &opened {
            Err(CliError::Unreachable(problem)) => problem.starts_with("database"),
            Err(CliError::OutdatedSchema { .. }) => true,
            _ => false,
        };
        match self {
            Self::Top(_) if is_without_database => {
                ApiClient::in_process(settings, Requirements::streams(true)).await
            }
            _ => opened,
        }
    }

    async fn ask(&self, client: &ApiClient) -> Result<(), CliError> {
        match self {
            Self::Topic(topic) => topic.run(client).await,
            Self::Produce(produce) => produce.run(client).await,
            Self::Consume(consume) => consume.run(client).await,
            Self::Tail(tail) => tail.run(client).await,
            Self::Message(message) => message.run(client).await,
            Self::Group(group) => group.run(client).await,
            Self::Pending(pending) => pending.run(client).await,
            Self::Dlq(dlq) => dlq.run(client).await,
            Self::Assign(assign) => assign.run(client).await,
            Self::Loop(main_loop) => main_loop.run(client).await,
            Self::Top(top) => top.run(client).await,
            Self::Status(status) => status.run(client).await,
            Self::Overview(overview) => overview.run(client).await,
            Self::Search(search) => search.run(client).await,
            Self::Failure(failure) => failure.run(client).await,
            Self::Process(process) => process.run(client).await,
            Self::Me(me) => me.run(client).await,
            Self::Issue(issue) => issue.run(client).await,
            Self::Ticket(ticket) => ticket.run(client).await,
            Self::Plan(plan) => plan.run(client).await,
            Self::Draft(draft) => draft.run(client).await,
            Self::Effect(effect) => effect.run(client).await,
            Self::Prompt(prompt) => prompt.run(client).await,
            Self::Session(session) => session.run(client).await,
            Self::Export(export) => export.run(client).await,
            Self::Erase(erase) => erase.run(client).await,
            Self::Outbox(outbox) => outbox.run(client).await,
            Self::Audit(audit) => audit.run(client).await,
            Self::Webhook(webhook) => webhook.run(client).await,
            Self::History(history) => history.run(client).await,
            Self::Bench(_) | Self::Doctor(_) | Self::Migrate(_) | Self::Completion(_) => Ok(()),
            Self::Sql(_) | Self::Report(_) | Self::Analytics(_) => Ok(()),
        }
    }
}

/// Prints text unchanged. A closed pipe ends the command without a failure.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    output::exact(text)
}

/// Options to select the server and the output format.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ConnectionArgs {
    /// Connect to this server instead of opening the data directly (or set HEADWATER_URL). The token is read from
    /// HEADWATER_TOKEN.
    #[arg(long, global = true, value_name = "URL", help_heading = help::GLOBAL)]
    url: Option<String>,
    /// Print one JSON value per line.
    #[arg(long, global = true, help_heading = help::GLOBAL)]
    json: bool,
    /// Neither wrap text nor cut tables at the width of the terminal.
    #[arg(long, global = true, help_heading = help::GLOBAL)]
    wide: bool,
}

impl ConnectionArgs {
    fn url(&self) -> Option<String> {
        let known = || std::env::var("HEADWATER_URL").ok().filter(|url| !url.is_empty());
        self.url.clone().or_else(known)
    }

    /// Fails without a server; `reason` says why it is needed.
    fn require_server(&self, reason: &str) -> Result<(), CliError> {
        match self.url() {
            Some(_) => Ok(()),
            None => Err(CliError::usage(format!("{reason}; name one with --url or HEADWATER_URL"))),
        }
    }

    fn style(&self) -> OutputStyle {
        OutputStyle { json: self.json, wide: self.wide }
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
    /// Whether a person is asked. Look up what the question is about first, so that mistakes are found before it.
    fn is_needed(&self) -> bool {
        !self.yes
    }

    fn ask(&self, question: &str) -> Result<(), CliError> {
        if self.yes {
            return Ok(());
        }
        if !std::io::stdin().is_terminal() {
            return Err(CliError::usage(format!("confirmation required; pass --yes: {question}")));
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
