//! Exports traces to an OpenTelemetry collector (OTLP over HTTP).
//!
//! Upstream: spans of all crates. Downstream: `POST {otlp.url}/v1/traces`. Guarantees: spans are queued and dropped
//! when the queue is full, so an unavailable collector does not slow down requests. The `traceparent` of a request is
//! continued, and so is the trace stored with an event (`event_logs.trace`) in the run that handles it.

use std::time::Duration;

use async_trait::async_trait;
use axum::http::HeaderMap;
use bytes::Bytes;
use headwater_issue::{EventLog, TraceContext};
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{SpanContext, TraceContextExt, TraceFlags, TraceState, TracerProvider};
use opentelemetry_http::{HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tracing::{Span, warn};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;

use crate::http_client;
use crate::telemetry::AnyLayer;
use crate::telemetry::uncached_filter::UncachedFilter;

/// Timeouts of one batch, and of the final flush.
const SEND_MAX: Duration = Duration::from_secs(5);
const LAST_MAX: Duration = Duration::from_secs(2);

/// Exports traces until shut down.
#[derive(Debug)]
pub(super) struct Traces(SdkTracerProvider);

impl Traces {
    /// The layer that collects spans, and their exporter.
    pub(super) fn start(url: &str) -> anyhow::Result<(AnyLayer, Self)> {
        let client = http_client::build().map_err(anyhow::Error::msg)?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(RuntimeHttpClient { client, runtime: Handle::current() })
            .with_endpoint(endpoint(url))
            .with_timeout(SEND_MAX)
            .build()?;
        let resource = Resource::builder().with_service_name("headwater").build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource)
            .build();
        let ours =
            filter_fn(|metadata| metadata.is_span() && metadata.target().starts_with("headwater"));
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("headwater"));
        Ok((layer.with_filter(UncachedFilter(ours)).boxed(), Self(provider)))
    }

    /// Sends remaining traces.
    pub(super) async fn shutdown(self) {
        // Blocks its thread.
        let ended = tokio::task::spawn_blocking(move || self.0.shutdown_with_timeout(LAST_MAX));
        if !matches!(timeout(LAST_MAX, ended).await, Ok(Ok(Ok(())))) {
            warn!("failed to send the remaining traces");
        }
    }
}

/// The traces endpoint of a collector URL, which may already be one.
fn endpoint(url: &str) -> String {
    let url = url.trim_end_matches('/');
    if url.ends_with("/v1/traces") { url.to_owned() } else { format!("{url}/v1/traces") }
}

/// Continues the trace in the request headers.
pub(crate) fn continue_trace(span: &Span, headers: &HeaderMap) {
    if headers.contains_key("traceparent") {
        // Fails only without a collector.
        let _ = span.set_parent(TraceContextPropagator::new().extract(&HeaderExtractor(headers)));
    }
}

/// The trace of the running code, to be stored with an event. `None` without a collector.
pub(crate) fn current_trace() -> Option<TraceContext> {
    let trace = Span::current().context().span().span_context().clone();
    let trace_id = u128::from_be_bytes(trace.trace_id().to_bytes());
    let span_id = u64::from_be_bytes(trace.span_id().to_bytes());
    TraceContext::new(trace_id, span_id, trace.is_sampled())
}

/// Makes a run's span part of the trace of its oldest event that has one, and links the traces of the others.
pub(crate) fn continue_event_traces(span: &Span, events: &[EventLog]) {
    let mut traces = events.iter().filter_map(|event| event.trace).map(|trace| {
        let flags = if trace.is_sampled() { TraceFlags::SAMPLED } else { TraceFlags::default() };
        let (trace_id, span_id) = (trace.trace_id().into(), trace.span_id().into());
        SpanContext::new(trace_id, span_id, flags, true, TraceState::default())
    });
    let Some(first) = traces.next() else { return };
    // Fails only without a collector.
    let _ = span.set_parent(Context::new().with_remote_span_context(first));
    traces.for_each(|other| span.add_link(other));
}

struct HeaderExtractor<'a>(&'a HeaderMap);

impl Extractor for HeaderExtractor<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(axum::http::HeaderName::as_str).collect()
    }
}

/// The exporter runs on its own thread; the HTTP client needs the runtime.
#[derive(Debug)]
struct RuntimeHttpClient {
    client: reqwest::Client,
    runtime: Handle,
}

#[async_trait]
impl HttpClient for RuntimeHttpClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let request = self
            .client
            .request(parts.method, parts.uri.to_string())
            .headers(parts.headers)
            .timeout(SEND_MAX)
            .body(body);
        let sending = self.runtime.spawn(async move {
            let response = request.send().await?;
            let status = response.status();
            Ok::<_, reqwest::Error>((status, response.bytes().await?))
        });
        let (status, bytes) = sending.await??;
        let mut response = Response::new(bytes);
        *response.status_mut() = status;
        Ok(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_endpoint_is_derived_from_the_collector_url() {
        for url in ["http://a:4318", "http://a:4318/", "http://a:4318/v1/traces"] {
            assert_eq!(endpoint(url), "http://a:4318/v1/traces");
        }
    }
}
