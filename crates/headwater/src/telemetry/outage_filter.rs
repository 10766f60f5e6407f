//! Drops warnings that only repeat that the stream backend is unavailable.
//!
//! Upstream: every part that uses streams logs its own failed call. Why: during an outage they repeat each other several
//! times per second, without the address. `server/stream_monitor.rs` logs each change of the state once, with address
//! and cause. With the level `debug` or `trace` nothing is dropped.

use std::fmt::{Debug, Write};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata};
use tracing_subscriber::layer::{Context, Filter};

/// Texts of `StreamError::Unavailable`, and of parts that fall back to SQL.
const OUTAGE: [&str; 4] = [
    "the backend is unavailable: ",
    "the stream is unavailable",
    "stream backend unavailable",
    "stream backend was unavailable a moment ago",
];

/// The part that reports the state itself.
const MONITOR: &str = "headwater::server::stream_monitor";

/// The console, whose pages name the request id that is to be found in the log. It does not repeat itself.
const CONSOLE: &str = "headwater_console::";

/// Drops warnings about an unavailable stream backend, except those of [`MONITOR`] and [`CONSOLE`].
pub(super) struct OutageFilter;

impl<S> Filter<S> for OutageFilter {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let target = event.metadata().target();
        if *event.metadata().level() != Level::WARN
            || target == MONITOR
            || target.starts_with(CONSOLE)
        {
            return true;
        }
        let mut text = FieldText::default();
        event.record(&mut text);
        !OUTAGE.iter().any(|part| text.0.contains(part))
    }
}

/// Message and error of an event.
#[derive(Default)]
struct FieldText(String);

impl Visit for FieldText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if ["message", "error"].contains(&field.name()) {
            // Writing to a String cannot fail.
            let _ = write!(self.0, "{value:?} ");
        }
    }
}
