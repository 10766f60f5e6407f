//! A fixture whose backend can be made unavailable.
//!
//! Part of the test binaries whose `Fixture` supports its own backend; each adds what its scenarios need.

use super::Fixture;
use crate::backends::server::Server;

pub(crate) struct OutageFixture {
    pub(crate) server: Server,
    pub(crate) fixture: Fixture,
}

impl OutageFixture {
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
        Self { fixture: Fixture::on(server.target()), server }
    }

    /// Makes the backend of the fixture's session unavailable.
    pub(crate) async fn begin(&self) {
        self.server.stop_node_of(&self.fixture.stream()).await;
    }

    /// Makes it available again, with all its data.
    pub(crate) async fn end(&self) {
        self.server.restart().await;
    }

    /// Deletes all data of every server.
    pub(crate) fn flush(&self) {
        for node in self.server.primaries() {
            node.command(&["FLUSHALL"]).unwrap().ok().unwrap();
        }
    }
}
