//! A handler and a way out for as long as the desk is not there: it answers every run with how many events it had.
//!
//! Upstream: `run`. Not here: anything that a user would want; `desk` and `replies` take its place.

use std::sync::Arc;

use async_trait::async_trait;
use headwater_issue::{
    Deliver, DeliverError, HandlerError, IssueHandler, OutboxRow, Resolution, Run,
};
use tracing::info;

/// A handler that is chosen when the process starts.
pub(crate) struct Chosen(pub(crate) Arc<dyn IssueHandler>);

#[async_trait]
impl IssueHandler for Chosen {
    async fn handle(&self, run: Run) -> Result<Resolution, HandlerError> {
        self.0.handle(run).await
    }
}

/// Answers with how many events it had.
#[derive(Debug)]
pub(crate) struct Counting;

#[async_trait]
impl IssueHandler for Counting {
    async fn handle(&self, run: Run) -> Result<Resolution, HandlerError> {
        let content = format!("{} events were read.", run.events().len());
        Ok(Resolution::new().reply(serde_json::json!({ "content": content }).to_string()))
    }
}

/// Logs what would be sent.
#[derive(Debug)]
pub(crate) struct Logging;

#[async_trait]
impl Deliver for Logging {
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        info!(issue_id = %row.issue_id, kind = row.kind.as_str(), "reply");
        Ok(())
    }
}
