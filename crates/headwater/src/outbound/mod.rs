//! Delivers outbox rows: as comments, notes, HTTP requests, ticket messages and stream entries. `notifications` forwards ticket
//! events, which it reads from the stream.
//!
//! Upstream: the outbox of `headwater-issue`, which retries failed rows and keeps dead ones. Downstream: external
//! servers, the ticket tables, the stream backend. Guarantees: a row is delivered at least once and, wherever the
//! receiver can detect duplicates, exactly once. A reply that was stale when it was committed is discarded (see
//! `staleness`); a hand-over never is. Drafts and notes are stored, and never sent.

mod callback;
mod comment;
mod github;
pub mod github_app;
mod gitlab;
pub(crate) mod http;
mod markdown;
pub mod marker;
pub(crate) mod notification_sinks;
pub mod notifications;
mod staleness;
mod target;
mod ticket_events_publisher;

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use headwater_issue::{Deliver, DeliverError, OutboxKind, OutboxRow, Store};
use reqwest::Client;
use secrecy::{ExposeSecret, SecretString};
use tracing::info;

use crate::desk::provider::ProviderReply;
use crate::desk::{DeskReply, ReplyTarget};
use crate::http_client;
pub use crate::outbound::callback::sign;
pub use crate::outbound::target::Destination;
pub use crate::outbound::ticket_events_publisher::TicketEventsPublisher;

/// Deliveries that stay in this process: replies for tickets, and events for streams.
#[async_trait]
pub trait LocalDelivery: Send + Sync + 'static {
    /// Adds a reply to its ticket, or stores a draft or note of any integration.
    async fn deliver_reply(
        &self,
        row: &OutboxRow,
        target: ReplyTarget,
        reply: DeskReply,
    ) -> Result<(), DeliverError>;

    /// Publishes the event of a row.
    async fn publish_event(&self, row: &OutboxRow) -> Result<(), DeliverError>;
}

/// Delivers outbox rows.
pub struct OutboxDeliverer {
    store: Arc<dyn Store>,
    client: Client,
    destinations: HashMap<String, Destination>,
    local: Arc<dyn LocalDelivery>,
}

impl std::fmt::Debug for OutboxDeliverer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OutboxDeliverer")
            .field("destinations", &self.destinations)
            .finish_non_exhaustive()
    }
}

impl OutboxDeliverer {
    /// Creates a deliverer. `destinations` are keyed by integration id.
    pub fn new(
        store: Arc<dyn Store>,
        destinations: HashMap<String, Destination>,
        local: Arc<dyn LocalDelivery>,
    ) -> Result<Self, String> {
        Ok(Self { store, client: http_client::build()?, destinations, local })
    }

    async fn deliver_reply(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        let target = ReplyTarget::parse(&row.target)
            .ok_or_else(|| DeliverError::Dead(format!("unknown reply target `{}`", row.target)))?;
        let reply: DeskReply = serde_json::from_str(&row.payload).map_err(|error| {
            DeliverError::Dead(format!(
                "the payload is not a reply ({{\"content\": TEXT}}): {error}"
            ))
        })?;
        let may_be_stale = target != ReplyTarget::HandOver;
        if may_be_stale && staleness::is_stale(&*self.store, row, &reply).await? {
            info!(issue_id = %row.issue_id, outbox_id = %row.id, "stale reply discarded");
            return Ok(());
        }
        // Whatever the destination is: only an approval writes a row that is sent.
        if matches!(target, ReplyTarget::Draft | ReplyTarget::Note) {
            return self.local.deliver_reply(row, target, reply).await;
        }
        let client = &self.client;
        match (self.destinations.get(&row.integration), target) {
            (Some(Destination::Tickets), _) => self.local.deliver_reply(row, target, reply).await,
            (Some(Destination::Callback { url, secret }), _) => {
                callback::post(client, url, secret, row, target, &reply).await
            }
            (Some(Destination::Provider { provider, base_url, token, secret }), _) => {
                let reply = ProviderReply {
                    target,
                    integration: &row.integration,
                    base_url: base_url.as_deref(),
                    token: token.as_ref().map(ExposeSecret::expose_secret),
                    secret: secret.expose_secret(),
                    project: &row.external_project_id,
                    issue: &row.external_issue_id,
                    content: &reply.content,
                    idempotency_key: &row.idempotency_key,
                    attempt: row.deliveries,
                    client,
                };
                provider.deliver(&reply).await
            }
            (Some(Destination::Github { base_url, token, secret }), ReplyTarget::Answer) => {
                github::comments(base_url, token, secret, row)?
                    .post(client, row, &reply.content)
                    .await
            }
            (Some(Destination::Gitlab { base_url, token, secret }), ReplyTarget::Answer) => {
                gitlab::comments(base_url, token, secret, row)?
                    .post(client, row, &reply.content)
                    .await
            }
            (Some(Destination::GithubApp { base_url, app, secret }), ReplyTarget::Answer) => {
                let installation = app.installation(&*self.store, row).await?;
                let token = app.token(client, base_url, installation, None).await?;
                let post = async |token: &SecretString| {
                    github::comments(base_url, token, secret, row)?
                        .post(client, row, &reply.content)
                        .await
                };
                match post(&token).await {
                    // Revoked before its time, for example with a new set of permissions.
                    Err(DeliverError::Held(_)) => {
                        post(&app.token(client, base_url, installation, Some(&token)).await?).await
                    }
                    posted => posted,
                }
            }
            // Nothing to send: the answer already says so, and the desk does not answer any more.
            (
                Some(
                    Destination::Github { .. }
                    | Destination::GithubApp { .. }
                    | Destination::Gitlab { .. },
                ),
                _,
            ) => Ok(()),
            (Some(Destination::Unconfigured { problem }), _) => {
                Err(DeliverError::Dead(problem.clone()))
            }
            (None, _) => {
                let problem =
                    format!("[[integration]] `{}` is no longer configured", row.integration);
                Err(DeliverError::Dead(problem))
            }
        }
    }
}

#[async_trait]
impl Deliver for OutboxDeliverer {
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        match row.kind {
            OutboxKind::Reply => self.deliver_reply(row).await,
            OutboxKind::Event => self.local.publish_event(row).await,
        }
    }
}
