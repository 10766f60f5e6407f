//! `headwater doctor`: checks the servers and suggests changes.
//!
//! Upstream: `cli/mod.rs`. Downstream: the checks of `api/doctor`, on a server (`--url`) or in this process.
//! Guarantees: read-only, except that migrations of an existing database are applied as at every start. Exit codes: 0
//! ok, 4 warnings, 1 errors, 3 a server is unreachable.

use serde_json::Value;
use tokio::time::timeout;

use crate::api::doctor::{self, Finding, Severity};
use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::in_process;
use crate::cli::output;
use crate::config::Settings;
use crate::exit::CliError;

/// Check the servers and suggest changes.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
}

impl DoctorArgs {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), CliError> {
        let findings = match self.connection.url() {
            Some(url) => ask(&ApiClient::network(&url)?).await?,
            None => look(settings).await,
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
            return output::exact(&serde_json::to_string(finding).unwrap_or_default());
        }
        let Finding { severity, subject, found, advice } = finding;
        let severity = format!("{severity:?}").to_lowercase();
        output::line(&format!(
            "{severity:<11}  {}: {}",
            output::plain(subject),
            output::plain(found)
        ))?;
        if advice.is_empty() { Ok(()) } else { output::line(&format!("             -> {advice}")) }
    }
}

/// Findings of a server.
async fn ask(client: &ApiClient) -> Result<Vec<Finding>, CliError> {
    let mut answer = client.get("/doctor", &[]).await?;
    let findings: Value = answer["findings"].take();
    serde_json::from_value(findings)
        .map_err(|error| CliError::new(format!("unexpected response format: {error}")))
}

/// Findings of this process; a backend that cannot be opened is a finding as well.
async fn look(settings: &Settings) -> Vec<Finding> {
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
            let counting = Box::pin(async {
                let counted = headwater_issue::check_consistency(store.as_ref()).await;
                counted.map_err(|error| error.to_string())
            });
            findings.extend(doctor::database(settings, store.as_ref(), counting).await);
            let _ = timeout(doctor::check_timeout(settings), store.close()).await;
        }
        Ok(Err(failure)) => findings.push(unreachable("database", &failure)),
    }
    findings
}

fn unreachable(subject: &str, failure: &CliError) -> Finding {
    let severity = match failure {
        CliError::Unreachable(_) => Severity::Unreachable,
        _ => Severity::Error,
    };
    Finding::new(severity, subject, failure.to_string(), "")
}
