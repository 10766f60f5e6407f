#![doc = include_str!("../README.md")]

// In the order in which an event passes them: each module uses only those above it.
mod error;
pub mod limits;
#[cfg(feature = "duckdb")]
pub mod metrics;

mod event;

mod table;

mod chart;
mod report;

#[cfg(feature = "duckdb")]
mod warehouse;

#[cfg(feature = "duckdb")]
mod ingest;
#[cfg(feature = "duckdb")]
mod letters;

pub use chart::svg;
pub use error::{AnalyticsError, Result};
pub use event::{NotAnEvent, RunFigures, TicketEvent};
#[cfg(feature = "duckdb")]
pub use ingest::{GROUP, Ingest, IngestConfig, STREAM};
#[cfg(feature = "duckdb")]
pub use letters::{LetterMirror, LetterMirrorConfig};
pub use report::{Chart, REPORTS, Report, report};
pub use table::Table;
#[cfg(feature = "duckdb")]
pub use warehouse::{DeadLetterRow, Rebuild, Stored, Warehouse, WarehouseReader};
