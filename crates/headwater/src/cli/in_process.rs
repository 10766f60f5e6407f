//! The API in this process, on a stream backend and database that it opens itself.
//!
//! Upstream: `api_client.rs`. Downstream: the same routes as `serve`. Guarantees: everything opened here is closed
//! here; no worker, sweeper or outbox runs. A command opens only what it needs: one on streams opens the database
//! only to write the audit log (`local_audit.rs`), one on the database opens no streams. A read-only command creates
//! no files: if the data does not exist, it works on an empty backend and says so.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::middleware::from_fn_with_state;
use headwater_bus::StreamedBus;
use headwater_issue::{Nudger, SchemaPolicy, Store};
use headwater_queue::Queue;
use headwater_stream::Backend;
use secrecy::{ExposeSecret, SecretString};
use utoipa_axum::router::OpenApiRouter;

use crate::api::tickets_sse::SseListeners;
use crate::api::{self, Operations};
use crate::cli::local_audit::{self, LocalAuditLog};
use crate::cli::output;
use crate::config::{BusSettings, Settings};
use crate::desk::build;
use crate::desk::provisional::ProvisionalAnswers;
use crate::exit::CliError;
use crate::http::BackgroundJobs;
use crate::http::audit::{self, AuditLog};
use crate::http::router;
use crate::inbound::webhook_log::WebhookLog;
use crate::server::app_state::{App, AppState};
use crate::server::shutdown_signal::ShutdownSignal;
use crate::server::startup;
use crate::telemetry::history::MetricsHistory;
use crate::text::with_causes;
use crate::tickets::Tickets;

/// How long a command retries unreachable servers; `serve` waits longer.
const SERVERS_MAX: Duration = Duration::from_secs(5);

/// How long a command waits until the workers are notified of its changes.
const NUDGES_MAX: Duration = Duration::from_secs(2);

/// Empty in-memory backends, for commands that need none or whose data does not exist.
const NO_STREAMS: &str = "embedded:memory";
pub(super) const NO_DATABASE: &str = "sqlite::memory:";

/// What a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Requirements {
    backends: RequiredBackends,
    /// Whether the command changes nothing.
    is_read_only: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequiredBackends {
    Streams,
    Database,
    /// The streams may be unreachable.
    DatabaseAndNudges,
    Everything,
}

impl Requirements {
    /// For topics, groups, messages, dead letters.
    pub(super) fn streams(is_read_only: bool) -> Self {
        Self { backends: RequiredBackends::Streams, is_read_only }
    }

    /// For issues, tickets, the outbox, the audit log.
    pub(super) fn database(is_read_only: bool) -> Self {
        Self { backends: RequiredBackends::Database, is_read_only }
    }

    /// For changes in the database that nudge workers: without the nudge, the sweep finds them.
    pub(super) fn database_and_nudges() -> Self {
        Self { backends: RequiredBackends::DatabaseAndNudges, is_read_only: false }
    }

    /// For what is in the streams and in the database.
    pub(super) fn everything(is_read_only: bool) -> Self {
        Self { backends: RequiredBackends::Everything, is_read_only }
    }
}

/// The routes and the backends opened for them.
pub(super) struct InProcessApi {
    pub(super) routes: Router,
    operations: Operations,
    streams: Arc<dyn Backend>,
    store: Option<Arc<dyn Store>>,
    bus: Option<Arc<StreamedBus>>,
    app: Option<App>,
    /// Only for commands on streams.
    log: Option<Arc<LocalAuditLog>>,
    /// Settings of a bus that a command opens.
    pub(super) bus_settings: BusSettings,
}

impl InProcessApi {
    pub(super) async fn open(
        settings: &Settings,
        requirements: Requirements,
    ) -> Result<Self, CliError> {
        let mut settings = settings.clone();
        if requirements.is_read_only {
            if requirements.backends != RequiredBackends::Database {
                use_empty_backend(
                    "streams",
                    missing_streams(&settings),
                    &mut settings.stream_url,
                    NO_STREAMS,
                );
            }
            if requirements.backends != RequiredBackends::Streams {
                use_empty_backend(
                    "database",
                    missing_database(&settings),
                    &mut settings.database_url,
                    NO_DATABASE,
                );
            }
        }
        if requirements.backends == RequiredBackends::Database {
            settings.stream_url = NO_STREAMS.into();
        }
        let settings = &settings;
        let streams = match requirements.backends {
            RequiredBackends::DatabaseAndNudges => {
                startup::lazy_streams(&with_short_timeouts(settings), &ShutdownSignal::default())
                    .await?
            }
            _ => streams(settings).await?,
        };
        let operations =
            Operations::new(Arc::clone(&streams), settings.http.clone(), ShutdownSignal::default())
                .map_err(|error| CliError::new(error.to_string()))?;
        if requirements.backends == RequiredBackends::Streams {
            let routes: OpenApiRouter = api::routes().with_state(operations.clone());
            let log = Arc::new(LocalAuditLog::new(&with_short_timeouts(settings)));
            let routes = Router::new().nest("/api/v1", routes.into());
            let routes = routes.layer(from_fn_with_state(Arc::clone(&log), local_audit::record));
            let (store, bus, app) = (None, None, None);
            let (log, bus_settings) = (Some(log), settings.bus.clone());
            return Ok(Self { routes, operations, streams, store, bus, app, log, bus_settings });
        }
        let store = store(settings).await?;
        let (bus, app) = app(settings, &streams, &store, requirements.is_read_only).await?;
        let api: Router<App> = router::api(operations.clone()).into();
        let routes = Router::new().nest("/api/v1", api).with_state(Arc::clone(&app));
        let routes = routes.layer(from_fn_with_state(Arc::clone(&app.audit), audit::record));
        let (store, bus, app) = (Some(store), Some(bus), Some(app));
        let (log, bus_settings) = (None, settings.bus.clone());
        Ok(Self { routes, operations, streams, store, bus, app, log, bus_settings })
    }

    /// The queue on the streams.
    pub(super) fn queue(&self) -> &Queue {
        self.operations.queue()
    }

    pub(super) async fn close(self) {
        let Self { routes, operations, streams, store, bus, app, log, bus_settings: _ } = self;
        operations.close().await;
        // A cancelled import removes its entries.
        if let Some(app) = app {
            if let Err(error) = app.nudger.flush(NUDGES_MAX).await {
                let text =
                    "the workers were not notified, the next sweep of a server finds the change";
                output::note(&format!("{text}: {}", with_causes(&error)));
            }
            app.shutdown.trigger();
            app.background_jobs.close().await;
            app.provisional.close().await;
        }
        drop((routes, operations));
        if let Some(log) = log {
            log.close().await;
        }
        if let Some(bus) = bus {
            build::close(bus).await;
        }
        if let Some(store) = store {
            store.close().await;
        }
        // Confirmed writes are durable, so an error on close does not matter.
        let _ = streams.close().await;
    }
}

async fn app(
    settings: &Settings,
    streams: &Arc<dyn Backend>,
    store: &Arc<dyn Store>,
    is_read_only: bool,
) -> Result<(Arc<StreamedBus>, App), CliError> {
    let nudger = Nudger::new(Arc::clone(streams));
    let debounce = settings.desk.debounce_window();
    let tickets = match is_read_only {
        true => Ok(Tickets::attach(Arc::clone(store), nudger.clone(), debounce)),
        false => Tickets::open(Arc::clone(store), nudger.clone(), debounce).await,
    };
    let (bus, sessions) =
        build::sessions(streams, &settings.bus, settings.retention.sessions).await?;
    let audit = AuditLog::open_append_only(Arc::clone(store)).await;
    let app = AppState {
        settings: settings.clone(),
        store: Arc::clone(store),
        streams: Arc::clone(streams),
        nudger,
        audit: Arc::new(audit.context("failed to open the audit log")?),
        tickets: tickets.context("failed to open the ticket tables")?,
        draft_links: settings.links.draft_links(settings.http.listen),
        sessions,
        background_jobs: BackgroundJobs::default(),
        webhook_log: WebhookLog::default(),
        history: Arc::new(MetricsHistory::of_command()),
        listeners: SseListeners::default(),
        provisional: ProvisionalAnswers::new(streams),
        shutdown: ShutdownSignal::default(),
    };
    Ok((bus, Arc::new(app)))
}

/// The directory of embedded streams, if it does not exist.
fn missing_streams(settings: &Settings) -> Option<String> {
    let directory = startup::embedded_directory(settings)?;
    (!Path::new(directory).exists()).then(|| directory.to_owned())
}

/// The SQLite file, if it does not exist.
pub(super) fn missing_database(settings: &Settings) -> Option<String> {
    let file = database_file(settings)?;
    (!file.exists()).then(|| file.display().to_string())
}

/// The SQLite file of the settings, parsed like the store does.
pub(super) fn database_file(settings: &Settings) -> Option<PathBuf> {
    startup::sqlite_file(settings)
}

fn is_in_memory(settings: &Settings) -> bool {
    let url = settings.database_url.expose_secret();
    url.starts_with("sqlite:") && (url.contains(":memory:") || url.contains("mode=memory"))
}

/// Fails if an explicitly configured database does not exist: an empty result would be misleading.
pub(super) fn require_given_database(settings: &Settings) -> Result<(), CliError> {
    match missing_database(settings).filter(|_| settings.database_is_given) {
        Some(path) => {
            Err(CliError::NotFound(format!("database `{path}` does not exist; fix `database.url`")))
        }
        None => Ok(()),
    }
}

/// Uses an empty backend instead of creating missing data.
fn use_empty_backend(what: &str, missing: Option<String>, url: &mut SecretString, nothing: &str) {
    if let Some(path) = missing {
        output::note(&format!("no {what} at `{path}` yet; `headwater serve` creates it"));
        *url = nothing.into();
    }
}

/// Opens the stream backend with a short retry time.
pub(super) async fn streams(settings: &Settings) -> Result<Arc<dyn Backend>, CliError> {
    startup::streams(&with_short_timeouts(settings), &ShutdownSignal::default()).await
}

/// Opens the database with a short retry time, without migrations: another version may be in production. A SQLite
/// file that does not exist is created.
pub(super) async fn store(settings: &Settings) -> Result<Arc<dyn Store>, CliError> {
    let is_new = missing_database(settings).is_some() || is_in_memory(settings);
    let schema = if is_new { SchemaPolicy::Migrate } else { SchemaPolicy::Require };
    store_with(settings, schema).await
}

/// Opens the database with a short retry time.
pub(super) async fn store_with(
    settings: &Settings,
    schema: SchemaPolicy,
) -> Result<Arc<dyn Store>, CliError> {
    startup::store(&with_short_timeouts(settings), &ShutdownSignal::default(), schema).await
}

/// Opens the stream backend for reading; `Err` is the path of missing data.
pub(super) async fn streams_read_only(
    settings: &Settings,
) -> Result<Result<Arc<dyn Backend>, CliError>, String> {
    match missing_streams(settings) {
        Some(path) => Err(path),
        None => Ok(streams(settings).await),
    }
}

/// Opens the database for reading; `Err` is the path of a missing file.
pub(super) async fn store_read_only(
    settings: &Settings,
) -> Result<Result<Arc<dyn Store>, CliError>, String> {
    match missing_database(settings) {
        Some(path) => Err(path),
        None => Ok(store(settings).await),
    }
}

fn with_short_timeouts(settings: &Settings) -> Settings {
    let mut settings = settings.clone();
    settings.start_wait = settings.start_wait.min(SERVERS_MAX);
    settings
}
