//! Opens the database and the stream backend, retrying while a server is unreachable.
//!
//! Upstream: `run.rs` and `cli/in_process.rs`. Downstream: the `connect` functions of `headwater-issue` and
//! `headwater-stream`. Guarantees: a server does not wait for Redis (`stream_monitor.rs`). Everything else is retried
//! with backoff for at most `start.wait`, and each attempt is logged. Messages name the server but no password. Errors
//! that retrying cannot fix fail at once.

use std::collections::HashSet;
use std::fs::{DirBuilder, File, Permissions};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use headwater_issue::{IssueError, SchemaPolicy, Store, StoreOptions};
use headwater_stream::{Backend, BackendDescription, Backoff, Options, StreamError};
use rustix::fs::FlockOperation;
use secrecy::ExposeSecret;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::config::{NotificationFormat, Settings, SettingsError};
use crate::exit::CliError;
use crate::outbound::notification_sinks::{NotificationLinks, SlackSink, WebhookSink};
use crate::outbound::notifications::{NotificationConfig, NotificationForwarder, NotificationSink};
use crate::server::shutdown_signal::ShutdownSignal;
use crate::server::stream_monitor::StreamMonitor;
use crate::server::stream_options::stream_options;
use crate::text::with_causes;
use crate::tickets;

/// First and longest pause between two attempts.
const RETRY: Backoff = Backoff::doubling(Duration::from_millis(250), Duration::from_secs(2));

/// An attempt that takes longer than this is logged. Attempts have their own deadline of a few seconds.
const SLOW_ATTEMPT: Duration = Duration::from_secs(1);

/// Checks the URLs of the stream backend and the database without connecting.
pub(crate) fn check(settings: &Settings) -> Result<(), CliError> {
    if let Err(error) = headwater_stream::validate_url(settings.stream_url.expose_secret()) {
        let problem = match &error {
            StreamError::Invalid { problem, .. } => problem.clone(),
            other => other.to_string(),
        };
        return Err(invalid_setting("stream.url", &settings.stream_shown(), &problem));
    }
    let url = settings.database_url.expose_secret();
    let parsed = match url.starts_with("sqlite:") {
        true => url.parse::<SqliteConnectOptions>().map(drop),
        false => url.parse::<PgConnectOptions>().map(drop),
    };
    parsed.map_err(|error| {
        invalid_setting("database.url", &settings.database_shown(), &error.to_string())
    })
}

/// The forwarders of ticket events: to the receivers of the settings, and to the sinks of an embedding program.
pub(crate) fn notifications(
    settings: &Settings,
    sinks: Vec<(NotificationConfig, Arc<dyn NotificationSink>)>,
    links: &NotificationLinks,
    shutdown: &ShutdownSignal,
) -> Result<Vec<NotificationForwarder>, CliError> {
    let failed = |id: &str, problem: &str| CliError::new(format!("notification `{id}`: {problem}"));
    let mut all = sinks;
    for one in &settings.notifications {
        let id = &one.config.id;
        let (url, links) = (one.url.expose_secret(), links.clone());
        let sink: Result<Arc<dyn NotificationSink>, String> = match (one.format, &one.secret) {
            (NotificationFormat::Slack, _) => {
                SlackSink::new(url, links).map(|sink| Arc::new(sink) as _)
            }
            (NotificationFormat::Webhook, Some(secret)) => {
                WebhookSink::new(url, secret, links).map(|sink| Arc::new(sink) as _)
            }
            (NotificationFormat::Webhook, None) => Err("its secret is not set".to_owned()),
        };
        all.push((one.config.clone(), sink.map_err(|problem| failed(id, &problem))?));
    }
    let mut forwarders = Vec::new();
    let mut ids = HashSet::new();
    for (config, sink) in all {
        let id = config.id.clone();
        if !ids.insert(id.clone()) {
            return Err(failed(&id, "another one has the same id; it must be unique"));
        }
        let forwarder = NotificationForwarder::new(config, sink, shutdown.token());
        forwarders.push(forwarder.map_err(|problem| failed(&id, &problem))?);
    }
    Ok(forwarders)
}

/// Opens the database. Only `serve`, `worker` and `migrate` apply migrations; other commands create a SQLite file
/// that does not exist.
pub(crate) async fn store(
    settings: &Settings,
    shutdown: &ShutdownSignal,
    schema: SchemaPolicy,
) -> Result<Arc<dyn Store>, CliError> {
    open_store(settings, shutdown, settings.database_connections, schema).await
}

/// The database for HTTP requests of a server: on PostgreSQL with connections of its own, so that slow requests do not keep
/// heartbeats and claims waiting. SQLite has one writer.
pub(crate) async fn http_store(
    settings: &Settings,
    shutdown: &ShutdownSignal,
    store: &Arc<dyn Store>,
) -> Result<Arc<dyn Store>, CliError> {
    if settings.database_url.expose_secret().starts_with("sqlite:") {
        return Ok(Arc::clone(store));
    }
    let connections = settings.database_http_connections;
    open_store(settings, shutdown, connections, SchemaPolicy::Require).await
}

async fn open_store(
    settings: &Settings,
    shutdown: &ShutdownSignal,
    connections_max: u32,
    schema: SchemaPolicy,
) -> Result<Arc<dyn Store>, CliError> {
    let url = settings.database_url.expose_secret();
    if let Some(file) = url.strip_prefix("sqlite:") {
        create_parent("database.url", file.trim_start_matches("//"))?;
    }
    if let Some(file) = sqlite_file(settings) {
        private_file(&file);
    }
    let shown = settings.database_shown();
    let options = StoreOptions { connections_max, schema, ..StoreOptions::default() };
    let open = async || {
        let store = headwater_issue::connect(url, &options).await?;
        tickets::migrate(store.as_ref()).await.map(|()| store)
    };
    let store =
        connect_with_retry("database", &shown, settings, shutdown, open, |error| match error {
            IssueError::Unavailable { .. } => {
                RetryDecision::Retry(simplify_pool_error(&with_causes(error)))
            }
            IssueError::Invalid { problem, .. } => {
                RetryDecision::Fail(invalid_setting("database.url", &shown, problem))
            }
            IssueError::OutdatedSchema { problem, is_empty } => {
                let message = format!(
                    "database `{shown}` cannot be used yet: {problem}; run `headwater migrate`, or start `headwater serve`"
                );
                RetryDecision::Fail(CliError::OutdatedSchema { message, is_empty: *is_empty })
            }
            other => RetryDecision::Fail(CliError::new(format!(
                "failed to open database `{shown}`: {other}"
            ))),
        })
        .await?;
    info!(database = %shown, connections_max, "database opened");
    Ok(store)
}

/// Opens the stream backend, retrying while it is unreachable.
pub(crate) async fn streams(
    settings: &Settings,
    shutdown: &ShutdownSignal,
) -> Result<Arc<dyn Backend>, CliError> {
    let streams = open_streams(settings, shutdown, &stream_options(settings)).await?;
    let BackendDescription { kind, version, .. } = streams.describe();
    info!(streams = %settings.stream_shown(), kind, version, "stream backend opened");
    Ok(streams)
}

/// Ends the leases that a killed predecessor held, if this process is the only one that works on its SQLite file.
/// Returns the lock that says so; hold it as long as the process works.
pub(crate) async fn end_leases_of_predecessor(
    settings: &Settings,
    store: &dyn Store,
) -> Result<Option<File>, CliError> {
    let Some(file) = sqlite_file(settings) else { return Ok(None) };
    // The same lock for every path to the file. It exists: the store has opened it.
    let mut path = std::fs::canonicalize(&file).unwrap_or(file).into_os_string();
    path.push(".lock");
    let path = PathBuf::from(path);
    let failed =
        |error: std::io::Error| CliError::new(format!("cannot lock `{}`: {error}", path.display()));
    let lock = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let lock = lock.map_err(failed)?;
    // Every server on this file holds a shared lock, so that an exclusive one shows that there is no other.
    if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
        let ended = store.expire_leases().await;
        ended.map_err(|error| CliError::new(format!("failed to end leases: {error}")))?;
    }
    // Waits only while another process ends the leases of its predecessor.
    let shared = tokio::task::spawn_blocking(move || {
        rustix::fs::flock(&lock, FlockOperation::LockShared).map(|()| lock)
    });
    let shared = shared.await.map_err(|error| CliError::new(error.to_string()))?;
    Ok(Some(shared.map_err(|error| failed(error.into()))?))
}

/// Opens the stream backend of a server, which runs without Redis until Redis answers.
pub(crate) async fn streams_for_server(
    settings: &Settings,
    shutdown: &ShutdownSignal,
) -> Result<(Arc<dyn Backend>, StreamMonitor), CliError> {
    let streams = lazy_streams(settings, shutdown).await?;
    let monitor = StreamMonitor::open(streams.as_ref(), settings.stream_shown()).await?;
    Ok((streams, monitor))
}

/// Opens the stream backend. Redis may be unreachable: every call tries to connect.
pub(crate) async fn lazy_streams(
    settings: &Settings,
    shutdown: &ShutdownSignal,
) -> Result<Arc<dyn Backend>, CliError> {
    let options = Options { lazy: true, ..stream_options(settings) };
    open_streams(settings, shutdown, &options).await
}

async fn open_streams(
    settings: &Settings,
    shutdown: &ShutdownSignal,
    options: &Options,
) -> Result<Arc<dyn Backend>, CliError> {
    let url = settings.stream_url.expose_secret();
    if let Some(directory) = embedded_directory(settings) {
        private_directory("stream.url", Path::new(directory))?;
    }
    let shown = settings.stream_shown();
    let open = || headwater_stream::connect(url, options);
    connect_with_retry("stream backend", &shown, settings, shutdown, open, |error| match error {
        // Transient errors include a full disk, which an operator may fix while we wait.
        error if error.is_transient() => RetryDecision::Retry(with_causes(error)),
        StreamError::Invalid { problem, .. } => {
            RetryDecision::Fail(invalid_setting("stream.url", &shown, problem))
        }
        StreamError::Corrupt { .. } => RetryDecision::Fail(CliError::new(format!(
            "failed to open streams `{shown}`: {error}. Tickets and issues are in SQL: move the directory elsewhere and restart; your own \
             topics and the sessions can only be restored from a backup"
        ))),
        StreamError::Locked { directory } => RetryDecision::Fail(directory_in_use(directory)),
        other => RetryDecision::Fail(CliError::new(format!("failed to open streams `{shown}`: {other}"))),
    })
    .await
}

/// How to proceed after a failed attempt.
enum RetryDecision {
    Retry(String),
    Fail(CliError),
}

async fn connect_with_retry<T, E, Opening: Future<Output = Result<T, E>>>(
    what: &str,
    shown: &str,
    settings: &Settings,
    shutdown: &ShutdownSignal,
    mut open: impl FnMut() -> Opening,
    decide: impl Fn(&E) -> RetryDecision,
) -> Result<T, CliError> {
    let deadline = Instant::now() + settings.start_wait;
    let mut retry = RETRY.timer();
    loop {
        let trying = open();
        tokio::pin!(trying);
        let tried = tokio::select! {
            tried = trying.as_mut() => tried,
            () = sleep(SLOW_ATTEMPT) => {
                warn!(address = shown, "{what} not reachable yet, still trying");
                trying.await
            }
        };
        let problem = match tried {
            Ok(opened) => return Ok(opened),
            Err(error) => match decide(&error) {
                RetryDecision::Fail(failure) => return Err(failure),
                RetryDecision::Retry(problem) => problem,
            },
        };
        let waited = settings.start_wait;
        let pause = retry.next_delay();
        if Instant::now() + pause > deadline {
            return Err(CliError::Unreachable(format!(
                "{what} `{shown}` is unreachable: {problem} (tried for {waited:?}); start it or fix its URL"
            )));
        }
        warn!(address = shown, error = problem, "{what} not reachable yet, retrying");
        tokio::select! {
            () = shutdown.wait() => {
                return Err(CliError::Unreachable(format!("shut down while waiting for {what} `{shown}`: {problem}")));
            }
            () = sleep(pause) => {}
        }
    }
}

pub(super) fn invalid_setting(name: &str, shown: &str, problem: &str) -> CliError {
    SettingsError::new(format!("invalid setting `{name}` = `{shown}`: {problem}")).into()
}

/// A pool timeout says nothing about its cause; say that no connection could be made.
fn simplify_pool_error(problem: &str) -> String {
    if problem.contains("pool timed out") {
        return "could not connect".to_owned();
    }
    problem.to_owned()
}

/// The SQLite file of the settings, parsed like the store does; `None` for PostgreSQL and for a database in memory.
pub(crate) fn sqlite_file(settings: &Settings) -> Option<PathBuf> {
    let url = settings.database_url.expose_secret();
    let is_in_memory = url.contains(":memory:") || url.contains("mode=memory");
    if !url.starts_with("sqlite:") || is_in_memory {
        return None;
    }
    let options: SqliteConnectOptions = url.parse().ok()?;
    Some(options.get_filename().to_owned())
}

/// Creates a file that only this user can read, or takes the access of other users from an existing one. SQLite gives
/// its other files the same permissions.
fn private_file(file: &Path) {
    // The store reports what cannot be created.
    let created = File::options().create_new(true).write(true).mode(0o600).open(file);
    if created.is_err_and(|error| error.kind() == ErrorKind::AlreadyExists) {
        restrict_access(file);
    }
}

/// Creates a directory that only this user can read, or takes the access of other users from an existing one.
fn private_directory(name: &str, directory: &Path) -> Result<(), CliError> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    created.map_err(|error| {
        let directory = directory.display();
        CliError::new(format!("cannot create directory `{directory}` for `{name}`: {error}"))
    })?;
    restrict_access(directory);
    Ok(())
}

/// Takes the access of other users from a file or directory of this user; the group keeps its access. Does not open it:
/// closing any descriptor of a file ends the POSIX locks that SQLite and DuckDB hold on it.
pub(crate) fn restrict_access(path: &Path) {
    let restrict = || {
        let metadata = std::fs::metadata(path)?;
        let mode = metadata.mode();
        let is_ours = metadata.uid() == rustix::process::geteuid().as_raw();
        match is_ours && mode & 0o007 != 0 {
            true => std::fs::set_permissions(path, Permissions::from_mode(mode & 0o770)),
            false => Ok(()),
        }
    };
    if let Err(error) = restrict() {
        let path = path.display();
        let error: std::io::Error = error;
        warn!(%error, %path, "access of other users not restricted");
    }
}

/// Creates the parent directory of a database file, so that the first start needs no preparation.
pub(crate) fn create_parent(name: &str, file: &str) -> Result<(), CliError> {
    let file = file.split('?').next().unwrap_or(file);
    let Some(parent) = Path::new(file).parent().filter(|parent| !parent.as_os_str().is_empty())
    else {
        return Ok(());
    };
    // Only for this user: the files hold messages and prompts.
    let created = DirBuilder::new().recursive(true).mode(0o700).create(parent);
    created.map_err(|error| {
        let parent = parent.display();
        CliError::new(format!("cannot create directory `{parent}` for `{name}`: {error}"))
    })
}

/// File beside the lock of embedded streams: process id and address of the server that holds it.
const ADDRESS_FILE: &str = "server";

/// Writes the address of this server beside the lock of embedded streams. Commands that find the lock taken show it.
pub(crate) fn announce(settings: &Settings, address: SocketAddr) {
    if let Some(directory) = embedded_directory(settings) {
        write_address(&Path::new(directory).join(ADDRESS_FILE), address);
    }
}

/// Writes the address of this server beside the DuckDB file. Commands that find the file in use show it.
pub(crate) fn announce_analytics(database: &Path, address: SocketAddr) {
    let file = analytics_address_file(database);
    // The file may not exist yet; an error here is reported when it is opened.
    let _ = create_parent("analytics.path", &file.display().to_string());
    write_address(&file, address);
}

fn write_address(path: &Path, address: SocketAddr) {
    let text = format!("{} {address}\n", std::process::id());
    if let Err(error) = std::fs::write(path, text) {
        let path = path.display();
        warn!(%error, %path, "address not written; commands cannot name this server");
    }
}

/// File beside the DuckDB file, as [`ADDRESS_FILE`].
fn analytics_address_file(database: &Path) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(".server");
    name.into()
}

/// The error for a DuckDB file that another process has open; names that process, and its address.
pub(crate) fn analytics_in_use(database: &Path) -> CliError {
    let (shown, address) = holder(database, &analytics_address_file(database));
    let advice = match address {
        Some(address) => format!("query that server with `--url http://{address}`, or stop it"),
        None => "stop that process, or query it with `--url` if it is a server".to_owned(),
    };
    let database = database.display();
    CliError::new(format!("DuckDB file `{database}` is in use by {shown}; {advice}"))
}

/// The directory of embedded streams.
pub(crate) fn embedded_directory(settings: &Settings) -> Option<&str> {
    let directory = settings.stream_url.expose_secret().strip_prefix("embedded:")?;
    let directory = directory.split('?').next().unwrap_or(directory);
    (directory != "memory").then_some(directory)
}

/// The error for a locked stream directory; names the process that holds it, and its address.
fn directory_in_use(directory: &str) -> CliError {
    let path = Path::new(directory);
    let (shown, address) = holder(&path.join("lock"), &path.join(ADDRESS_FILE));
    let advice = match address {
        Some(address) => format!("Use that process with `--url http://{address}`, stop it"),
        None => "Stop that process".to_owned(),
    };
    CliError::new(format!(
        "the streams in `{directory}` are in use by {shown}; only one process can open them. {advice}, set `stream.url` \
         to another directory, or use Redis to share streams between processes"
    ))
}

/// The process that has locked a file, for people, and the address that it has written if it is a server.
fn holder(locked: &Path, address_file: &Path) -> (String, Option<SocketAddr>) {
    let owner = lock_owner(locked);
    let shown = match &owner {
        None => "another process".to_owned(),
        Some((process, command)) if command.is_empty() => format!("process {process}"),
        Some((process, command)) => format!("process {process} ({command})"),
    };
    let process = owner.map(|(process, _)| process);
    (shown, server_address(address_file, process.as_deref()))
}

/// The address that the process with the lock has written; `None` if it is not a server.
fn server_address(file: &Path, process: Option<&str>) -> Option<SocketAddr> {
    let text = std::fs::read_to_string(file).ok()?;
    let (id, address) = text.trim().split_once(' ')?;
    let mut address: SocketAddr = address.parse().ok().filter(|_| Some(id) == process)?;
    if address.ip().is_unspecified() {
        address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
    }
    Some(address)
}

/// The process that holds the lock file, and its command, from `/proc/locks`.
fn lock_owner(locked: &Path) -> Option<(String, String)> {
    let inode = std::fs::metadata(locked).ok()?.ino().to_string();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    // `1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF`: process id in column 5, device and inode in column 6.
    let process = locks.lines().find_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let place = words.get(5)?;
        (place.rsplit(':').next() == Some(&inode)).then(|| words.get(4).copied())?
    })?;
    let command = std::fs::read(format!("/proc/{process}/comm")).unwrap_or_default();
    Some((process.to_owned(), String::from_utf8_lossy(&command).trim().to_owned()))
}
