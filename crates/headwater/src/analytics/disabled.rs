//! Stub of the DuckDB file for builds without the feature `analytics`: every call fails with `NotBuiltIn`.

use std::path::Path;
use std::time::Duration;

use headwater_analytics::Table;
use headwater_queue::Queue;
use tokio::sync::OwnedSemaphorePermit;

use crate::analytics::{AnalyticsRequestError, RebuildBatches};

/// The file of a build without analytics.
#[derive(Debug, Default)]
pub(super) struct DisabledFile;

/// Never constructed.
#[derive(Debug)]
pub(super) enum DisabledIngest {}

impl DisabledFile {
    pub(super) const IS_BUILT_IN: bool = false;

    pub(super) async fn open_read_only(_: &Path) -> Result<Self, AnalyticsRequestError> {
        Err(AnalyticsRequestError::NotBuiltIn)
    }

    pub(super) async fn open_read_write(_: &Path) -> Result<Self, AnalyticsRequestError> {
        Err(AnalyticsRequestError::NotBuiltIn)
    }

    pub(super) fn can_write(&self) -> bool {
        false
    }

    pub(super) async fn start_ingest(
        &self,
        _: &Path,
        _: &Queue,
    ) -> Result<DisabledIngest, AnalyticsRequestError> {
        Err(AnalyticsRequestError::NotBuiltIn)
    }

    pub(super) async fn query(
        &self,
        _: &str,
        _: Duration,
        _: OwnedSemaphorePermit,
    ) -> Result<Table, AnalyticsRequestError> {
        Err(AnalyticsRequestError::NotBuiltIn)
    }

    pub(super) async fn rebuild(
        &self,
        _: RebuildBatches,
    ) -> Result<(u64, u64), AnalyticsRequestError> {
        Err(AnalyticsRequestError::NotBuiltIn)
    }
}

impl DisabledIngest {
    pub(super) async fn run(self, _: impl Future<Output = ()>) {
        match self {}
    }
}
