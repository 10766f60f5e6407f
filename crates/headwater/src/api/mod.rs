//! What operators do with topics, groups, messages, dead letters, sessions and the outbox, as routes below `/api/v1`.
//!
//! Upstream: `router` puts them behind access and limits; the command line calls the same routes in its own process
//! (`operator`), so that a verb does the same over the network and without. Downstream: `headwater-queue`.
//! Promises: what destroys needs the role `admin`; listings come in pages; bytes that are no text travel as base64.

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

use crate::config::Http;
use crate::http::ApiError;
use crate::http::body::ReadLimits;
use crate::server::app_state::App;
use crate::server::shutdown::Stopping;

use crate::api::consume::session::Consumers;
pub(crate) use crate::api::consume::{LEASE, ModeName};
pub(crate) use crate::api::dto::Payload;

/// How soon to come back when somebody else changes the same thing.
const BUSY_FOR: Duration = Duration::from_secs(1);

/// What the routes work on.
#[derive(Clone)]
pub(crate) struct Operations {
    queue: Queue,
    producer: Producer,
    http: Http,
    stopping: Stopping,
    consumers: Arc<Consumers>,
    tails: Arc<Semaphore>,
}

impl Operations {
    /// On these streams.
    pub(crate) fn new(
        streams: Arc<dyn Backend>,
        http: Http,
        stopping: Stopping,
    ) -> Result<Self, QueueError> {
        let queue = Queue::new(streams);
        let producer = queue.producer(ProducerConfig::default())?;
        let tails = Arc::new(Semaphore::new(messages::TAILS_MAX));
        Ok(Self { queue, producer, http, stopping, consumers: Arc::default(), tails })
    }

    /// Waits for what runs by itself: consumers leave their groups.
    pub(crate) async fn close(&self) {
        self.consumers.close().await;
    }
}

impl ReadLimits for Operations {
    fn read_limits(&self) -> &Http {
        &self.http
    }
}

/// The routes with their description.
pub(crate) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .merge(topics::routes())
        .merge(messages::routes())
        .merge(consume::routes())
        .merge(groups::routes())
        .merge(dead_letters::routes())
}

/// Those that need more than streams.
pub(crate) fn routes_of_app() -> OpenApiRouter<App> {
    let sessions = sessions::routes().merge(session_import::routes());
    OpenApiRouter::new().merge(outbox::routes()).merge(sessions).merge(doctor::routes())
}

/// Carries a change of several steps to its end, also if its caller goes away meanwhile.
async fn to_its_end<T: Send + 'static>(
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
            QueueError::TopicExists { .. } | QueueError::GroupAtWork { .. } => conflict(message),
            QueueError::Busy { .. } => conflict(message).retry_after(BUSY_FOR),
            QueueError::Backlogged { retry_after, .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "backlogged", message)
                    .retry_after(*retry_after)
            }
            QueueError::DeadlineExceeded { .. } => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "unconfirmed", message)
            }
            QueueError::Backend(StreamError::Full { .. }) => Self::streams_are_full(&problem),
            QueueError::Interrupted(interrupted) => {
                warn!(error = %interrupted, "a change was interrupted");
                let message = interrupted.progress();
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "interrupted", message)
            }
            other => Self::of_streams(other, other.is_transient()),
        }
    }
}

#[cfg(test)]
mod tests {
    use headwater_queue::Interrupted;

    use super::*;

    #[test]
    fn an_interrupted_change_says_how_far_it_came_and_names_no_server() {
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
