//! Logs, metrics and traces of the process.
//!
//! Upstream: `settings`. Downstream: standard error, `/metrics`, and an OpenTelemetry collector if one is named.
//! Promises: text on a terminal and JSON otherwise; a collector that is away costs no request anything; what is left is
//! sent at the end, for a bounded time.

mod event_traces;
mod traces;
mod uncached_filter;

use std::io::IsTerminal;
use std::sync::Arc;

use anyhow::Context;
use headwater_issue::Nudger;
use headwater_stream::Backend;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use secrecy::ExposeSecret;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::config;
use crate::exit::Failure;
pub(crate) use crate::telemetry::event_traces::{continue_origins, note_origin};
use crate::telemetry::traces::Traces;
pub(crate) use crate::telemetry::traces::continue_trace;
use crate::telemetry::uncached_filter::Fresh;

/// Upper bounds of seconds: from a fast call to the longest run.
const SECONDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0];
/// Upper bounds of counts.
const COUNTS: [f64; 9] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 1000.0];

/// What watches the process.
#[derive(Debug)]
pub(crate) struct Telemetry {
    /// Renders `/metrics`.
    pub(crate) metrics: PrometheusHandle,
    traces: Option<Traces>,
}

type AnyLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// Begins to log and to measure. Once per process.
pub(crate) fn begin(settings: &config::Telemetry) -> Result<Telemetry, Failure> {
    let filter = EnvFilter::try_new(&settings.level).context("the setting `log.level`")?;
    // PostgreSQL tells at every start that tables are there already.
    let filter = match tells_notices(&settings.level) {
        true => filter.add_directive("sqlx::postgres::notice=warn".parse().context("a directive")?),
        false => filter,
    };
    let as_json = match settings.format.as_str() {
        "json" => true,
        "text" => false,
        _ => !std::io::stderr().is_terminal(),
    };
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let logs: AnyLayer = if as_json {
        layer.json().flatten_event(true).with_filter(Fresh(filter)).boxed()
    } else {
        layer
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .with_filter(Fresh(filter))
            .boxed()
    };
    let mut layers = vec![logs];
    let traces = match &settings.otlp_url {
        Some(url) => {
            let (layer, traces) =
                Traces::begin(url.expose_secret()).context("the setting `otlp.url`")?;
            layers.push(layer);
            Some(traces)
        }
        None => None,
    };
    tracing_subscriber::registry().with(layers).try_init().context("logs were begun before")?;

    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Suffix("_batch".to_owned()), &COUNTS)
        })
        .context("the buckets of metrics")?
        .install_recorder()
        .context("metrics were begun before")?;
    Ok(Telemetry { metrics, traces })
}

/// Whether notices of PostgreSQL would be told that nobody has asked for. Where less is told, they must not be added to it.
fn tells_notices(level: &str) -> bool {
    let others =
        level.split(',').filter_map(|part| part.trim().parse::<LevelFilter>().ok()).next_back();
    !level.contains("sqlx") && others.is_some_and(|others| others >= LevelFilter::WARN)
}

impl Telemetry {
    /// Sends nudges, with the traces of events if there is a collector.
    pub(crate) fn nudger(&self, streams: Arc<dyn Backend>) -> Nudger {
        match self.traces {
            Some(_) => Nudger::traced(streams, Arc::new(event_traces::Collected)),
            None => Nudger::new(streams),
        }
    }

    /// Sends what is left.
    pub(crate) async fn end(self) {
        if let Some(traces) = self.traces {
            traces.end().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_are_made_less_and_never_more() {
        for level in ["info", "warn", "INFO,headwater=debug", "headwater=debug, trace"] {
            assert!(tells_notices(level), "{level}");
        }
        for level in ["off", "error", "error,headwater=info", "headwater=info", "info,sqlx=debug"] {
            assert!(!tells_notices(level), "{level}");
        }
    }
}
