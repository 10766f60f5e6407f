//! Shell completion: commands and flags from their definition, names of topics, groups and tickets from the data.
//!
//! Upstream: the script of `headwater completion` calls this program with the variable [`VARIABLE`] and the words typed so
//! far; `entry.rs` calls [`run`] first. Downstream: this program again (`topic list --json` and the like), with the
//! connection flags that were typed. Guarantees: read-only; gives up after [`LIMIT`], and then offers no names.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use clap::Arg;
use clap_complete::env::Shells;
use clap_complete::{ArgValueCompleter, CompletionCandidate};
use serde_json::Value;

use crate::cli::args;
use crate::exit::CliError;

/// Names the shell; set by the script.
const VARIABLE: &str = "HEADWATER_COMPLETE";
/// How long the names may take.
const LIMIT: Duration = Duration::from_secs(2);
/// Maximum number of names.
const NAMES_MAX: &str = "200";
/// Flags that select the data.
const CONNECTION: [&str; 4] = ["--url", "--stream-url", "--database-url", "--settings"];

/// The script for a shell.
pub(super) fn script(shell: &str) -> Result<String, CliError> {
    let shells = Shells::builtins();
    let completer = shells
        .completer(shell)
        .ok_or_else(|| CliError::usage(format!("no completion for shell `{shell}`")))?;
    let mut script = Vec::new();
    completer
        .write_registration(VARIABLE, "headwater", "headwater", "headwater", &mut script)
        .map_err(|error| CliError::new(format!("cannot write the script: {error}")))?;
    Ok(String::from_utf8_lossy(&script).into_owned())
}

/// Prints the completions if a shell asks for them; otherwise `None`.
pub(crate) fn run() -> Option<ExitCode> {
    let shell = std::env::var(VARIABLE).ok().filter(|shell| !shell.is_empty())?;
    let shells = Shells::builtins();
    let completer = shells.completer(&shell)?;
    let mut command = without_other_settings(args::definition());
    command.build();
    let mut found = Vec::new();
    let directory = std::env::current_dir().ok();
    let written = completer.write_complete(&mut command, words(), directory.as_deref(), &mut found);
    // A shell shows nothing if the completion fails.
    let printed = written.is_ok() && std::io::stdout().write_all(&found).is_ok();
    Some(if printed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Offers only the settings that `-h` shows.
fn without_other_settings(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|argument| {
        let is_hidden = argument.is_hide_set() || argument.is_hide_short_help_set();
        argument.hide(is_hidden)
    });
    command.mut_subcommands(without_other_settings)
}

/// The words typed so far, beginning with the program.
fn words() -> Vec<OsString> {
    std::env::args_os().skip_while(|word| word != "--").skip(1).collect()
}

/// Adds the completion of names to an argument of the command at `path`.
pub(super) fn with_names(path: &str, argument: Arg) -> Arg {
    let is_topic = argument.get_id() == "topic"
        || argument.get_id() == "topics"
        || argument.get_id() == "name" && path.starts_with("topic ") && path != "topic create";
    if is_topic {
        return argument.add(ArgValueCompleter::new(topics));
    }
    if argument.get_id() == "group" {
        return argument.add(ArgValueCompleter::new(groups));
    }
    if argument.get_id() == "id" && path.starts_with("ticket ") {
        return argument.add(ArgValueCompleter::new(tickets));
    }
    argument
}

fn topics(typed: &OsStr) -> Vec<CompletionCandidate> {
    candidates(&["topic", "list", "--limit", NAMES_MAX], typed, "name", |topic| {
        format!("{} messages", topic["length"])
    })
}

fn groups(typed: &OsStr) -> Vec<CompletionCandidate> {
    let Some(topic) = topic_of(&words()) else { return Vec::new() };
    candidates(&["group", "list", &topic], typed, "group", |group| format!("lag {}", group["lag"]))
}

fn tickets(typed: &OsStr) -> Vec<CompletionCandidate> {
    candidates(&["ticket", "list", "--limit", NAMES_MAX], typed, "ticket_id", |ticket| {
        ticket["title"].as_str().unwrap_or_default().to_owned()
    })
}

/// The topic among the words: the first one after the command that is no flag.
fn topic_of(words: &[OsString]) -> Option<String> {
    let mut words = words.iter().skip(1).map(|word| word.to_string_lossy());
    let mut names = Vec::new();
    while let Some(word) = words.next() {
        if CONNECTION.contains(&&*word) {
            words.next();
        } else if !word.starts_with('-') {
            names.push(word.into_owned());
        }
    }
    let command_words = if names.first().is_some_and(|verb| verb == "group") { 2 } else { 1 };
    names.into_iter().nth(command_words)
}

/// The flags among the words that select the data.
fn connection_flags(words: &[OsString]) -> Vec<OsString> {
    let mut flags = Vec::new();
    for (number, word) in words.iter().enumerate() {
        let text = word.to_string_lossy();
        if CONNECTION.contains(&&*text) {
            flags.extend(words.get(number..number + 2).unwrap_or_default().iter().cloned());
        } else if CONNECTION.iter().any(|flag| text.starts_with(&format!("{flag}="))) {
            flags.push(word.clone());
        }
    }
    flags
}

/// The values of `field` in the output of a command that begin with what was typed.
fn candidates(
    command: &[&str],
    typed: &OsStr,
    field: &str,
    help: impl Fn(&Value) -> String,
) -> Vec<CompletionCandidate> {
    let output = output_of(command).unwrap_or_default();
    let typed = typed.to_string_lossy();
    let rows = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    rows.filter_map(|row| {
        let name = row[field].as_str().filter(|name| name.starts_with(&*typed))?;
        // A shell would run control characters that were pasted.
        let is_plain = !name.chars().any(char::is_control);
        is_plain.then(|| CompletionCandidate::new(name).help(Some(help(&row).into())))
    })
    .collect()
}

/// Standard output of this program with these arguments, if it ends in time.
fn output_of(command: &[&str]) -> Option<String> {
    let mut child = Command::new(std::env::current_exe().ok()?)
        .args(command)
        .arg("--json")
        .args(connection_flags(&words()))
        .env_remove(VARIABLE)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut stdout = child.stdout.take()?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let read = stdout.read_to_string(&mut text);
        let _ = sender.send(read.map(|_| text));
    });
    let read = receiver.recv_timeout(LIMIT);
    let _ = child.kill();
    let _ = child.wait();
    read.ok()?.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(Into::into).collect()
    }

    #[test]
    fn the_topic_of_a_group_is_found_among_the_words() {
        for (line, topic) in [
            ("headwater group describe orders g", Some("orders")),
            ("headwater consume orders --group g", Some("orders")),
            ("headwater --url http://a pending orders --group g", Some("orders")),
            ("headwater group describe", None),
        ] {
            assert_eq!(topic_of(&words(line)).as_deref(), topic, "{line}");
        }
        let flags =
            connection_flags(&words("headwater --url http://a tail x --stream-url=embedded:b"));
        assert_eq!(flags, words("--url http://a --stream-url=embedded:b"));
    }
}
