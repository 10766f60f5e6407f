//! `headwater session`: list, show, replay, fork, export, import.
//!
//! Promises: a replay or an export that is cut off is a failure; a file that is written is there whole or not at all.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use clap::Subcommand;
use futures_util::stream::{BoxStream, StreamExt};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::cli::Reach;
use crate::cli::api_client::{Client, escape, refused_line};
use crate::cli::output::{self, Rows};
use crate::cli::progress::Progress;
use crate::exit::Failure;
use crate::server::shutdown::Stopping;

/// Bytes of a file that are sent together.
const PIECE: usize = 256 * 1024;

/// Sessions.
#[derive(Debug, clap::Args)]
pub(crate) struct Session {
    #[command(flatten)]
    pub(crate) reach: Reach,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List sessions, in the order they were made.
    List {
        /// At most this many.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Show a session, and what is missing of it.
    Show { session: String },
    /// Print the events of a session in their order, one JSON value a line.
    Replay {
        session: String,
        /// Up to this entry id, or a time such as 2026-11-15T10:00:00Z.
        #[arg(long, value_name = "ID|TIME")]
        until: Option<String>,
    },
    /// Make a session of the events of another one.
    Fork {
        session: String,
        /// The id of the new session.
        new: String,
        /// Up to this entry id, or a time such as 2026-11-15T10:00:00Z.
        #[arg(long, value_name = "ID|TIME")]
        until: Option<String>,
    },
    /// Write a session as lines of JSON.
    Export {
        session: String,
        /// The file; standard output by default.
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Make a session of lines that an export wrote.
    Import {
        /// The id of the new session.
        session: String,
        /// The file; `-` is standard input.
        #[arg(long, value_name = "FILE", default_value = "-")]
        input: PathBuf,
    },
}

impl Session {
    pub(crate) fn is_look(&self) -> bool {
        !matches!(self.what, What::Fork { .. } | What::Import { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let json = self.reach.json;
        match &self.what {
            What::List { limit } => {
                let columns = &[
                    ("SESSION", "/session"),
                    ("STAGE", "/stage"),
                    ("EVENTS", "/length"),
                    ("CREATED", "/created_at"),
                    ("FORKED FROM", "/parent/session"),
                ];
                client
                    .show_pages(Rows::new(json, columns), "/sessions", &[], "sessions", *limit)
                    .await
            }
            What::Show { session } => output::object(json, &client.get(&path(session), &[]).await?),
            What::Replay { session, until } => {
                let query: Vec<_> =
                    until.clone().map(|until| ("until", until)).into_iter().collect();
                let lines = client.lines(&format!("{}/replay", path(session)), &query).await?;
                let print = if json { output::exact } else { output::line };
                each(lines, |line, is_end| if is_end { Ok(()) } else { print(line) }).await
            }
            What::Fork { session, new, until } => {
                let wish = json!({"session": new, "until": until});
                let to = format!("{}/fork", path(session));
                let cut = format!(
                    "stopped waiting; the fork is carried to its end: `headwater session show {new}` shows it"
                );
                output::object(json, &unless_stopped(client.post_long(&to, wish), cut).await?)
            }
            What::Export { session, output } => {
                let lines = client.lines(&format!("{}/export", path(session)), &[]).await?;
                match output {
                    None => each(lines, |line, _| output::exact(line)).await,
                    Some(file) => save(lines, file, json).await,
                }
            }
            What::Import { session, input } => {
                let (pieces, total) = pieces(input)?;
                let progress = Progress::new("imported", total);
                let counted = pieces.inspect(move |piece| {
                    progress.add(piece.as_ref().map_or(0, |piece| piece.len() as u64));
                });
                let to = format!("{}/import", path(session));
                let uploading = client.upload(&to, counted.boxed());
                let cut = format!(
                    "stopped before its end; `{session}` is not imported. Run the same command again: it replaces what may be left"
                );
                output::object(json, &unless_stopped(uploading, cut).await?)
            }
        }
    }
}

/// Gives each line to `show`, and whether it is the last. Without a last one, the lines were cut off.
async fn each(
    mut lines: BoxStream<'static, Result<String, Failure>>,
    mut show: impl FnMut(&str, bool) -> Result<(), Failure>,
) -> Result<(), Failure> {
    while let Some(line) = lines.next().await {
        let line = line?;
        if line.starts_with("{\"error\":") {
            let error: Value = serde_json::from_str(&line).unwrap_or_default();
            return Err(refused_line(&error).unwrap_or_else(|| Failure::new("it failed")));
        }
        let is_end = line.starts_with("{\"end\":");
        show(&line, is_end)?;
        if is_end {
            return Ok(());
        }
    }
    Err(Failure::Unreachable("the session was cut off before its end; try again".to_owned()))
}

/// Into a file that is there when it is whole.
async fn save(
    lines: BoxStream<'static, Result<String, Failure>>,
    file: &Path,
    json: bool,
) -> Result<(), Failure> {
    let failed = |error: std::io::Error| {
        Failure::new(format!("{} cannot be written: {error}", file.display()))
    };
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let mut writer = BufWriter::new(tempfile::NamedTempFile::new_in(directory).map_err(failed)?);
    let progress = Progress::new("exported", None);
    let mut count = 0_u64;
    let write = |line: &str, _: bool| {
        count += 1;
        progress.add(line.len() as u64 + 1);
        writeln!(writer, "{line}").map_err(failed)
    };
    each(lines, write).await?;
    let temporary = writer.into_inner().map_err(|error| failed(error.into_error()))?;
    temporary.as_file().sync_all().map_err(failed)?;
    temporary.persist(file).map_err(|error| failed(error.error))?;
    drop(progress);
    output::object(json, &json!({"file": file.display().to_string(), "lines": count}))
}

/// The pieces of a file, and its length if it is known. A thread reads, since files block.
fn pieces(
    input: &Path,
) -> Result<(BoxStream<'static, std::io::Result<Bytes>>, Option<u64>), Failure> {
    let (mut reader, total): (Box<dyn Read + Send>, _) = if input == Path::new("-") {
        (Box::new(std::io::stdin()), None)
    } else {
        let opened = File::open(input).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (length, file) = opened.map_err(|error| {
            Failure::new(format!("{} cannot be read: {error}", input.display()))
        })?;
        (Box::new(file), Some(length))
    };
    let (sender, mut receiver) = mpsc::channel(2);
    // Ends with its input, or when nobody listens any more.
    std::thread::spawn(move || {
        let mut buffer = vec![0; PIECE];
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
    let pieces = futures_util::stream::poll_fn(move |context| receiver.poll_recv(context));
    Ok((pieces.boxed(), total))
}

/// A signal ends the waiting, with this failure. What a server was asked for, it carries to its end.
pub(crate) async fn unless_stopped(
    work: impl Future<Output = Result<Value, Failure>>,
    cut: String,
) -> Result<Value, Failure> {
    let stopping = Stopping::default();
    stopping.on_signals().map_err(|error| Failure::new(error.to_string()))?;
    tokio::select! {
        done = work => done,
        () = stopping.begun() => Err(Failure::new(cut)),
    }
}

fn path(session: &str) -> String {
    format!("/sessions/{}", escape(session))
}
