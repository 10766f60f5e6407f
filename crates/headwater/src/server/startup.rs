//! Opens the store and the streams, and waits a while for those that are away.
//!
//! Upstream: `run`. Downstream: the two `connect` functions, each the one place where a URL becomes a backend.
//! Promises: a server that is away is asked again with a line in the log each time, for `start.wait` at most; what is said
//! then names the server, never a password. What no waiting can mend fails at once.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use headwater_issue::{IssueError, Store, StoreOptions};
use headwater_stream::{Backend, Options, StreamError};
use secrecy::ExposeSecret;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::config::{Settings, SettingsError};
use crate::exit::Failure;
use crate::server::shutdown::Stopping;
use crate::text::with_causes;

/// The first and the longest pause between two tries.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// A try that takes longer than this is worth a line in the log. It has a deadline of its own, a few seconds.
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// Checks the addresses of streams and database, and opens neither.
pub(crate) fn check(settings: &Settings) -> Result<(), Failure> {
    if let Err(error) = headwater_stream::check_url(settings.stream_url.expose_secret()) {
        let problem = match &error {
            StreamError::Invalid { problem, .. } => problem.clone(),
            other => other.to_string(),
        };
        return Err(wrong("stream.url", &settings.stream_shown(), &problem));
    }
    let url = settings.database_url.expose_secret();
    let parsed = match url.starts_with("sqlite:") {
        true => url.parse::<SqliteConnectOptions>().map(drop),
        false => url.parse::<PgConnectOptions>().map(drop),
    };
    parsed.map_err(|error| wrong("database.url", &settings.database_shown(), &error.to_string()))
}

/// Opens the database and brings its tables up to date.
pub(crate) async fn store(
    settings: &Settings,
    stopping: &Stopping,
) -> Result<Arc<dyn Store>, Failure> {
    let url = settings.database_url.expose_secret();
    if let Some(file) = url.strip_prefix("sqlite:") {
        create_parent("database.url", file.trim_start_matches("//"))?;
    }
    let shown = settings.database_shown();
    let options =
        StoreOptions { connections_max: settings.database_connections, ..StoreOptions::default() };
    let open = || headwater_issue::connect(url, &options);
    let store = patiently("the database", &shown, settings, stopping, open, |error| match error {
        IssueError::Unavailable { .. } => Verdict::TryAgain(without_the_pool(&with_causes(error))),
        IssueError::Invalid { problem, .. } => {
            Verdict::GiveUp(wrong("database.url", &shown, problem))
        }
        other => Verdict::GiveUp(Failure::new(format!("the database {shown}: {other}"))),
    })
    .await?;
    info!(database = %shown, "database opened");
    Ok(store)
}

/// Opens the streams.
pub(crate) async fn streams(
    settings: &Settings,
    stopping: &Stopping,
) -> Result<Arc<dyn Backend>, Failure> {
    let url = settings.stream_url.expose_secret();
    let shown = settings.stream_shown();
    let options = Options::default();
    let open = || headwater_stream::connect(url, &options);
    let streams = patiently("the streams", &shown, settings, stopping, open, |error| match error {
        // A disk that is full is as likely to be mended as a server that is away.
        error if error.is_transient() => Verdict::TryAgain(with_causes(error)),
        StreamError::Invalid { problem, .. } => {
            Verdict::GiveUp(wrong("stream.url", &shown, problem))
        }
        StreamError::Corrupt { .. } => Verdict::GiveUp(Failure::new(format!(
            "the streams {shown}: {error}. Tickets and issues are in SQL: move the directory away and start; topics of \
             your own and sessions need a backup"
        ))),
        StreamError::Locked { directory } => Verdict::GiveUp(in_use(directory, settings)),
        other => Verdict::GiveUp(Failure::new(format!("the streams {shown}: {other}"))),
    })
    .await?;
    let described = streams.describe();
    info!(streams = %shown, kind = described.kind, version = described.version, "streams opened");
    Ok(streams)
}

/// What to do about an error.
enum Verdict {
    TryAgain(String),
    GiveUp(Failure),
}

async fn patiently<T, E, Opening: Future<Output = Result<T, E>>>(
    what: &str,
    shown: &str,
    settings: &Settings,
    stopping: &Stopping,
    mut open: impl FnMut() -> Opening,
    judge: impl Fn(&E) -> Verdict,
) -> Result<T, Failure> {
    let deadline = Instant::now() + settings.start_wait;
    let mut pause = PAUSE_MIN;
    loop {
        let trying = open();
        tokio::pin!(trying);
        let tried = tokio::select! {
            tried = trying.as_mut() => tried,
            () = sleep(SILENCE_MAX) => {
                warn!(address = shown, "{what} cannot be reached yet, still trying");
                trying.await
            }
        };
        let problem = match tried {
            Ok(opened) => return Ok(opened),
            Err(error) => match judge(&error) {
                Verdict::GiveUp(failure) => return Err(failure),
                Verdict::TryAgain(problem) => problem,
            },
        };
        let waited = settings.start_wait;
        if Instant::now() + pause > deadline {
            return Err(Failure::Unreachable(format!(
                "{what} at {shown} cannot be reached, tried for {waited:?}: {problem}; start it, or mend its address"
            )));
        }
        warn!(address = shown, error = problem, "{what} cannot be reached yet, trying again");
        tokio::select! {
            () = stopping.begun() => {
                return Err(Failure::Unreachable(format!("stopped while waiting for {what} at {shown}: {problem}")));
            }
            () = sleep(pause) => {}
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

fn wrong(name: &str, shown: &str, problem: &str) -> Failure {
    SettingsError::new(format!("the setting `{name}` is `{shown}`: {problem}")).into()
}

/// The pool says that it waited; what for is of interest.
fn without_the_pool(problem: &str) -> String {
    if problem.contains("pool timed out") {
        return "no connection can be made".to_owned();
    }
    problem.to_owned()
}

/// The directory of a database file, so that the first start needs no preparation.
pub(crate) fn create_parent(name: &str, file: &str) -> Result<(), Failure> {
    let file = file.split('?').next().unwrap_or(file);
    let Some(parent) = Path::new(file).parent().filter(|parent| !parent.as_os_str().is_empty())
    else {
        return Ok(());
    };
    std::fs::create_dir_all(parent).map_err(|error| {
        let parent = parent.display();
        Failure::new(format!("the directory {parent} of `{name}` cannot be created: {error}"))
    })
}

/// Says who has the directory, where the system tells.
fn in_use(directory: &str, settings: &Settings) -> Failure {
    let holder = holder(Path::new(directory))
        .map_or_else(|| "another process".to_owned(), |process| format!("process {process}"));
    let mut address = settings.http.listen;
    if address.ip().is_unspecified() {
        address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
    }
    Failure::new(format!(
        "the streams in `{directory}` are in use by {holder}; one process at a time can have them. \
         Ask that one by `--url http://{address}`, stop it, set `stream.url` to another directory, \
         or to Redis for several processes"
    ))
}

/// The process that holds the lock file, with its command, from the list of locks that Linux keeps.
fn holder(directory: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let inode = std::fs::metadata(directory.join("lock")).ok()?.ino().to_string();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    // `1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF`: the process, then device and inode.
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
