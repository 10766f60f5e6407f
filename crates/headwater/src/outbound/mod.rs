//! The way out: rows of the outbox become comments, notes, requests, messages of tickets and entries of streams.
//!
//! Upstream: the outbox of `headwater-issue`, which repeats what fails and keeps what is dead. Downstream: servers of others,
//! the ticket tables, the stream backend. Promises: a row is delivered at least once and, wherever the other side can tell,
//! once. A reply that was already stale when it was committed is not sent: the run that its newer events get answers all.

mod callback;
mod comment;
mod github;
mod gitlab;
mod http;
mod markdown;
pub mod marker;
mod target;
mod ticket_events_publisher;

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use headwater_issue::{Deliver, DeliverError, EventLogId, OutboxKind, OutboxRow, Store};
use reqwest::Client;
use tracing::info;

use crate::desk::{Reply, ReplyTarget};
use crate::http_client;
pub use crate::outbound::callback::sign;
pub use crate::outbound::target::Destination;
pub use crate::outbound::ticket_events_publisher::Outlet;

/// Takes replies for tickets, and events for streams; the parts of the way out that stay in this process.
#[async_trait]
pub trait Inside: Send + Sync + 'static {
    /// Puts a reply into its ticket.
    async fn reply(
        &self,
        row: &OutboxRow,
        target: ReplyTarget,
        reply: Reply,
    ) -> Result<(), DeliverError>;

    /// Publishes an event.
    async fn event(&self, row: &OutboxRow) -> Result<(), DeliverError>;
}

/// Delivers rows of the outbox.
pub struct Replies {
    store: Arc<dyn Store>,
    client: Client,
    destinations: HashMap<String, Destination>,
    inside: Arc<dyn Inside>,
}

impl std::fmt::Debug for Replies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replies").field("destinations", &self.destinations).finish_non_exhaustive()
    }
}

impl Replies {
    /// Delivers to these, by the names of their integrations.
    pub fn new(
        store: Arc<dyn Store>,
        destinations: HashMap<String, Destination>,
        inside: Arc<dyn Inside>,
    ) -> Result<Self, String> {
        Ok(Self { store, client: http_client::build()?, destinations, inside })
    }

    async fn reply(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        let target = ReplyTarget::parse(&row.target)
            .ok_or_else(|| DeliverError::Dead(format!("there is no target `{}`", row.target)))?;
        let reply: Reply = serde_json::from_str(&row.payload).map_err(|error| {
            DeliverError::Dead(format!("the reply is no {{\"content\": TEXT}}: {error}"))
        })?;
        if self.is_stale(row, &reply).await? {
            info!(issue_id = %row.issue_id, outbox_id = %row.id, "stale reply is not sent");
            return Ok(());
        }
        let client = &self.client;
        match (self.destinations.get(&row.integration), target) {
            (Some(Destination::Tickets), _) => self.inside.reply(row, target, reply).await,
            (Some(Destination::Callback { url, secret }), _) => {
                callback::post(client, url, secret, row, target, &reply).await
            }
            (Some(Destination::Github { base_url, token, secret }), ReplyTarget::Answer) => {
                github::thread(base_url, token, secret, row)?
                    .post(client, row, &reply.content)
                    .await
            }
            (Some(Destination::Gitlab { base_url, token, secret }), ReplyTarget::Answer) => {
                gitlab::thread(base_url, token, secret, row)?
                    .post(client, row, &reply.content)
                    .await
            }
            // The desk stays silent from now on; a person sees the comment that says so.
            (Some(Destination::Github { .. } | Destination::Gitlab { .. }), _) => Ok(()),
            (Some(Destination::Nowhere { problem }), _) => Err(DeliverError::Dead(problem.clone())),
            (None, _) => {
                let problem = format!("there is no [[integration]] `{}` any more", row.integration);
                Err(DeliverError::Dead(problem))
            }
        }
    }

    /// Whether events had come, when the reply was committed, that its run had not seen. The answer follows ids, not
    /// times, and is the same at every try.
    async fn is_stale(&self, row: &OutboxRow, reply: &Reply) -> Result<bool, DeliverError> {
        let Some(up_to) = reply.up_to else { return Ok(false) };
        let newest = self.store.newest_event_log_at_commit(row.id).await;
        // Not the fault of the reply: no attempt is counted.
        let newest = newest.map_err(|error| DeliverError::Away(error.to_string()))?;
        Ok(newest.is_some_and(|EventLogId(newest)| newest > up_to))
    }
}

#[async_trait]
impl Deliver for Replies {
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        match row.kind {
            OutboxKind::Reply => self.reply(row).await,
            OutboxKind::Event => self.inside.event(row).await,
        }
    }
}
