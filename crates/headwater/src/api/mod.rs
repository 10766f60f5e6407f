//! The HTTP API below `/api/v1`.
//!
//! Upstream: `http/router.rs` adds authentication and limits; `cli/in_process.rs` calls the same routes in its own
//! process, so that a command behaves the same with and without a server. Downstream: `headwater-queue`,
//! `headwater-bus`, the store and `tickets`.
//! Flow: queue routes (`topics.rs`, `topic_trim.rs`, `messages.rs`, `message_filter.rs`, `message_why.rs`, `delayed_messages.rs`, `consume.rs`, `groups.rs`,
//! `group_why.rs`, `partition_owners.rs`, `partition_moves.rs`, `dead_letters.rs`) and `assignment.rs` work on [`Operations`]; the others (`issues.rs`, `event_logs.rs`, `tickets.rs` and `tickets_sse.rs`,
//! `outbox.rs`, `drafts.rs`, `effects.rs`, `prompts.rs`, `sessions.rs` and `session_import.rs`, `users.rs`, `analytics.rs`, `doctor/`, `status.rs`) on the state of
//! the server; those for the console (`overview.rs`, `history.rs`, `failures.rs`, `plans.rs`, `search.rs`, `processes.rs`, `me.rs`) on both.
//! `dto.rs`, `line_diff.rs` and `ndjson.rs` define common output, `names.rs` our names for those of other systems.
//! Guarantees: destructive operations require the role `admin`; lists are paged; payloads that are not UTF-8 are
//! base64.

pub(crate) mod analytics;
mod assignment;
mod consume;
mod dead_letters;
mod delayed_messages;
pub(crate) mod doctor;
mod drafts;
mod dto;
mod effects;
mod event_logs;
mod failures;
mod group_why;
mod groups;
mod history;
pub(crate) mod issues;
mod line_diff;
mod list_counts;
mod me;
mod message_filter;
mod message_why;
mod messages;
pub(crate) mod names;
mod ndjson;
mod outbox;
mod overview;
mod partition_moves;
mod partition_owners;
mod partitioners;
mod plans;
mod processes;
mod prompts;
mod search;
mod session_events;
mod session_import;
mod sessions;
mod status;
pub(crate) mod tickets;
pub(crate) mod tickets_sse;
mod timeline;
mod topic_trim;
mod topics;
mod users;
pub(crate) mod webhooks;
mod why;

use axum::Extension;
use axum::http::StatusCode;
use headwater_issue::STREAM;
use headwater_queue::{Puller, Queue, QueueError};
use headwater_stream::{Backend, StreamError};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tracing::warn;
use utoipa_axum::router::OpenApiRouter;

use crate::config::HttpSettings;
use crate::http::ApiError;
use crate::http::body::ReadLimits;
use crate::server::app_state::App;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::telemetry::history::topics::TopicHistory;
use crate::tickets::desk_events::DESK_EVENTS;

use crate::api::consume::OpenPulls;
pub(crate) use crate::api::consume::{LEASE_DEFAULT, ReceivedMessage};
pub(crate) use crate::api::dto::PayloadDto;

/// `Retry-After` when another change holds the lock.
const BUSY_RETRY_AFTER: Duration = Duration::from_secs(1);

/// State of the queue routes.
#[derive(Clone)]
pub(crate) struct Operations {
    queue: Queue,
    producers: partitioners::Producers,
    http: HttpSettings,
    shutdown: ShutdownSignal,
    puller: Puller,
    pulls: Arc<OpenPulls>,
    tails: Arc<Semaphore>,
    known_topics: messages::KnownTopics,
    letter_clusters: Arc<failures::LetterClusters>,
    topic_history: Arc<TopicHistory>,
}

impl Operations {
    /// Creates the state on this stream backend.
    pub(crate) fn new(
        streams: Arc<dyn Backend>,
        http: HttpSettings,
        shutdown: ShutdownSignal,
    ) -> Result<Self, QueueError> {
        let queue = Queue::new(streams);
        let producers = partitioners::Producers::new(&queue)?;
        let puller = queue.puller();
        let tails = Arc::new(Semaphore::new(messages::TAILS_MAX));
        let (pulls, known_topics, letter_clusters, topic_history) = Default::default();
        Ok(Self {
            queue,
            producers,
            http,
            shutdown,
            puller,
            pulls,
            tails,
            known_topics,
            letter_clusters,
            topic_history,
        })
    }

    /// The queue that the routes work on.
    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// What topics did in the last hour; empty unless this process is a server, which samples it.
    pub(crate) fn topic_history(&self) -> &Arc<TopicHistory> {
        &self.topic_history
    }

    /// Ends all pulls and leaves their groups.
    pub(crate) async fn close(&self) {
        self.puller.close().await;
    }
}

impl ReadLimits for Operations {
    fn read_limits(&self) -> &HttpSettings {
        &self.http
    }
}

/// Queue routes with their descriptions.
pub(crate) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .merge(topics::routes())
        .merge(topic_trim::routes())
        .merge(messages::routes())
        .merge(message_why::routes())
        .merge(delayed_messages::routes())
        .merge(consume::routes())
        .merge(groups::routes())
        .merge(group_why::routes())
        .merge(partition_owners::routes())
        .merge(partition_moves::routes())
        .merge(dead_letters::routes())
        .merge(assignment::routes())
}

/// Routes that also need the database.
pub(crate) fn app_routes() -> OpenApiRouter<App> {
    let sessions =
        sessions::routes().merge(session_import::routes()).merge(session_events::routes());
    OpenApiRouter::new()
        .merge(outbox::routes())
        .merge(drafts::routes())
        .merge(effects::routes())
        .merge(prompts::routes())
        .merge(event_logs::routes())
        .merge(timeline::routes())
        .merge(sessions)
        .merge(doctor::routes())
        .merge(users::routes())
        .merge(status::routes())
}

/// Routes that summarize and search, for the console. They need the database and the queue.
pub(crate) fn console_routes(operations: Operations) -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(me::routes())
        .merge(overview::routes())
        .merge(history::routes())
        .merge(failures::routes())
        .merge(plans::routes())
        .merge(search::routes())
        .merge(processes::routes())
        .merge(webhooks::routes())
        .layer(Extension(operations))
}

/// Prefixes of stream names that belong to the bus or to topics with partitions.
const RESERVED_PREFIXES: [&str; 3] = ["stream:topic:", "streaming:mq:", "wink:"];

/// Whether a stream is internal to the server: nudges, events of the desk, the bus, partitions of topics.
pub(crate) fn is_internal_stream(topic: &str) -> bool {
    [STREAM, DESK_EVENTS].contains(&topic)
        || RESERVED_PREFIXES.iter().any(|prefix| topic.starts_with(prefix))
}

/// Completes a change of several steps even if the client disconnects.
async fn run_to_completion<T: Send + 'static>(
    change: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::spawn(change).await.unwrap_or_else(|_| Err(ApiError::internal()))
}

impl From<QueueError> for ApiError {
    fn from(problem: QueueError) -> Self {
        let message = problem.to_string();
        let conflict = |message| Self::new(StatusCode::CONFLICT, "conflict", message);
        match &problem {
            QueueError::Invalid { .. } | QueueError::Backend(StreamError::Invalid { .. }) => {
                Self::invalid(message)
            }
            QueueError::NoTopic { .. }
            | QueueError::NoGroup { .. }
            | QueueError::NoDeadLetter { .. } => Self::not_found(message),
            QueueError::TopicExists { .. } | QueueError::GroupActive { .. } => conflict(message),
            QueueError::Busy { .. } => conflict(message).retry_after(BUSY_RETRY_AFTER),
            QueueError::BudgetExceeded { retry_after, .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "backlogged", message)
                    .retry_after(*retry_after)
            }
            QueueError::TooManyLeased { .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "too_many_leases", message)
                    .retry_after(BUSY_RETRY_AFTER)
            }
            QueueError::Stopped { .. } => Self::unavailable("the server is stopping; try again"),
            QueueError::DeadlineExceeded { .. } => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "unconfirmed", message)
            }
            QueueError::Backend(StreamError::WrongType { .. }) => conflict(message),
            QueueError::Backend(StreamError::Full { .. }) => Self::streams_full(&problem),
            QueueError::Backend(StreamError::Denied { .. }) => Self::streams_denied(&problem),
            QueueError::Interrupted(interrupted) => {
                warn!(error = %interrupted, "change interrupted");
                let message = interrupted.progress();
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "interrupted", message)
            }
            other => Self::from_stream_error(other, other.is_transient()),
        }
    }
}

#[cfg(test)]
mod tests {
    use headwater_queue::Interrupted;

    use super::*;

    #[test]
    fn an_interrupted_change_reports_its_progress_and_names_no_server() {
        let source = StreamError::Unavailable { problem: "10.0.0.7:6379".to_owned(), source: None };
        let error = ApiError::from(QueueError::Interrupted(Box::new(Interrupted {
            what: "the deletion of topic `orders`".to_owned(),
            done: vec![0, 1],
            uncertain: vec![2],
            left: vec![3, 4],
            next: "delete the topic again to finish it".to_owned(),
            source: source.into(),
        })));
        assert_eq!(
            (error.status(), error.code()),
            (StatusCode::SERVICE_UNAVAILABLE, "interrupted")
        );
        assert_eq!(
            error.message(),
            "the deletion of topic `orders` was interrupted: done on partitions 0-1, perhaps done on partition 2, \
             not done on partitions 3-4; delete the topic again to finish it"
        );
    }
}
