//! A backend that can be taken away from those who work with it, and the place that they work in.
//!
//! Part of the test binaries whose `Fixture` can stand on a backend of its own; each adds what its scenarios ask.

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

    /// Takes the backend outage, as far as the place's session is concerned.
    pub(crate) async fn begin(&self) {
        self.server.stop_node_of(&self.fixture.stream()).await;
    }

    /// Brings it back, with all it had.
    pub(crate) async fn end(&self) {
        self.server.restart().await;
    }

    /// Removes everything from every server.
    pub(crate) fn flush(&self) {
        for node in self.server.primaries() {
            node.command(&["FLUSHALL"]).unwrap().ok().unwrap();
        }
    }
}
