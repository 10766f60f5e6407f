//! A backend that can be taken away from those who work with it, and the place that they work in.
//!
//! Part of the test binaries whose `Place` can stand on a backend of its own; each adds what its scenarios ask.

use super::Place;
use crate::backends::server::Server;

pub(crate) struct Away {
    pub(crate) server: Server,
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

    /// Removes everything from every server.
    pub(crate) fn flush(&self) {
        for node in self.server.primaries() {
            node.command(&["FLUSHALL"]).unwrap().ok().unwrap();
        }
    }
}
