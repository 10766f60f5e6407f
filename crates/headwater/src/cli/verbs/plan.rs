//! `headwater plan`: replay many dead letters a few at a time; list, show, pause, resume and cancel such plans.

use std::time::Duration;

use clap::Subcommand;
use serde_json::{Value, json};

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::in_process::Requirements;
use crate::cli::output::{self, OutputRows, OutputStyle};
use crate::cli::progress;
use crate::cli::units::{limit, moment, number};
use crate::exit::CliError;
use crate::text::counted;

/// Interval at which `--wait` looks.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Replay many dead letters a few at a time.
#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: PlanCommands,
}

#[derive(Debug, Subcommand)]
enum PlanCommands {
    /// Make a plan: 5 letters first, then 10, 50 and 200 per second; it stops when they fail again.
    Create {
        /// Names of topics whose dead letters are replayed.
        topics: Vec<String>,
        /// Replay those with this cause instead: an id of `GET /api/v1/failures`.
        #[arg(long, value_name = "ID", conflicts_with = "topics")]
        failure: Option<String>,
        /// Only those whose reason contains this text.
        #[arg(long)]
        reason: Option<String>,
        /// Only those with this key.
        #[arg(long)]
        key: Option<String>,
        /// Only those of this partition.
        #[arg(long)]
        partition: Option<u16>,
        /// Only those that failed at this time or later: 2026-11-15T10:00:00Z, or an age such as 1h.
        #[arg(long, value_name = "TIME", value_parser = moment)]
        from: Option<String>,
        /// Only those that failed at this time or earlier: 2026-11-15T10:00:00Z, or an age such as 1h.
        #[arg(long, value_name = "TIME", value_parser = moment)]
        to: Option<String>,
        /// Skip dead letters that were already replayed this often.
        #[arg(long, value_name = "N")]
        max_replays: Option<u32>,
        /// Only print what would happen.
        #[arg(long)]
        dry_run: bool,
        /// Wait until the plan has ended.
        #[arg(long, conflicts_with = "dry_run")]
        wait: bool,
    },
    /// List plans, newest first.
    List {
        /// Only those with this state.
        #[arg(long, value_parser = ["running", "paused", "stopped", "cancelled", "done"])]
        state: Option<String>,
        /// Maximum number of plans.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Show a plan, and how it is doing.
    Show {
        /// Plan id; see `headwater plan list`.
        #[arg(value_parser = number)]
        id: i64,
        /// Wait until the plan has ended.
        #[arg(long)]
        wait: bool,
    },
    /// Pause a plan: nothing more is sent.
    Pause {
        /// Plan id; see `headwater plan list`.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// Resume a plan; one that stopped by itself begins with 5 letters again.
    Resume {
        /// Plan id; see `headwater plan list`.
        #[arg(value_parser = number)]
        id: i64,
    },
    /// Cancel a plan; what is left stays a dead letter.
    Cancel {
        /// Plan id; see `headwater plan list`.
        #[arg(value_parser = number)]
        id: i64,
    },
}

impl PlanArgs {
    pub(in crate::cli) fn requirements(&self) -> Requirements {
        match self.command {
            PlanCommands::Create { .. } => Requirements::everything(false),
            PlanCommands::List { .. } | PlanCommands::Show { .. } => Requirements::database(true),
            _ => Requirements::database(false),
        }
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            PlanCommands::Create { dry_run, wait, .. } => {
                let answer = client.post("/plans", self.request_body()?).await?;
                if *dry_run {
                    return show_dry_run(style, &answer);
                }
                let id = answer["id"].as_i64().unwrap_or_default();
                if *wait {
                    return show_end(client, style, id).await;
                }
                let letters = letters(&answer["total"]);
                let sentence = format!(
                    "made replay plan {id} for {letters}; `headwater plan show {id}` shows its progress"
                );
                output::changed(style, &answer, sentence)
            }
            PlanCommands::List { state, limit } => {
                let query: Vec<_> =
                    state.clone().map(|state| ("state", state)).into_iter().collect();
                let columns = &[
                    ("ID", "/id"),
                    ("STATE", "/state"),
                    ("TOTAL", "/total"),
                    ("SENT", "/sent"),
                    ("SETTLED", "/settled"),
                    ("FAILED", "/failed"),
                    ("LEFT", "/left"),
                    ("CREATED", "/created_at"),
                    ("CAUSE", "/cause"),
                ];
                let rows = OutputRows::new(style, columns);
                client.show_pages(rows, "/plans", &query, "plans", *limit).await
            }
            PlanCommands::Show { id, wait: true } => show_end(client, style, *id).await,
            PlanCommands::Show { id, wait: false } => {
                let plan = client.get(&format!("/plans/{id}"), &[]).await?;
                show(style, &plan)
            }
            PlanCommands::Pause { id } => {
                let answer = client.post(&format!("/plans/{id}/pause"), json!({})).await?;
                let next = format!("`headwater plan resume {id}` continues it");
                output::changed(style, &answer, sentence(&answer, *id, "paused", &next))
            }
            PlanCommands::Resume { id } => {
                let answer = client.post(&format!("/plans/{id}/resume"), json!({})).await?;
                let next = format!("{} left", letters(&answer["left"]));
                output::changed(style, &answer, sentence(&answer, *id, "resumed", &next))
            }
            PlanCommands::Cancel { id } => {
                let answer = client.post(&format!("/plans/{id}/cancel"), json!({})).await?;
                let next = format!("{} not sent", letters(&answer["left"]));
                output::changed(style, &answer, sentence(&answer, *id, "cancelled", &next))
            }
        }
    }

    fn request_body(&self) -> Result<Value, CliError> {
        let PlanCommands::Create {
            topics,
            failure,
            reason,
            key,
            partition,
            from,
            to,
            max_replays,
            dry_run,
            ..
        } = &self.command
        else {
            return Ok(Value::Null);
        };
        if topics.is_empty() && failure.is_none() {
            return Err(CliError::usage("select dead letters: TOPICS, or --failure ID"));
        }
        let topics = (!topics.is_empty()).then_some(topics);
        Ok(json!({
            "topics": topics, "failure": failure, "reason": reason, "key": key, "partition": partition, "from": from,
            "to": to, "max_replays": max_replays, "dry_run": dry_run,
        }))
    }
}

/// The plan, and the sentence that explains it last.
fn show(style: OutputStyle, plan: &Value) -> Result<(), CliError> {
    if style.json {
        return output::json(style, plan);
    }
    let mut fields = plan.clone();
    let why = fields.as_object_mut().and_then(|fields| fields.remove("why")).unwrap_or_default();
    output::object(style, &fields)?;
    output::line(why["sentence"].as_str().unwrap_or_default())
}

/// Waits until a plan has ended, with its progress. Fails if it did not settle everything.
async fn show_end(client: &ApiClient, style: OutputStyle, id: i64) -> Result<(), CliError> {
    let path = format!("/plans/{id}");
    let mut plan = client.get(&path, &[]).await?;
    let count = |plan: &Value, name: &str| plan[name].as_u64().unwrap_or(0);
    let bar = progress::start("settled", Some(count(&plan, "total")));
    while matches!(plan["state"].as_str(), Some("running" | "paused")) {
        bar.set_position(count(&plan, "settled"));
        tokio::time::sleep(LOOK_EVERY).await;
        plan = client.get(&path, &[]).await?;
    }
    bar.finish_and_clear();
    show(style, &plan)?;
    match plan["state"].as_str() {
        Some("done") if plan["failed"] == 0 => Ok(()),
        _ => Err(CliError::new(format!(
            "replay plan {id} did not settle all its letters: {}",
            plan["why"]["sentence"].as_str().unwrap_or_default()
        ))),
    }
}

fn show_dry_run(style: OutputStyle, answer: &Value) -> Result<(), CliError> {
    if style.json {
        return output::json(style, answer);
    }
    let mut left_out = String::new();
    if answer["already_replayed"] != 0 {
        left_out = format!("; {} had been replayed before", answer["already_replayed"]);
    }
    if answer["refused"] != 0 {
        let problem = answer["refusal"].as_str().unwrap_or_default();
        left_out = format!("{left_out}; refused {}: {problem}", answer["refused"]);
    }
    if answer["complete"] == false {
        left_out += "; there are more, which need another plan";
    }
    output::line(&format!("would replay {}{left_out}", letters(&answer["letters"])))?;
    let examples = answer["examples"].as_array().map(Vec::as_slice).unwrap_or_default();
    if examples.is_empty() {
        return Ok(());
    }
    let columns = &[("TOPIC", "/topic"), ("ID", "/id"), ("KEY", "/key"), ("REASON", "/reason")];
    let mut rows = OutputRows::new(style, columns);
    examples.iter().for_each(|example| rows.add(example));
    rows.finish()
}

fn letters(count: &Value) -> String {
    counted(count.as_u64().unwrap_or(0), "dead letter", "dead letters")
}

fn sentence(answer: &Value, id: i64, what: &str, next: &str) -> String {
    match answer["changed"].as_bool() {
        Some(false) => format!("replay plan {id} was {what} before; nothing was changed"),
        _ => format!("{what} replay plan {id}; {next}"),
    }
}
