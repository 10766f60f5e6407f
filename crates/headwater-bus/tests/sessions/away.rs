//! A backend that can be taken away from sessions that are in use.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::conformance::registry;
use headwater_bus::{BreakerConfig, FailurePolicy, Sessions, StreamedBus, StreamedBusConfig};
use headwater_stream::{Options, StreamName};
use headwater_testkit::Redis;

use crate::backends::server::Server;
use crate::place::{Place, by_hand, folds};

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

    /// Sessions that notice soon that the backend is away.
    pub(crate) async fn sessions(&self, on_failure: FailurePolicy) -> Sessions {
        let options = Options { call_deadline: Duration::from_secs(5), ..Default::default() };
        let backend = self.server.target().connect(&options).await;
        let recovery = Duration::from_millis(300);
        let config = StreamedBusConfig {
            prefix: self.place.prefix.clone(),
            breaker: BreakerConfig { failure_threshold: 3, recovery },
            on_failure,
            ..Default::default()
        };
        let bus = StreamedBus::open(backend, registry(), config).await.unwrap();
        Sessions::new(Arc::new(bus), folds(), by_hand()).await.unwrap()
    }

    /// Takes the backend away, as far as the place's session is concerned.
    pub(crate) async fn begin(&self) {
        self.server.leave(&self.place.stream()).await;
    }

    /// Brings it back, with all it had.
    pub(crate) async fn end(&self) {
        self.server.come_back().await;
    }

    /// The server that has this stream.
    pub(crate) fn node_of(&self, stream: &StreamName) -> &Redis {
        self.server.node_of(stream)
    }

    /// Removes everything from every server.
    pub(crate) fn flush(&self) {
        for node in self.server.primaries() {
            node.command(&["FLUSHALL"]).unwrap().ok().unwrap();
        }
    }

    /// How often the servers were asked for a range of a stream.
    pub(crate) fn ranges_read(&self) -> u64 {
        let of_node = |node: &Redis| {
            let text = node.command(&["INFO", "commandstats"]).unwrap().text();
            let calls = text.split("cmdstat_xrange:calls=").nth(1).unwrap_or("0");
            let digits: String = calls.chars().take_while(char::is_ascii_digit).collect();
            digits.parse::<u64>().unwrap()
        };
        self.server.primaries().iter().map(of_node).sum()
    }
}
