//! Opens the database and the stream backend, retrying while a server is unreachable.
//!
//! Upstream: `run.rs` and `cli/in_process.rs`. Downstream: the `connect` functions of `headwater-issue` and
//! `headwater-stream`. Guarantees: retries with backoff for at most `start.wait` and logs each attempt; messages name
//! the server but no password; errors that retrying cannot fix fail at once.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use headwater_issue::{IssueError, Store, StoreOptions};
use headwater_stream::{Backend, Backoff, Options, StreamError};
use secrecy::ExposeSecret;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::config::{Settings, SettingsError};
use crate::exit::CliError;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::text::with_causes;

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

/// Opens the database and applies migrations.
pub(crate) async fn store(
    settings: &Settings,
    shutdown: &ShutdownSignal,
) -> Result<Arc<dyn Store>, CliError> {
    let url = settings.database_url.expose_secret();
    if let Some(file) = url.strip_prefix("sqlite:") {
        create_parent("database.url", file.trim_start_matches("//"))?;
    }
    let shown = settings.database_shown();
    let options =
        StoreOptions { connections_max: settings.database_connections, ..StoreOptions::default() };
    let open = || headwater_issue::connect(url, &options);
    let store =
        connect_with_retry("database", &shown, settings, shutdown, open, |error| match error {
            IssueError::Unavailable { .. } => {
                RetryDecision::Retry(simplify_pool_error(&with_causes(error)))
            }
            IssueError::Invalid { problem, .. } => {
                RetryDecision::Fail(invalid_setting("database.url", &shown, problem))
            }
            other => RetryDecision::Fail(CliError::new(format!(
                "failed to open database `{shown}`: {other}"
            ))),
        })
        .await?;
    info!(database = %shown, "database opened");
    Ok(store)
}

/// Opens the stream backend.
pub(crate) async fn streams(
    settings: &Settings,
    shutdown: &ShutdownSignal,
) -> Result<Arc<dyn Backend>, CliError> {
    let url = settings.stream_url.expose_secret();
    let shown = settings.stream_shown();
    let options = Options::default();
    let open = || headwater_stream::connect(url, &options);
    let streams = connect_with_retry("stream backend", &shown, settings, shutdown, open, |error| match error {
        // Transient errors include a full disk, which an operator may fix while we wait.
        error if error.is_transient() => RetryDecision::Retry(with_causes(error)),
        StreamError::Invalid { problem, .. } => {
            RetryDecision::Fail(invalid_setting("stream.url", &shown, problem))
        }
        StreamError::Corrupt { .. } => RetryDecision::Fail(CliError::new(format!(
            "failed to open streams `{shown}`: {error}. Tickets and issues are in SQL: move the directory elsewhere and restart; your own \
             topics and the sessions can only be restored from a backup"
        ))),
        StreamError::Locked { directory } => RetryDecision::Fail(directory_in_use(directory, settings)),
        other => RetryDecision::Fail(CliError::new(format!("failed to open streams `{shown}`: {other}"))),
    })
    .await?;
    let described = streams.describe();
    info!(streams = %shown, kind = described.kind, version = described.version, "stream backend opened");
    Ok(streams)
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

fn invalid_setting(name: &str, shown: &str, problem: &str) -> CliError {
    SettingsError::new(format!("invalid setting `{name}` = `{shown}`: {problem}")).into()
}

/// A pool timeout says nothing about its cause; say that no connection could be made.
fn simplify_pool_error(problem: &str) -> String {
    if problem.contains("pool timed out") {
        return "could not connect".to_owned();
    }
    problem.to_owned()
}

/// Creates the parent directory of a database file, so that the first start needs no preparation.
pub(crate) fn create_parent(name: &str, file: &str) -> Result<(), CliError> {
    let file = file.split('?').next().unwrap_or(file);
    let Some(parent) = Path::new(file).parent().filter(|parent| !parent.as_os_str().is_empty())
    else {
        return Ok(());
    };
    std::fs::create_dir_all(parent).map_err(|error| {
        let parent = parent.display();
        CliError::new(format!("cannot create directory `{parent}` for `{name}`: {error}"))
    })
}

/// The error for a locked stream directory; names the owning process if the system reveals it.
fn directory_in_use(directory: &str, settings: &Settings) -> CliError {
    let lock_owner = lock_owner(Path::new(directory))
        .map_or_else(|| "another process".to_owned(), |process| format!("process {process}"));
    let mut address = settings.http.listen;
    if address.ip().is_unspecified() {
        address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
    }
    CliError::new(format!(
        "the streams in `{directory}` are in use by {lock_owner}; only one process can open them. \
         Use that process with `--url http://{address}`, stop it, set `stream.url` to another directory, \
         or use Redis to share streams between processes"
    ))
}

/// The process that holds the lock file, with its command, from `/proc/locks`.
fn lock_owner(directory: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let inode = std::fs::metadata(directory.join("lock")).ok()?.ino().to_string();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    // `1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF`: process id in column 5, device and inode in column 6.
    let process = locks.lines().find_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let place = words.get(5)?;
        (place.rsplit(':').next() == Some(&inode)).then(|| words.get(4).copied())?
    })?;
    let command = std::fs::read(format!("/proc/{process}/comm")).unwrap_or_default();
    let command = String::from_utf8_lossy(&command);
    Some(match command.trim() {
        "" => process.to_owned(),
        command => format!("{process} ({command})"),
    })
}
