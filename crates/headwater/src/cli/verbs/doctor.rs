//! `headwater doctor`: looks at the servers and says in words what to change.
//!
//! Upstream: `operator`. Downstream: the checks of `admin`: those of a server (`--url`), or the same in this process.
//! Promises: it changes nothing but the tables of a database that is there, which it brings up to date as every start does.
//! Exit codes: 0 all is well, 4 there are warnings, 1 something must be changed, 3 a server cannot be reached.

use serde_json::Value;
use tokio::time::timeout;

use crate::api::doctor::{self, Finding, Severity};
use crate::cli::Reach;
use crate::cli::api_client::Client;
use crate::cli::in_process;
use crate::cli::output;
use crate::config::Settings;
use crate::exit::Failure;

/// Looks for trouble.
#[derive(Debug, clap::Args)]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub(crate) reach: Reach,
}

impl Doctor {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), Failure> {
        let findings = match self.reach.url() {
            Some(url) => ask(&Client::network(&url)?).await?,
            None => look(settings).await,
        };
        for finding in &findings {
            self.print(finding)?;
        }
        let worst = findings.iter().map(|finding| finding.severity).max();
        match worst.unwrap_or(Severity::Ok) {
            Severity::Ok => Ok(()),
            Severity::Warning => Err(Failure::Warnings),
            Severity::Error => Err(Failure::new("something must be changed, see above")),
            Severity::Unreachable => {
                Err(Failure::Unreachable("a server cannot be reached, see above".to_owned()))
            }
        }
    }

    fn print(&self, finding: &Finding) -> Result<(), Failure> {
        if self.reach.json {
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

/// What a server finds.
async fn ask(client: &Client) -> Result<Vec<Finding>, Failure> {
    let mut answer = client.get("/doctor", &[]).await?;
    let findings: Value = answer["findings"].take();
    serde_json::from_value(findings)
        .map_err(|error| Failure::new(format!("the answer is not the JSON it should be: {error}")))
}

/// What this process finds; what cannot be opened is a finding, too.
async fn look(settings: &Settings) -> Vec<Finding> {
    let mut findings = Vec::new();
    let nothing = |subject: &str, path: &str| {
        let found = format!("there is nothing at {path} yet");
        Finding::new(Severity::Warning, subject, found, "`headwater serve` makes it")
    };
    match in_process::streams_to_look_at(settings).await {
        Err(missing) => findings.push(nothing("streams", &missing)),
        Ok(Ok(streams)) => {
            findings.extend(doctor::streams(settings, &streams).await);
            // What goes on behind a look that took too long ends with the process.
            let _ = timeout(doctor::look_max(settings), streams.close()).await;
        }
        Ok(Err(failure)) => findings.push(unreachable("streams", &failure)),
    }
    match in_process::store_to_look_at(settings).await {
        Err(missing) => findings.push(nothing("database", &missing)),
        Ok(Ok(store)) => {
            let counting = Box::pin(async {
                let counted = headwater_issue::audit(store.as_ref()).await;
                counted.map_err(|error| error.to_string())
            });
            findings.extend(doctor::database(settings, store.as_ref(), counting).await);
            let _ = timeout(doctor::look_max(settings), store.close()).await;
        }
        Ok(Err(failure)) => findings.push(unreachable("database", &failure)),
    }
    findings
}

fn unreachable(subject: &str, failure: &Failure) -> Finding {
    let severity = match failure {
        Failure::Unreachable(_) => Severity::Unreachable,
        _ => Severity::Error,
    };
    Finding::new(severity, subject, failure.to_string(), "")
}
