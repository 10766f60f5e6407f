//! What a promise is tested with: a bus, events, and a log of what handlers saw.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::bus::EventBus;
use crate::event::{Event, Scope};
use crate::name::SessionId;
use crate::registry::EventRegistry;

/// Nothing that should happen takes longer.
const LIMIT: Duration = Duration::from_secs(90);

/// How long nothing must happen before a promise believes that it does not.
const QUIET: Duration = Duration::from_millis(300);

/// The types the suite publishes.
pub fn registry() -> EventRegistry {
    let registry = || EventRegistry::empty().with::<Noted>()?.with::<Announced>();
    registry().expect("the names are valid and unique")
}

/// An event of a session.
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

/// An event of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Announced {
    pub number: u64,
}

impl Event for Announced {
    const TYPE: &'static str = "conformance.Announced";
}

/// A type that nobody registers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Unregistered {}

impl Event for Unregistered {
    const TYPE: &'static str = "conformance.Unregistered";
}

/// The surroundings of one test.
pub struct BusTestEnv {
    /// The bus under test, made for [`registry`], in a namespace that no other test uses.
    pub bus: Arc<dyn EventBus>,
    /// A session that no other test uses.
    pub session: SessionId,
    _kept: Vec<Box<dyn Any + Send>>,
}

impl BusTestEnv {
    /// Surroundings of a bus.
    pub fn new(bus: impl EventBus + 'static) -> Self {
        Self { bus: Arc::new(bus), session: SessionId::random(), _kept: Vec::new() }
    }

    /// Keeps a server or a directory for as long as the test runs.
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

/// What handlers saw, in order. Clones are the same log.
#[derive(Clone, Debug, Default)]
pub struct HandlerLog(Arc<Mutex<Vec<String>>>);

impl HandlerLog {
    pub fn add(&self, line: impl fmt::Display) {
        self.0.lock().unwrap().push(line.to_string());
    }

    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    /// Waits until there are so many lines.
    pub async fn wait_for(&self, count: usize) -> Vec<String> {
        let deadline = Instant::now() + LIMIT;
        while self.lines().len() < count {
            assert!(Instant::now() < deadline, "waited for {count} lines, got {:?}", self.lines());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.lines()
    }

    /// Waits until there are so many lines, and sees that no more follow.
    pub async fn settles_at(&self, count: usize) -> Vec<String> {
        self.wait_for(count).await;
        tokio::time::sleep(QUIET).await;
        let lines = self.lines();
        assert_eq!(lines.len(), count, "{lines:?}");
        lines
    }
}

/// Waits until something is so.
pub(crate) async fn wait_until(is_so: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so().await {
        assert!(Instant::now() < deadline, "it did not happen within {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
