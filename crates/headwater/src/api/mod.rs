//! The HTTP API below `/api/v1`.
//!
//! Upstream: `http/router.rs` adds authentication and limits; `cli/in_process.rs` calls the same routes in its own
//! process, so that a command behaves the same with and without a server. Downstream: `headwater-queue`,
//! `headwater-bus`, the store and `tickets`.
//! Flow: queue routes (`topics.rs`, `messages.rs`, `consume/`, `groups.rs`, `dead_letters.rs`) work on
//! [`Operations`]; the others (`issues.rs`, `tickets.rs` and `tickets_sse.rs`, `outbox.rs`, `sessions.rs` and
//! `session_import.rs`, `analytics.rs`, `doctor/`, `status_page.rs`) on the state of the server. `dto.rs` and
//! `ndjson.rs` define common output.
//! Guarantees: destructive operations require the role `admin`; lists are paged; payloads that are not UTF-8 are
//! base64.

pub(crate) mod analytics;
mod consume;
mod dead_letters;
pub(crate) mod doctor;
mod dto;
mod groups;
pub(crate) mod issues;
mod messages;
mod ndjson;
mod outbox;
mod session_import;
mod sessions;
pub(crate) mod status_page;
pub(crate) mod tickets;
pub(crate) mod tickets_sse;
mod topics;

use axum::http::StatusCode;
use headwater_queue::{Producer, ProducerConfig, Queue, QueueError};
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

use crate::api::consume::session::ConsumerSessions;
pub(crate) use crate::api::consume::{ConsumeMode, LEASE};
pub(crate) use crate::api::dto::PayloadDto;

/// `Retry-After` when another change holds the lock.
const BUSY_RETRY_AFTER: Duration = Duration::from_secs(1);

/// State of the queue routes.
#[derive(Clone)]
pub(crate) struct Operations {
    queue: Queue,
    producer: Producer,
    http: HttpSettings,
    shutdown: ShutdownSignal,
    consumers: Arc<ConsumerSessions>,
    tails: Arc<Semaphore>,
}

impl Operations {
    /// Creates the state on this stream backend.
    pub(crate) fn new(
        streams: Arc<dyn Backend>,
        http: HttpSettings,
        shutdown: ShutdownSignal,
    ) -> Result<Self, QueueError> {
        let queue = Queue::new(streams);
        let producer = queue.producer(ProducerConfig::default())?;
        let tails = Arc::new(Semaphore::new(messages::TAILS_MAX));
        Ok(Self { queue, producer, http, shutdown, consumers: Arc::default(), tails })
    }

    /// Waits until all HTTP consumers have left their groups.
    pub(crate) async fn close(&self) {
        self.consumers.close().await;
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
        .merge(messages::routes())
        .merge(consume::routes())
        .merge(groups::routes())
        .merge(dead_letters::routes())
}

/// Routes that also need the database.
pub(crate) fn app_routes() -> OpenApiRouter<App> {
    let sessions = sessions::routes().merge(session_import::routes());
    OpenApiRouter::new().merge(outbox::routes()).merge(sessions).merge(doctor::routes())
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
            QueueError::DeadlineExceeded { .. } => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "unconfirmed", message)
            }
            QueueError::Backend(StreamError::Full { .. }) => Self::streams_full(&problem),
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
