//! `headwater doctor`: checks the servers and suggests changes.
//!
//! Upstream: `cli/mod.rs`. Downstream: the checks of `api/doctor`, on a server (`--url`) or in this process.
//! Guarantees: read-only. Exit codes: 0 ok, 4 warnings, 1 errors, 3 a server is unreachable.

use serde_json::Value;
use tokio::time::timeout;

use crate::api::doctor::{self, Finding, Severity};
use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::in_process;
use crate::cli::output;
use crate::cli::progress;
use crate::cli::verbs::audit;
use crate::config::Settings;
use crate::exit::CliError;

/// Check the servers and suggest changes.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// Also check that every recorded event is accounted for. Reads all event logs, which may take minutes.
    #[arg(long)]
    consistency: bool,
}

impl DoctorArgs {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), CliError> {
        let findings = match self.connection.url() {
            Some(url) => {
                let client = ApiClient::network(&url)?;
                progress::waiting("checking the servers", ask(&client, self.consistency)).await?
            }
            None => {
                progress::waiting("checking the servers", look(settings, self.consistency)).await
            }
        };
        for finding in &findings {
            self.print(finding)?;
        }
        let worst = findings.iter().map(|finding| finding.severity).max();
        match worst.unwrap_or(Severity::Ok) {
            Severity::Ok => Ok(()),
            Severity::Warning => Err(CliError::Warnings),
            Severity::Error => Err(CliError::new("errors found; see above")),
            Severity::Unreachable => {
                Err(CliError::Unreachable("a server is unreachable; see above".to_owned()))
            }
        }
    }

    fn print(&self, finding: &Finding) -> Result<(), CliError> {
        if self.connection.json {
            return output::object(self.connection.style(), &serde_json::json!(finding));
        }
        let Finding { severity, subject, found, advice } = finding;
        let severity = format!("{severity:?}").to_lowercase();
        let shown = output::state_color(&severity).apply_to(format!("{severity:<11}"));
        let style = self.connection.style();
        let found = format!("{}: {}", output::plain(subject), output::plain(found));
        output::print_wrapped(style, &format!("{shown}  "), &found)?;
        match advice.is_empty() {
            true => Ok(()),
            false => output::print_wrapped(style, "             -> ", advice),
        }
    }
}

/// Findings of a server.
async fn ask(client: &ApiClient, check_consistency: bool) -> Result<Vec<Finding>, CliError> {
    let mut answer = client.get("/doctor", &[]).await?;
    let findings: Value = answer["findings"].take();
    let mut findings: Vec<Finding> = serde_json::from_value(findings)
        .map_err(|error| CliError::new(format!("unexpected response format: {error}")))?;
    if check_consistency {
        let (checked, failure) = audit::check_books(client, None).await;
        let checked = failure.map_or(Ok(checked["balances"] == true), |it| Err(it.to_string()));
        findings.push(doctor::consistency(checked));
    }
    Ok(findings)
}

/// Findings of this process; a backend that cannot be opened is a finding as well.
async fn look(settings: &Settings, check_consistency: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let nothing = |subject: &str, path: &str| {
        let found = format!("no data at `{path}` yet");
        Finding::new(Severity::Warning, subject, found, "`headwater serve` creates it")
    };
    match in_process::streams_read_only(settings).await {
        Err(missing) => findings.push(nothing("streams", &missing)),
        Ok(Ok(streams)) => {
            findings.extend(doctor::streams(settings, &streams).await);
            // A check that timed out may still be running; it ends with the process.
            let _ = timeout(doctor::check_timeout(settings), streams.close()).await;
        }
        Ok(Err(failure)) => findings.push(unreachable("streams", &failure)),
    }
    match in_process::store_read_only(settings).await {
        Err(missing) => findings.push(nothing("database", &missing)),
        Ok(Ok(store)) => {
            findings.extend(doctor::database(settings, store.as_ref()).await);
            if check_consistency {
                let checked = headwater_issue::check_consistency(store.as_ref()).await;
                let checked = checked.map(|report| report.is_consistent());
                findings.push(doctor::consistency(checked.map_err(|error| error.to_string())));
            }
            let _ = timeout(doctor::check_timeout(settings), store.close()).await;
        }
        Ok(Err(failure)) => findings.push(unreachable("database", &failure)),
    }
    findings.extend(doctor::models(settings).await);
    findings
}

/// The finding of a backend that cannot be opened.
fn unreachable(subject: &str, failure: &CliError) -> Finding {
    let severity = match failure {
        CliError::Unreachable(_) => Severity::Unreachable,
        _ => Severity::Error,
    };
    Finding::new(severity, subject, failure.to_string(), "")
}
