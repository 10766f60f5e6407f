//! What the routes share: one struct, built by `run`, cheap to clone.
//!
//! Upstream: `run` fills it. Downstream: every route takes it as its state.
//! Promises: nothing in it changes but by its own methods. Each module adds the parts that its routes need.

use std::sync::Arc;

use headwater_bus::Sessions;
use headwater_issue::{Inbox, Nudger, Store};
use headwater_stream::Backend;
use metrics_exporter_prometheus::PrometheusHandle;

use crate::api::tickets_sse::Listeners;
use crate::config::Settings;
use crate::http::audit::Audit;
use crate::http::{Access, BodyBudget, LongWork, Rate};
use crate::server::db_availability::DatabaseWatch;
use crate::server::health::Health;
use crate::server::shutdown::Stopping;
use crate::tickets::Tickets;

/// What the routes share.
pub(crate) struct Shared {
    /// The settings.
    pub(crate) settings: Settings,
    /// The truth.
    pub(crate) store: Arc<dyn Store>,
    /// Whether it is away.
    pub(crate) database: DatabaseWatch,
    /// The streams.
    pub(crate) streams: Arc<dyn Backend>,
    /// Sends nudges.
    pub(crate) nudger: Nudger,
    /// Where events come in.
    pub(crate) inbox: Inbox,
    /// How things stand.
    pub(crate) health: Health,
    /// Who may do what.
    pub(crate) access: Access,
    /// Who asks too often.
    pub(crate) rate: Rate,
    /// Memory for the bodies of all requests.
    pub(crate) body_budget: Arc<BodyBudget>,
    /// Who changed what.
    pub(crate) audit: Arc<Audit>,
    /// Renders `/metrics`.
    pub(crate) metrics: PrometheusHandle,
    /// Streams of events end when it begins.
    pub(crate) stopping: Stopping,
    /// Tickets.
    pub(crate) tickets: Tickets,
    /// What model runs did, step by step.
    pub(crate) sessions: Arc<Sessions>,
    /// Imports and forks under way.
    pub(crate) long_work: LongWork,
    /// Who listens to tickets.
    pub(crate) listeners: Listeners,
}

/// The state of every router.
pub(crate) type App = Arc<Shared>;
