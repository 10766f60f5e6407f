//! In the place of DuckDB where it is not linked: says so.

use std::path::Path;

use headwater_analytics::Table;
use headwater_queue::Queue;
use tokio::sync::OwnedSemaphorePermit;

use crate::analytics::{Batches, Problem};

/// Nothing.
#[derive(Debug, Default)]
pub(super) struct Sink;

/// Nothing that goes on.
#[derive(Debug)]
pub(super) enum Ingesting {}

impl Sink {
    pub(super) const IS_BUILT_IN: bool = false;

    pub(super) async fn to_read(_: &Path) -> Result<Self, Problem> {
        Err(Problem::NotBuiltIn)
    }

    pub(super) async fn to_write(_: &Path) -> Result<Self, Problem> {
        Err(Problem::NotBuiltIn)
    }

    pub(super) fn can_write(&self) -> bool {
        false
    }

    pub(super) async fn begin(&self, _: &Path, _: &Queue) -> Result<Ingesting, Problem> {
        Err(Problem::NotBuiltIn)
    }

    pub(super) async fn query(&self, _: &str, _: OwnedSemaphorePermit) -> Result<Table, Problem> {
        Err(Problem::NotBuiltIn)
    }

    pub(super) async fn rebuild(&self, _: Batches) -> Result<(u64, u64), Problem> {
        Err(Problem::NotBuiltIn)
    }
}

impl Ingesting {
    pub(super) async fn run(self, _: impl Future<Output = ()>) {
        match self {}
    }
}
