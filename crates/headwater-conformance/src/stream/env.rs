//! The environment of a test: connections to one backend, and unique names.

use std::any::Any;
use std::fmt;
use std::process;
use std::sync::Arc;

use headwater_stream::Backend;
use headwater_stream::{
    ConsumerName, DedupScope, DelayName, GroupName, HolderName, LeaseName, MapName, SetName,
    StreamName,
};

/// The environment of one test.
pub struct StreamTestEnv {
    /// The connection under test. On a faulty network it retries failed calls, see
    /// [`Retrying`](super::Retrying).
    pub backend: Arc<dyn Backend>,
    /// Another process on the same data. On a faulty network its connection has no faults.
    pub second: Arc<dyn Backend>,
    /// The connection under test without retries.
    pub raw: Arc<dyn Backend>,
    tag: String,
    faults: Option<FaultCount>,
    _kept: Vec<Box<dyn Any + Send>>,
}

type FaultCount = Box<dyn Fn() -> u64 + Send + Sync>;

impl fmt::Debug for StreamTestEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamTestEnv").field("tag", &self.tag).finish_non_exhaustive()
    }
}

impl StreamTestEnv {
    /// An environment with two connections to the same data; pass an embedded backend twice.
    pub fn new(backend: Arc<dyn Backend>, second: Arc<dyn Backend>) -> Self {
        let raw = Arc::clone(&backend);
        Self { backend, second, raw, tag: unique_tag(), faults: None, _kept: Vec::new() }
    }

    /// An environment on a faulty network. `backend` retries the calls of `raw`, `second` has a connection
    /// without faults, `faults` returns the number of faults so far.
    pub fn faulty(
        backend: Arc<dyn Backend>,
        second: Arc<dyn Backend>,
        raw: Arc<dyn Backend>,
        faults: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Self {
        Self { raw, faults: Some(Box::new(faults)), ..Self::new(backend, second) }
    }

    /// Keeps a server or a directory alive for the duration of the test.
    #[must_use]
    pub fn keep(mut self, thing: impl Any + Send) -> Self {
        self._kept.push(Box::new(thing));
        self
    }

    /// Whether calls may fail with an unknown effect, so that a retried one may have been applied twice.
    pub fn is_faulty(&self) -> bool {
        self.faults.is_some()
    }

    /// Number of faults so far; `None` on a network without faults.
    pub fn faults(&self) -> Option<u64> {
        self.faults.as_ref().map(|count| count())
    }

    /// A name in the slot of this test; different kinds never collide.
    pub fn name(&self, kind: &str, label: &str) -> String {
        format!("{{{}}}:{kind}:{label}", self.tag)
    }

    /// A stream in the slot of this test.
    pub fn stream(&self, label: &str) -> StreamName {
        stream(&self.name("stream", label))
    }

    /// A stream that is most likely in another slot.
    pub fn stream_elsewhere(&self, label: &str) -> StreamName {
        stream(&format!("{{{}/{label}}}:stream", self.tag))
    }

    /// A delay set in the slot of this test.
    pub fn delays(&self, label: &str) -> DelayName {
        DelayName::new(self.name("delays", label)).expect(VALID)
    }

    /// A lease in the slot of this test.
    pub fn lease(&self, label: &str) -> LeaseName {
        LeaseName::new(self.name("lease", label)).expect(VALID)
    }

    /// A lease that is most likely in another slot.
    pub fn lease_elsewhere(&self, label: &str) -> LeaseName {
        LeaseName::new(format!("{{{}/{label}}}:lease", self.tag)).expect(VALID)
    }

    /// A registry map in the slot of this test.
    pub fn map(&self, label: &str) -> MapName {
        MapName::new(self.name("map", label)).expect(VALID)
    }

    /// A registry set in the slot of this test.
    pub fn set(&self, label: &str) -> SetName {
        SetName::new(self.name("set", label)).expect(VALID)
    }

    /// A deduplication scope in the slot of this test.
    pub fn scope(&self, label: &str) -> DedupScope {
        DedupScope::new(self.name("dedup", label)).expect(VALID)
    }
}

const VALID: &str = "labels are short words, so the name is valid";

fn stream(name: &str) -> StreamName {
    StreamName::new(name).expect(VALID)
}

/// A group name; groups are scoped to their stream.
pub(super) fn group(label: &str) -> GroupName {
    GroupName::new(label).expect(VALID)
}

/// A consumer name; consumers are scoped to their group.
pub(super) fn consumer(label: &str) -> ConsumerName {
    ConsumerName::new(label).expect(VALID)
}

/// A holder name; lease names are unique to a test.
pub(super) fn holder(label: &str) -> HolderName {
    HolderName::new(label).expect(VALID)
}

/// A text that is unique across tests and processes.
fn unique_tag() -> String {
    format!("conformance-{:x}-{:x}", process::id(), fastrand::u64(..))
}
