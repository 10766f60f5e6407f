//! Test environment of the suite: a bus, event types, and a log of handler calls.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use headwater_bus::EventBus;
use headwater_bus::EventRegistry;
use headwater_bus::SessionId;
use headwater_bus::{Event, Scope};

/// Timeout for anything that is expected to happen.
const LIMIT: Duration = Duration::from_secs(90);

/// How long to wait before asserting that nothing more happens.
const QUIET: Duration = Duration::from_millis(300);

/// Registry of the event types that the suite publishes.
pub fn registry() -> EventRegistry {
    let registry = || EventRegistry::empty().with::<Noted>()?.with::<Announced>();
    registry().expect("the names are valid and unique")
}

/// A session event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Noted {
    pub session_id: Option<String>,
    pub number: u64,
    pub text: String,
}

impl Event for Noted {
    const TYPE: &'static str = "conformance.Noted";
    const SCOPE: Scope = Scope::Session;

    fn session(&self) -> Option<&str> {
        self.session_id.as_deref()
    }
}

/// A namespace event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Announced {
    pub number: u64,
}

impl Event for Announced {
    const TYPE: &'static str = "conformance.Announced";
}

/// An event type that is not registered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Unregistered {}

impl Event for Unregistered {
    const TYPE: &'static str = "conformance.Unregistered";
}

/// Environment of one test.
pub struct BusTestEnv {
    /// The bus under test, created with [`registry`], in a namespace that no other test uses.
    pub bus: Arc<dyn EventBus>,
    /// A session that no other test uses.
    pub session: SessionId,
    _kept: Vec<Box<dyn Any + Send>>,
}

impl BusTestEnv {
    /// Creates the environment of a bus.
    pub fn new(bus: impl EventBus + 'static) -> Self {
        Self { bus: Arc::new(bus), session: SessionId::random(), _kept: Vec::new() }
    }

    /// Keeps a value (a server, a directory) alive until the test ends.
    #[must_use]
    pub fn keep(mut self, thing: impl Any + Send) -> Self {
        self._kept.push(Box::new(thing));
        self
    }

    /// An event of the test's session.
    pub fn noted(&self, number: u64) -> Noted {
        Noted { session_id: Some(self.session.to_string()), number, text: String::new() }
    }
}

impl fmt::Debug for BusTestEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BusTestEnv").field("session", &self.session).finish_non_exhaustive()
    }
}

/// Log of handler calls, in order. Clones share the log.
#[derive(Clone, Debug, Default)]
pub struct HandlerLog(Arc<Mutex<Vec<String>>>);

impl HandlerLog {
    pub fn add(&self, line: impl fmt::Display) {
        self.0.lock().unwrap().push(line.to_string());
    }

    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    /// Waits until the log has `count` lines.
    pub async fn wait_for(&self, count: usize) -> Vec<String> {
        let deadline = Instant::now() + LIMIT;
        while self.lines().len() < count {
            assert!(Instant::now() < deadline, "waited for {count} lines, got {:?}", self.lines());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.lines()
    }

    /// Waits until the log has `count` lines, and asserts that no more follow.
    pub async fn settles_at(&self, count: usize) -> Vec<String> {
        self.wait_for(count).await;
        tokio::time::sleep(QUIET).await;
        let lines = self.lines();
        assert_eq!(lines.len(), count, "{lines:?}");
        lines
    }
}

/// Waits until the condition is true.
pub(crate) async fn wait_until(condition: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition().await {
        assert!(Instant::now() < deadline, "condition not met within {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
