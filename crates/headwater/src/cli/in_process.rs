//! The routes in this process, on streams and a database that it opens itself.
//!
//! Upstream: `client`. Downstream: the same routers that `serve` puts behind its door.
//! Promises: what is opened here is closed here; nothing runs by itself: no worker, no sweeper, no outbox. A verb that
//! needs only the streams opens only them, and the database for the audit log once it changes something (`written_down`);
//! one that needs only the database opens no streams. A verb that only looks makes no file: where there is none, it sees
//! what a new one would show, and says so.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::middleware::from_fn_with_state;
use headwater_bus::StreamedBus;
use headwater_issue::{Inbox, InboxConfig, Nudger, Store};
use headwater_stream::Backend;
use metrics_exporter_prometheus::PrometheusBuilder;
use secrecy::{ExposeSecret, SecretString};
use sqlx::sqlite::SqliteConnectOptions;
use utoipa_axum::router::OpenApiRouter;

use crate::api::tickets_sse::Listeners;
use crate::api::{self, Operations};
use crate::cli::local_audit::{self, Log};
use crate::config::Settings;
use crate::desk::build;
use crate::exit::Failure;
use crate::http::audit::{self, Audit};
use crate::http::router;
use crate::http::{Access, BodyBudget, LongWork, Rate};
use crate::server::app_state::{App, Shared};
use crate::server::db_availability::DatabaseWatch;
use crate::server::health::Health;
use crate::server::shutdown::Stopping;
use crate::server::startup;
use crate::tickets::Tickets;

/// How long a verb waits for servers that are away; `serve` waits longer.
const SERVERS_MAX: Duration = Duration::from_secs(5);

/// Streams and a database in memory, for verbs that need neither, or look where there is nothing.
const NO_STREAMS: &str = "embedded:memory";
const NO_DATABASE: &str = "sqlite::memory:";

/// What a verb needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Needs {
    what: What,
    /// It changes nothing.
    is_look: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Streams,
    Database,
    Everything,
}

impl Needs {
    /// Topics, groups, messages, dead letters.
    pub(super) fn streams(is_look: bool) -> Self {
        Self { what: What::Streams, is_look }
    }

    /// What lies in tables: issues, tickets, the outbox, the audit.
    pub(super) fn database(is_look: bool) -> Self {
        Self { what: What::Database, is_look }
    }

    /// Both: changes that nudge workers, and sessions.
    pub(super) fn everything(is_look: bool) -> Self {
        Self { what: What::Everything, is_look }
    }
}

/// The routes, and what was opened for them.
pub(super) struct Local {
    pub(super) routes: Router,
    operations: Operations,
    streams: Arc<dyn Backend>,
    store: Option<Arc<dyn Store>>,
    bus: Option<Arc<StreamedBus>>,
    app: Option<App>,
    /// Of a verb that needs only the streams.
    log: Option<Arc<Log>>,
}

impl Local {
    pub(super) async fn open(settings: &Settings, needs: Needs) -> Result<Self, Failure> {
        let mut settings = settings.clone();
        if needs.is_look {
            if needs.what != What::Database {
                look_nowhere(
                    "streams",
                    missing_streams(&settings),
                    &mut settings.stream_url,
                    NO_STREAMS,
                );
            }
            if needs.what != What::Streams {
                look_nowhere(
                    "database",
                    missing_database(&settings),
                    &mut settings.database_url,
                    NO_DATABASE,
                );
            }
        }
        if needs.what == What::Database {
            settings.stream_url = NO_STREAMS.into();
        }
        let settings = &settings;
        let streams = streams(settings).await?;
        let operations =
            Operations::new(Arc::clone(&streams), settings.http.clone(), Stopping::default())
                .map_err(|error| Failure::new(error.to_string()))?;
        if needs.what == What::Streams {
            let routes: OpenApiRouter = api::routes().with_state(operations.clone());
            let log = Arc::new(Log::new(&impatient(settings)));
            let routes = Router::new().nest("/api/v1", routes.into());
            let routes = routes.layer(from_fn_with_state(Arc::clone(&log), local_audit::record));
            let (store, bus, app) = (None, None, None);
            return Ok(Self { routes, operations, streams, store, bus, app, log: Some(log) });
        }
        let store = store(settings).await?;
        let (bus, app) = app(settings, &streams, &store).await?;
        let api: Router<App> = router::api(operations.clone()).into();
        let routes = Router::new().nest("/api/v1", api).with_state(Arc::clone(&app));
        let routes = routes.layer(from_fn_with_state(Arc::clone(&app.audit), audit::record));
        let (store, bus, app) = (Some(store), Some(bus), Some(app));
        Ok(Self { routes, operations, streams, store, bus, app, log: None })
    }

    pub(super) async fn close(self) {
        let Self { routes, operations, streams, store, bus, app, log } = self;
        operations.close().await;
        // An import that was given up removes what there is of it.
        if let Some(app) = app {
            app.stopping.begin();
            app.long_work.close().await;
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
        // What was confirmed is safe; there is nothing else to say here.
        let _ = streams.close().await;
    }
}

async fn app(
    settings: &Settings,
    streams: &Arc<dyn Backend>,
    store: &Arc<dyn Store>,
) -> Result<(Arc<StreamedBus>, App), Failure> {
    let nudger = Nudger::new(Arc::clone(streams));
    let inbox = Inbox::new(Arc::clone(store), nudger.clone(), InboxConfig::default());
    let tickets = Tickets::open(Arc::clone(store), nudger.clone(), settings.desk.quiet()).await;
    let (bus, sessions) = build::sessions(streams).await?;
    let audit = Audit::open_to_add(Arc::clone(store)).await;
    let app = Shared {
        settings: settings.clone(),
        store: Arc::clone(store),
        database: DatabaseWatch::default(),
        streams: Arc::clone(streams),
        inbox: inbox.context("the inbox")?,
        nudger,
        health: Health::new("", Stopping::default()),
        access: Access::new(&[]),
        rate: Rate::new(&settings.http),
        body_budget: BodyBudget::new(settings.http.body_memory_bytes_max),
        audit: Arc::new(audit.context("the audit log")?),
        metrics: PrometheusBuilder::new().build_recorder().handle(),
        stopping: Stopping::default(),
        tickets: tickets.context("the tables of tickets")?,
        sessions,
        long_work: LongWork::default(),
        listeners: Listeners::default(),
    };
    Ok((bus, Arc::new(app)))
}

/// The directory of embedded streams that is not there.
fn missing_streams(settings: &Settings) -> Option<String> {
    let directory = settings.stream_url.expose_secret().strip_prefix("embedded:")?;
    let directory = directory.split('?').next().unwrap_or(directory);
    let is_missing = directory != "memory" && !Path::new(directory).exists();
    is_missing.then(|| directory.to_owned())
}

/// The file of SQLite that is not there.
fn missing_database(settings: &Settings) -> Option<String> {
    let file = database_file(settings)?;
    (!file.exists()).then(|| file.display().to_string())
}

/// The file of SQLite, as who opens it reads its address.
pub(super) fn database_file(settings: &Settings) -> Option<PathBuf> {
    let url = settings.database_url.expose_secret();
    if !url.starts_with("sqlite:") || url.contains(":memory:") || url.contains("mode=memory") {
        return None;
    }
    let options: SqliteConnectOptions = url.parse().ok()?;
    Some(options.get_filename().to_owned())
}

/// For verbs whose answer would comfort: of a database that somebody named and that is not there, nothing can be said.
pub(super) fn given_database_is_there(settings: &Settings) -> Result<(), Failure> {
    match missing_database(settings).filter(|_| settings.database_is_given) {
        Some(path) => {
            Err(Failure::Missing(format!("there is no database at {path}; mend `database.url`")))
        }
        None => Ok(()),
    }
}

/// Looks at nothing instead of making what is not there.
fn look_nowhere(what: &str, missing: Option<String>, url: &mut SecretString, nothing: &str) {
    if let Some(path) = missing {
        eprintln!("headwater: there is nothing at {path} yet; `headwater serve` makes the {what}");
        *url = nothing.into();
    }
}

/// The streams of the settings; a verb does not wait as long as a server.
pub(super) async fn streams(settings: &Settings) -> Result<Arc<dyn Backend>, Failure> {
    startup::streams(&impatient(settings), &Stopping::default()).await
}

/// The database of the settings, alike.
pub(super) async fn store(settings: &Settings) -> Result<Arc<dyn Store>, Failure> {
    startup::store(&impatient(settings), &Stopping::default()).await
}

/// The same for those who only look; an error is the path of what is not there.
pub(super) async fn streams_to_look_at(
    settings: &Settings,
) -> Result<Result<Arc<dyn Backend>, Failure>, String> {
    match missing_streams(settings) {
        Some(path) => Err(path),
        None => Ok(streams(settings).await),
    }
}

/// Alike for the database.
pub(super) async fn store_to_look_at(
    settings: &Settings,
) -> Result<Result<Arc<dyn Store>, Failure>, String> {
    match missing_database(settings) {
        Some(path) => Err(path),
        None => Ok(store(settings).await),
    }
}

fn impatient(settings: &Settings) -> Settings {
    let mut settings = settings.clone();
    settings.start_wait = settings.start_wait.min(SERVERS_MAX);
    settings
}
