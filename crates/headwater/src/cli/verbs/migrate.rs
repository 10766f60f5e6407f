//! `headwater migrate`: creates the tables in the database, brings them up to date, or adopts those of another program.
//!
//! Upstream: `cli/mod.rs`. Downstream: `server/startup.rs`. Guarantees: `--dry-run`
//! changes nothing. `serve` and `worker` do the same when they start, except for adoption; no other command changes the schema.

use headwater_issue::postgres::{
    AdoptedIntegration, AdoptionMode, AdoptionReport, OLD_SCHEMA, adopt,
};
use headwater_issue::{IssueError, SchemaPolicy};
use secrecy::ExposeSecret;

use crate::cli::{in_process, output, progress};
use crate::config::{ProviderKind, Settings};
use crate::exit::CliError;
use crate::text::{counted, with_causes};

/// Create the tables in the database, or bring them up to date.
#[derive(Debug, clap::Args)]
pub(crate) struct MigrateArgs {
    /// Only say whether anything is missing; exit with 1 if so. With --adopt: only say what would be adopted.
    #[arg(long)]
    dry_run: bool,
    /// Take over tables `issues` and `event_logs` of another program (PostgreSQL). Stop that program first. Its tables are kept
    /// in the schema `before_headwater`.
    #[arg(long)]
    adopt: bool,
    /// With --adopt: the [[integration]] and the external project of the issues with this `integration_id`. Repeat it for each.
    #[arg(long, value_name = "ID=NAME/PROJECT", requires = "adopt")]
    integration: Vec<String>,
}

impl MigrateArgs {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), CliError> {
        if self.adopt {
            return self.adopt(settings).await;
        }
        let shown = settings.database_shown();
        let is_missing = in_process::missing_database(settings).is_some();
        if self.dry_run && is_missing {
            return Err(CliError::NotFound(format!("database `{shown}` does not exist yet")));
        }
        if !is_missing {
            match apply(settings, SchemaPolicy::Require).await {
                Ok(()) => return output::line(&format!("database `{shown}` is up to date")),
                Err(CliError::OutdatedSchema { .. }) if !self.dry_run => {}
                Err(error) => return Err(error),
            }
        }
        let migrating = apply(settings, SchemaPolicy::Migrate);
        progress::waiting(format!("migrating database `{shown}`"), migrating).await?;
        output::line(&format!("database `{shown}` was migrated and is up to date"))
    }

    async fn adopt(&self, settings: &Settings) -> Result<(), CliError> {
        let shown = settings.database_shown();
        let url = settings.database_url.expose_secret();
        if url.starts_with("sqlite:") {
            return Err(CliError::usage(
                "`--adopt` takes over tables of PostgreSQL; set `database.url` to their database",
            ));
        }
        let integrations = self.integration.iter().map(|text| parse(text, settings));
        let integrations = integrations.collect::<Result<Vec<_>, _>>()?;
        let mode = if self.dry_run { AdoptionMode::DryRun } else { AdoptionMode::Commit };
        let adopting = adopt(url, &integrations, mode);
        let report = progress::waiting(format!("adopting database `{shown}`"), adopting).await;
        let report = report.map_err(|error| match &error {
            IssueError::Schema { problem } => CliError::new(format!(
                "database `{shown}` cannot be adopted, and nothing was changed: {problem}"
            )),
            // The reply to the commit may have been lost; the command says so if it is repeated.
            IssueError::Unavailable { .. } => CliError::Unreachable(format!(
                "adopting database `{shown}` failed: {}; run the command again",
                with_causes(&error)
            )),
            _ => CliError::new(format!(
                "database `{shown}` cannot be adopted, and nothing was changed: {error}"
            )),
        })?;
        output::line(&sentence(&report, mode))?;
        if mode == AdoptionMode::Commit {
            // The tables of tickets.
            apply(settings, SchemaPolicy::Migrate).await?;
            output::line(&format!("database `{shown}` was migrated and is up to date"))?;
        }
        Ok(())
    }
}

/// `ID=NAME/PROJECT`.
fn parse(text: &str, settings: &Settings) -> Result<AdoptedIntegration, CliError> {
    let usage = |problem: &str| {
        CliError::usage(format!("--integration `{text}` {problem}; write ID=NAME/PROJECT"))
    };
    let (old_id, rest) = text.split_once('=').ok_or_else(|| usage("has no `=`"))?;
    let (name, project) = rest.split_once('/').ok_or_else(|| usage("has no `/`"))?;
    let old_id = old_id.parse().map_err(|_| usage("does not begin with a number"))?;
    let found = settings.integrations.iter().find(|one| one.id == name);
    let found = found.filter(|one| one.provider != ProviderKind::Desk);
    let found = found.ok_or_else(|| usage("names no [[integration]] of the settings"))?;
    let provider = found.provider.as_str().to_owned();
    Ok(AdoptedIntegration { old_id, name: name.to_owned(), provider, project: project.to_owned() })
}

fn sentence(report: &AdoptionReport, mode: AdoptionMode) -> String {
    let AdoptionReport { moved, issues, queued, interrupted, event_logs, unprocessed } = report;
    let count = |count: i64, one: &str, several: &str| {
        counted(u64::try_from(count).unwrap_or(0), one, several)
    };
    let (did, moved) = match mode {
        AdoptionMode::Commit => ("adopted", format!("moved `{}`", moved.join("`, `"))),
        AdoptionMode::DryRun => ("would adopt", format!("move `{}`", moved.join("`, `"))),
    };
    format!(
        "{did} {} ({queued} queued, {interrupted} interrupted) with {} ({unprocessed} unprocessed), and {moved} into schema `{OLD_SCHEMA}`",
        count(*issues, "issue", "issues"),
        count(*event_logs, "event", "events")
    )
}

async fn apply(settings: &Settings, schema: SchemaPolicy) -> Result<(), CliError> {
    in_process::store_with(settings, schema).await?.close().await;
    Ok(())
}
