//! A fixture with a bus whose backend can be made unavailable.

#[path = "../backends/outage_fixture.rs"]
mod shared;

use std::time::Duration;

use headwater_bus::{
    BusError, EventBusExt, EventId, OutgoingEvent, SessionId, StoreOutcome, StreamedBus,
};
use headwater_testkit::Redis;
use tokio::time::{Instant, sleep};

pub(crate) use self::shared::OutageFixture;
pub(crate) use crate::backends::server::LIMIT;
use crate::fixture::{Fixture, noted};

impl OutageFixture {
    /// The server of the fixture's session.
    pub(crate) fn node(&self) -> &Redis {
        self.server.node_of(&self.fixture.stream())
    }

    /// Sessions on cluster nodes that stay available.
    pub(crate) fn elsewhere(&self) -> impl Iterator<Item = SessionId> {
        let leaves = self.node().port();
        let stays = move |session: &SessionId| self.node_of(session).port() != leaves;
        std::iter::repeat_with(SessionId::random).filter(stays)
    }

    /// Executes a command on the node of this session.
    pub(crate) fn command_at(&self, session: &SessionId, words: &[&str]) {
        self.node_of(session).command(words).unwrap().ok().unwrap();
    }

    fn node_of(&self, session: &SessionId) -> &Redis {
        self.server.node_of(&self.fixture.stream_of(session.as_str()))
    }
}

/// Publishes an event under one id until it is stored.
pub(crate) async fn publish_until_stored(bus: &StreamedBus, session: &SessionId, number: u64) {
    let id = EventId::random();
    until(|| async {
        let event = OutgoingEvent::new(noted(session, number)).unwrap().with_id(id.clone());
        match bus.publish_outgoing(event).await {
            Ok(result) => {
                matches!(result.stored, StoreOutcome::Entry(_) | StoreOutcome::Duplicate(_))
            }
            Err(error) => {
                assert!(error.is_transient(), "{error}");
                false
            }
        }
    })
    .await;
}

/// Waits until the condition is true.
pub(crate) async fn until<F: Future<Output = bool>>(mut is_so: impl FnMut() -> F) {
    let deadline = Instant::now() + LIMIT;
    while !is_so().await {
        assert!(Instant::now() < deadline, "it did not happen within {LIMIT:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Publishes events until the breaker is open.
pub(crate) async fn open_breaker(bus: &StreamedBus, fixture: &Fixture) {
    until(|| async {
        let error = bus.publish(fixture.noted(1000)).await.unwrap_err();
        matches!(error, BusError::BreakerOpen { .. })
    })
    .await;
}
