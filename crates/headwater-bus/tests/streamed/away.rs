//! A backend that can be taken away from a bus that works with it.

use std::time::Duration;

use headwater_bus::{BusError, EventBusExt, EventId, Outgoing, SessionId, Stored, StreamedBus};
use headwater_testkit::Redis;
use tokio::time::{Instant, sleep};

pub(crate) use crate::backends::server::LIMIT;
use crate::backends::server::Server;
use crate::place::{Place, noted};

pub(crate) struct Away {
    server: Server,
    pub(crate) place: Place,
}

impl Away {
    pub(crate) async fn embedded() -> Self {
        Self::new(Server::embedded().await)
    }

    pub(crate) fn redis() -> Self {
        Self::new(Server::redis())
    }

    pub(crate) fn cluster() -> Self {
        Self::new(Server::cluster())
    }

    fn new(server: Server) -> Self {
        Self { place: Place::on(server.target()), server }
    }

    /// Takes the backend away, as far as the place's session is concerned.
    pub(crate) async fn begin(&self) {
        self.server.leave(&self.place.stream()).await;
    }

    /// Brings it back, with all it had.
    pub(crate) async fn end(&self) {
        self.server.come_back().await;
    }

    /// The server that has the place's session.
    pub(crate) fn node(&self) -> &Redis {
        self.server.node_of(&self.place.stream())
    }

    /// Sessions on nodes of a cluster that stay.
    pub(crate) fn elsewhere(&self) -> impl Iterator<Item = SessionId> {
        let leaves = self.node().port();
        let stays = move |session: &SessionId| self.node_of(session).port() != leaves;
        std::iter::repeat_with(SessionId::random).filter(stays)
    }

    /// Carries out a command at the node that has this session.
    pub(crate) fn command_at(&self, session: &SessionId, words: &[&str]) {
        self.node_of(session).command(words).unwrap().ok().unwrap();
    }

    /// Removes everything from every server.
    pub(crate) fn flush(&self) {
        for node in self.server.primaries() {
            node.command(&["FLUSHALL"]).unwrap().ok().unwrap();
        }
    }

    fn node_of(&self, session: &SessionId) -> &Redis {
        self.server.node_of(&self.place.stream_of(session.as_str()))
    }
}

/// Publishes an event under one id until it is stored.
pub(crate) async fn publish_until_stored(bus: &StreamedBus, session: &SessionId, number: u64) {
    let id = EventId::random();
    until(|| async {
        let event = Outgoing::new(noted(session, number)).unwrap().with_id(id.clone());
        match bus.publish_outgoing(event).await {
            Ok(result) => matches!(result.stored, Stored::Entry(_) | Stored::Duplicate(_)),
            Err(error) => {
                assert!(error.is_transient(), "{error}");
                false
            }
        }
    })
    .await;
}

/// Waits until something is so.
pub(crate) async fn until<F: Future<Output = bool>>(mut is_so: impl FnMut() -> F) {
    let deadline = Instant::now() + LIMIT;
    while !is_so().await {
        assert!(Instant::now() < deadline, "it did not happen within {LIMIT:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Publishes events until the breaker is open.
pub(crate) async fn open_breaker(bus: &StreamedBus, place: &Place) {
    until(|| async {
        let error = bus.publish(place.noted(1000)).await.unwrap_err();
        matches!(error, BusError::BreakerOpen { .. })
    })
    .await;
}
