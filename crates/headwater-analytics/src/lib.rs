#![doc = include_str!("../README.md")]

// In dependency order: each module uses only those above it.
mod error;
pub mod limits;
#[cfg(feature = "duckdb")]
pub mod metrics;

mod event;

mod table;

mod chart;
mod report;

#[cfg(feature = "duckdb")]
mod store;

#[cfg(feature = "duckdb")]
mod dead_letter_mirror;
#[cfg(feature = "duckdb")]
mod ingest;

pub use chart::svg;
#[cfg(feature = "duckdb")]
pub use dead_letter_mirror::{DeadLetterMirror, DeadLetterMirrorConfig};
pub use error::{AnalyticsError, Result};
pub use event::{MalformedEvent, RunMetrics, TicketEventRow};
#[cfg(feature = "duckdb")]
pub use ingest::{GROUP, Ingest, IngestConfig, STREAM};
pub use report::{Chart, REPORTS, Report, report};
#[cfg(feature = "duckdb")]
pub use store::{AnalyticsReader, AnalyticsStore, DeadLetterRow, RebuildReport, StoredBatch};
pub use table::Table;
