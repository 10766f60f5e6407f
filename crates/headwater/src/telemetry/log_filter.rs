//! What is logged: events of the levels of `log.level`, except warnings that only repeat that the stream backend is unavailable.
//!
//! Upstream: `telemetry`. Why the exception: every part that uses streams logs its own failed call, and during an outage they repeat
//! each other several times per second, without the address. `server/stream_monitor.rs` logs each change of the state once, with
//! address and cause. With the level `debug` or `trace` nothing is dropped.
//!
//! One filter, because of two nested ones only the outer one is asked which levels it wants: spans and events of all levels would
//! be made, and dropped later.

use std::fmt::{Debug, Write};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
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

/// The filter of the log.
pub(super) struct LogFilter {
    pub(super) levels: EnvFilter,
    /// Whether to drop warnings about an unavailable stream backend, except those of [`MONITOR`] and the console.
    pub(super) drops_outages: bool,
}

impl<S: Subscriber> Filter<S> for LogFilter {
    fn enabled(&self, metadata: &Metadata<'_>, context: &Context<'_, S>) -> bool {
        Filter::enabled(&self.levels, metadata, context)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        Filter::<S>::callsite_enabled(&self.levels, metadata)
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let target = event.metadata().target();
        // The pages of the console name the request id that is to be found in the log. It does not repeat itself.
        let is_of_console = target.starts_with("headwater_console::");
        if !self.drops_outages
            || *event.metadata().level() != Level::WARN
            || target == MONITOR
            || is_of_console
        {
            return true;
        }
        let mut text = FieldText::default();
        event.record(&mut text);
        !OUTAGE.iter().any(|part| text.0.contains(part))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Filter::<S>::max_level_hint(&self.levels)
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        Filter::on_new_span(&self.levels, attributes, id, context);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        Filter::on_record(&self.levels, id, values, context);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        Filter::on_enter(&self.levels, id, context);
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        Filter::on_exit(&self.levels, id, context);
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        Filter::on_close(&self.levels, id, context);
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
