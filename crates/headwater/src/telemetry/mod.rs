//! Logs, metrics and traces of the process.
//!
//! Upstream: `config`. Downstream: standard error, `/metrics`, and an OpenTelemetry collector if configured.
//! Guarantees: `auto` logs text on a terminal and JSON otherwise; an unavailable collector does not slow down requests;
//! remaining traces are sent at shutdown, for a bounded time.

pub(crate) mod history;
mod log_filter;
mod metric_help;
mod traces;
mod uncached_filter;

use std::io::IsTerminal;

use anyhow::Context;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use secrecy::ExposeSecret;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::config;
use crate::exit::CliError;
use crate::telemetry::log_filter::LogFilter;
use crate::telemetry::traces::Traces;
pub(crate) use crate::telemetry::traces::{continue_event_traces, continue_trace, current_trace};
use crate::telemetry::uncached_filter::UncachedFilter;

/// Histogram buckets in seconds, from a fast call to the longest run.
const SECONDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0];
/// Histogram buckets of counts.
const COUNTS: [f64; 9] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 1000.0];

/// Handles of the process's telemetry.
#[derive(Debug)]
pub(crate) struct Telemetry {
    /// Renders `/metrics`.
    pub(crate) metrics: PrometheusHandle,
    traces: Option<Traces>,
}

type AnyLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// Installs logging only, for a command. Once per process.
pub(crate) fn init_logs(settings: &config::TelemetrySettings) -> Result<(), CliError> {
    let installed = tracing_subscriber::registry().with(vec![logs(settings)?]).try_init();
    Ok(installed.context("logging is already initialized")?)
}

/// The layer that writes the log to standard error.
fn logs(settings: &config::TelemetrySettings) -> Result<AnyLayer, CliError> {
    let filter = EnvFilter::try_new(&settings.level).context("invalid setting `log.level`")?;
    // PostgreSQL sends a notice at every start for tables that already exist.
    let filter = match should_quiet_notices(&settings.level) {
        true => filter
            .add_directive("sqlx::postgres::notice=warn".parse().context("invalid log directive")?),
        false => filter,
    };
    let as_json = match settings.format.as_str() {
        "json" => true,
        "text" => false,
        _ => !std::io::stderr().is_terminal(),
    };
    let is_detailed = ["debug", "trace"].iter().any(|level| settings.level.contains(level));
    let filter = UncachedFilter(LogFilter { levels: filter, drops_outages: !is_detailed });
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    Ok(if as_json {
        layer.json().flatten_event(true).with_filter(filter).boxed()
    } else {
        let has_colors = std::io::stderr().is_terminal();
        layer.with_ansi(has_colors).with_target(false).with_filter(filter).boxed()
    })
}

/// Installs logging, metrics and traces. Once per process.
pub(crate) fn init(settings: &config::TelemetrySettings) -> Result<Telemetry, CliError> {
    let mut layers = vec![logs(settings)?];
    let traces = match &settings.otlp_url {
        Some(url) => {
            let (layer, traces) =
                Traces::start(url.expose_secret()).context("invalid setting `otlp.url`")?;
            layers.push(layer);
            Some(traces)
        }
        None => None,
    };
    tracing_subscriber::registry()
        .with(layers)
        .try_init()
        .context("logging is already initialized")?;

    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Suffix("_batch".to_owned()), &COUNTS)
        })
        .context("invalid histogram buckets")?
        .install_recorder()
        .context("a metrics recorder is already installed")?;
    metric_help::describe();
    Ok(Telemetry { metrics, traces })
}

/// Whether to raise the level of PostgreSQL notices to `warn`: only if the filter would log them and does not mention
/// sqlx.
fn should_quiet_notices(level: &str) -> bool {
    let others =
        level.split(',').filter_map(|part| part.trim().parse::<LevelFilter>().ok()).next_back();
    !level.contains("sqlx") && others.is_some_and(|others| others >= LevelFilter::WARN)
}

impl Telemetry {
    /// Sends remaining traces.
    pub(crate) async fn flush(self) {
        if let Some(traces) = self.traces {
            traces.shutdown().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_logged_is_not_made() {
        for (level, has_debug) in [("info", false), ("info,headwater=debug", true)] {
            let (format, level) = ("json".to_owned(), level.to_owned());
            let settings = config::TelemetrySettings { format, level, otlp_url: None };
            let logs = Registry::default().with(vec![logs(&settings).unwrap()]);
            tracing::subscriber::with_default(logs, || {
                assert!(!tracing::info_span!("a span").is_disabled());
                assert_eq!(!tracing::debug_span!("a span").is_disabled(), has_debug);
                assert_eq!(tracing::enabled!(tracing::Level::DEBUG), has_debug);
            });
        }
    }

    #[test]
    fn the_notice_directive_only_reduces_output() {
        for level in ["info", "warn", "INFO,headwater=debug", "headwater=debug, trace"] {
            assert!(should_quiet_notices(level), "{level}");
        }
        for level in ["off", "error", "error,headwater=info", "headwater=info", "info,sqlx=debug"] {
            assert!(!should_quiet_notices(level), "{level}");
        }
    }
}
