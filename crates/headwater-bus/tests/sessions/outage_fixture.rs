//! A fixture with sessions whose backend can be made unavailable.

#[path = "../backends/outage_fixture.rs"]
mod shared;

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{BreakerConfig, FailurePolicy, Sessions, StreamedBus, StreamedBusConfig};
use headwater_conformance::bus::registry;
use headwater_stream::{Options, StreamName};
use headwater_testkit::Redis;

pub(crate) use self::shared::OutageFixture;
use crate::fixture::{Fixture, by_hand, folds};

impl OutageFixture {
    /// Sessions that detect an outage soon.
    pub(crate) async fn sessions(&self, on_failure: FailurePolicy) -> Sessions {
        let options = Options { call_deadline: Duration::from_secs(5), ..Default::default() };
        let backend = self.server.target().connect(&options).await;
        let recovery = Duration::from_millis(300);
        let config = StreamedBusConfig {
            prefix: self.fixture.prefix.clone(),
            breaker: BreakerConfig { failure_threshold: 3, recovery },
            on_failure,
            ..Default::default()
        };
        let bus = StreamedBus::open(backend, registry(), config).await.unwrap();
        Sessions::new(Arc::new(bus), folds(), by_hand()).await.unwrap()
    }

    /// The server that has this stream.
    pub(crate) fn node_of(&self, stream: &StreamName) -> &Redis {
        self.server.node_of(stream)
    }

    /// Number of range reads that the servers executed.
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
