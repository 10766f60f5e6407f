//! State of the routes, in two parts: the data that the API works on, and what only the HTTP server needs.
//!
//! Upstream: `run.rs` builds both; `cli/in_process.rs` builds the data for commands without a server. Downstream: every
//! route.

use std::sync::Arc;

use headwater_bus::Sessions;
use headwater_issue::{Inbox, Nudger, Store};
use headwater_stream::Backend;
use metrics_exporter_prometheus::PrometheusHandle;

use crate::api::tickets_sse::SseListeners;
use crate::config::Settings;
use crate::desk::draft_links::DraftLinks;
use crate::desk::provisional::ProvisionalAnswers;
use crate::http::audit::AuditLog;
use crate::http::{Authenticator, BackgroundJobs, BodyBudget, RateLimiter};
use crate::inbound::webhook_log::WebhookLog;
use crate::server::db_availability::DatabaseMonitor;
use crate::server::health::ProcessHealth;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::telemetry::history::MetricsHistory;
use crate::tickets::Tickets;

/// The data that the API routes work on.
pub(crate) struct AppState {
    /// The settings.
    pub(crate) settings: Settings,
    /// The database: issues, events, outbox. In a server, with connections that only HTTP requests use.
    pub(crate) store: Arc<dyn Store>,
    /// The stream backend.
    pub(crate) streams: Arc<dyn Backend>,
    /// Sends nudges to workers.
    pub(crate) nudger: Nudger,
    /// The audit log.
    pub(crate) audit: Arc<AuditLog>,
    /// Tickets.
    pub(crate) tickets: Tickets,
    /// Links that decide about drafts; `None` without `desk.link_secret`.
    pub(crate) draft_links: Option<DraftLinks>,
    /// Sessions of model runs.
    pub(crate) sessions: Arc<Sessions>,
    /// Imports and forks in progress.
    pub(crate) background_jobs: BackgroundJobs,
    /// What became of webhooks.
    pub(crate) webhook_log: WebhookLog,
    /// History of metrics.
    pub(crate) history: Arc<MetricsHistory>,
    /// Open event streams of tickets.
    pub(crate) listeners: SseListeners,
    /// Answers that are being written.
    pub(crate) provisional: ProvisionalAnswers,
    /// Ends event streams on shutdown.
    pub(crate) shutdown: ShutdownSignal,
}

/// The state type of the routers below `/api/v1`.
pub(crate) type App = Arc<AppState>;

/// What the HTTP server needs in addition: for its middleware, webhooks, health, metrics and the status page.
pub(crate) struct ServerState {
    /// The data.
    pub(crate) app: App,
    /// Records incoming events.
    pub(crate) inbox: Inbox,
    /// Health of this process.
    pub(crate) health: ProcessHealth,
    /// The database with the connections for work, for readiness: busy requests do not make a process unready.
    pub(crate) work_store: Arc<dyn Store>,
    /// Reports when the database is unavailable.
    pub(crate) database: DatabaseMonitor,
    /// Maps tokens to principals.
    pub(crate) authenticator: Authenticator,
    /// Request rate limits per client.
    pub(crate) rate_limiter: RateLimiter,
    /// Memory budget for the request bodies of all clients.
    pub(crate) body_budget: Arc<BodyBudget>,
    /// Renders `/metrics`.
    pub(crate) metrics: PrometheusHandle,
}

/// The state type of the other routers.
pub(crate) type HttpServer = Arc<ServerState>;
