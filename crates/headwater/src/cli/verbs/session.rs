//! `headwater session`: list, show, replay, fork, export and import sessions.
//!
//! Guarantees: a truncated replay or export is a failure; an output file is written completely or not at all.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use clap::Subcommand;
use futures_util::stream::{BoxStream, StreamExt};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::cli::ConnectionArgs;
use crate::cli::api_client::{ApiClient, error_in_line, escape};
use crate::cli::output::{self, OutputRows, OutputStyle};
use crate::cli::progress;
use crate::cli::units::{limit, number, position};
use crate::exit::CliError;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::text::{counted, shell_word};

/// Bytes read from a file at once.
const CHUNK_BYTES: usize = 256 * 1024;

/// Manage sessions.
#[derive(Debug, clap::Args)]
pub(crate) struct SessionArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: SessionCommand,
}

#[derive(Debug, Subcommand)]
enum SessionCommand {
    /// List sessions in the order of creation.
    List {
        /// Only those of runs of this issue.
        #[arg(long, value_parser = number)]
        issue: Option<i64>,
        /// Maximum number of sessions.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Show a session and whether entries are missing.
    Show {
        /// Session id; see `headwater session list`.
        session: String,
    },
    /// Print the events of a session in order, one JSON value per line.
    Replay {
        /// Session id; see `headwater session list`.
        session: String,
        /// Up to this entry id, a time such as 2026-11-15T10:00:00Z, or an age such as 5m.
        #[arg(long, value_name = "ID|TIME", value_parser = position)]
        until: Option<String>,
    },
    /// Fork a session, optionally up to an entry or time.
    Fork {
        /// Session id; see `headwater session list`.
        session: String,
        /// Id of the new session.
        new: String,
        /// Up to this entry id, a time such as 2026-11-15T10:00:00Z, or an age such as 5m.
        #[arg(long, value_name = "ID|TIME", value_parser = position)]
        until: Option<String>,
    },
    /// Compare two sessions, such as a fork with its original, event by event.
    Diff {
        /// Session id; see `headwater session list`.
        session: String,
        /// Another session; by default the one that it was forked from.
        with: Option<String>,
    },
    /// Export a session as JSON lines.
    Export {
        /// Session id; see `headwater session list`.
        session: String,
        /// Output file; standard output by default.
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Import a session from the lines of an export.
    Import {
        /// Id of the new session.
        session: String,
        /// Input file; `-` is standard input.
        #[arg(long, value_name = "FILE", default_value = "-")]
        input: PathBuf,
    },
}

impl SessionArgs {
    pub(crate) fn is_read_only(&self) -> bool {
        !matches!(self.command, SessionCommand::Fork { .. } | SessionCommand::Import { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            SessionCommand::List { issue, limit } => {
                let query: Vec<_> =
                    issue.iter().map(|issue| ("issue", issue.to_string())).collect();
                let columns = &[
                    ("SESSION", "/session"),
                    ("STAGE", "/stage"),
                    ("EVENTS", "/length"),
                    ("CREATED", "/created_at"),
                    ("FORKED FROM", "/parent/session"),
                ];
                client
                    .show_pages(
                        OutputRows::new(style, columns),
                        "/sessions",
                        &query,
                        "sessions",
                        *limit,
                    )
                    .await
            }
            SessionCommand::Show { session } => {
                output::object(style, &client.get(&path(session), &[]).await?)
            }
            SessionCommand::Replay { session, until } => {
                let query: Vec<_> =
                    until.clone().map(|until| ("until", until)).into_iter().collect();
                let lines = client.lines(&format!("{}/replay", path(session)), &query).await?;
                let print = if style.json { output::exact } else { output::line };
                each(lines, |line, is_end| if is_end { Ok(()) } else { print(line) }).await
            }
            SessionCommand::Diff { session, with } => {
                let query: Vec<_> = with.clone().map(|with| ("with", with)).into_iter().collect();
                let found = client.get(&format!("{}/diff", path(session)), &query).await?;
                output::object(style, &found)
            }
            SessionCommand::Fork { session, new, until } => {
                let request = json!({"session": new, "until": until});
                let to = format!("{}/fork", path(session));
                let interrupted = format!(
                    "interrupted; the fork continues on the server: check it with `headwater session show {}`",
                    shell_word(new)
                );
                let forking = or_interrupted(client.post_long(&to, request), interrupted);
                let forked = progress::waiting(format!("forking `{session}`"), forking).await?;
                let events = counted(forked["length"].as_u64().unwrap_or(0), "event", "events");
                let sentence = format!("forked session `{session}` to `{new}` with {events}");
                output::changed(style, &forked, sentence)
            }
            SessionCommand::Export { session, output } => {
                let lines = client.lines(&format!("{}/export", path(session)), &[]).await?;
                match output {
                    None => each(lines, |line, _| output::exact(line)).await,
                    Some(file) => save(lines, file, style).await,
                }
            }
            SessionCommand::Import { session, input } => {
                let (chunks, total) = read_chunks(input)?;
                let progress = progress::start("imported", total);
                let measured = chunks.inspect(move |piece| {
                    progress.inc(piece.as_ref().map_or(0, |piece| piece.len() as u64));
                });
                let to = format!("{}/import", path(session));
                let uploading = client.upload(&to, measured.boxed());
                let interrupted =
                    format!("interrupted; session `{session}` was not imported; its id is free");
                let imported = or_interrupted(uploading, interrupted).await?;
                let events = counted(imported["length"].as_u64().unwrap_or(0), "event", "events");
                let sentence = format!("imported session `{session}` with {events}");
                output::changed(style, &imported, sentence)
            }
        }
    }
}

/// Passes each line to `show` with whether it is the end marker. Without an end marker the lines were truncated.
pub(super) async fn each(
    mut lines: BoxStream<'static, Result<String, CliError>>,
    mut show: impl FnMut(&str, bool) -> Result<(), CliError>,
) -> Result<(), CliError> {
    while let Some(line) = lines.next().await {
        let line = line?;
        if line.starts_with("{\"error\":") {
            let error: Value = serde_json::from_str(&line).unwrap_or_default();
            return Err(error_in_line(&error)
                .unwrap_or_else(|| CliError::new("the server reported an error")));
        }
        let is_end = line.starts_with("{\"end\":");
        show(&line, is_end)?;
        if is_end {
            return Ok(());
        }
    }
    Err(CliError::Unreachable("the connection was lost before the end; try again".to_owned()))
}

/// Writes lines to a file that appears only when it is complete.
pub(super) async fn save(
    lines: BoxStream<'static, Result<String, CliError>>,
    file: &Path,
    style: OutputStyle,
) -> Result<(), CliError> {
    let failed = |error: std::io::Error| {
        CliError::new(format!("cannot write `{}`: {error}", file.display()))
    };
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let mut writer = BufWriter::new(tempfile::NamedTempFile::new_in(directory).map_err(failed)?);
    let progress = progress::start("exported", None);
    let mut count = 0_u64;
    let write = |line: &str, _: bool| {
        count += 1;
        progress.inc(line.len() as u64 + 1);
        writeln!(writer, "{line}").map_err(failed)
    };
    each(lines, write).await?;
    let temporary = writer.into_inner().map_err(|error| failed(error.into_error()))?;
    temporary.as_file().sync_all().map_err(failed)?;
    temporary.persist(file).map_err(|error| failed(error.error))?;
    drop(progress);
    let sentence = format!("wrote {} to `{}`", counted(count, "line", "lines"), file.display());
    output::changed(style, &json!({"file": file.display().to_string(), "lines": count}), sentence)
}

/// Chunks of a file, and its length if known. A thread reads it, because file reads block.
fn read_chunks(
    input: &Path,
) -> Result<(BoxStream<'static, std::io::Result<Bytes>>, Option<u64>), CliError> {
    let (mut reader, total): (Box<dyn Read + Send>, _) = if input == Path::new("-") {
        (Box::new(std::io::stdin()), None)
    } else {
        let opened = File::open(input).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (length, file) = opened.map_err(|error| {
            CliError::new(format!("cannot read `{}`: {error}", input.display()))
        })?;
        (Box::new(file), Some(length))
    };
    let (sender, mut receiver) = mpsc::channel(2);
    // Ends with its input, or when the receiver is dropped.
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let piece = match reader.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => Ok(Bytes::copy_from_slice(&buffer[..length])),
                Err(error) => Err(error),
            };
            let is_last = piece.is_err();
            if sender.blocking_send(piece).is_err() || is_last {
                return;
            }
        }
    });
    let chunks = futures_util::stream::poll_fn(move |context| receiver.poll_recv(context));
    Ok((chunks.boxed(), total))
}

/// Waits for `work`; a signal ends the wait with the error `interrupted`. The server completes the work.
pub(crate) async fn or_interrupted(
    work: impl Future<Output = Result<Value, CliError>>,
    interrupted: String,
) -> Result<Value, CliError> {
    let shutdown = ShutdownSignal::default();
    shutdown.on_signals().map_err(|error| CliError::new(error.to_string()))?;
    tokio::select! {
        done = work => done,
        () = shutdown.wait() => Err(CliError::new(interrupted)),
    }
}

fn path(session: &str) -> String {
    format!("/sessions/{}", escape(session))
}
