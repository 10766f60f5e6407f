//! Prints an error: what is wrong, the command that helps, and for invalid usage the usage.
//!
//! Upstream: `entry.rs`. Guarantees: every error is one line on standard error, followed by one line that begins with
//! `help:` and names a command; neither contains terminal control characters. `docs/mistakes.md` lists them, and a test
//! compares that list.

use std::process::ExitCode;

use clap::error::{ContextKind, ErrorKind};
use console::{Style, style};

use crate::cli::args;
use crate::config::shown_url;
use crate::exit::CliError;
use crate::text::{printable, shell_word};

/// What a command line names, as far as errors refer to it.
#[derive(Clone, Debug, Default)]
pub(crate) struct NamedObjects {
    /// Names of the command and its subcommands.
    pub(crate) path: Vec<String>,
    /// The topic.
    pub(crate) topic: Option<String>,
    /// The id of an issue, ticket, dead letter or outbox row.
    pub(crate) id: Option<String>,
}

impl NamedObjects {
    fn command(&self) -> String {
        std::iter::once("headwater")
            .chain(self.path.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(" ")
    }

    fn verb(&self) -> &str {
        self.path.first().map(String::as_str).unwrap_or_default()
    }

    fn topic(&self) -> String {
        self.topic.as_deref().map_or_else(|| "TOPIC".to_owned(), shell_word)
    }
}

/// Prints why a command failed. `doctor` has given its advice already.
pub(crate) fn print(failure: &CliError, named: &NamedObjects) {
    let message = failure.to_string();
    let help = match failure {
        CliError::Warnings => None,
        failure => Some(command_that_helps(failure, &message, named)),
    };
    print_lines(&message, help.as_deref());
    if let CliError::Usage(_) = failure {
        eprintln!("{}", args::usage(&named.path));
    }
}

/// Prints why a command line cannot be parsed, or the help that it asks for, and returns the exit code.
pub(crate) fn print_parse_error(error: &clap::Error) -> ExitCode {
    let code = ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        // Help goes to standard output with code 0. A closed pipe, as with `head`, is not an error.
        let _ = error.print();
        return code;
    }
    let text = error.render().to_string();
    // The first paragraph says what is wrong.
    let first = text.lines().take_while(|line| !line.trim().is_empty());
    let first = first.map(str::trim).collect::<Vec<_>>().join(" ");
    let mut message = first.strip_prefix("error: ").unwrap_or(&first).to_owned();
    if let Some(tip) = text.lines().find_map(|line| line.trim().strip_prefix("tip: ")) {
        message = format!("{message}; {tip}");
    }
    // Of the library that reads numbers.
    let message = message.replace("invalid digit found in string", "expected a number");
    let path = args::path_of(std::env::args().skip(1));
    let command = NamedObjects { path: path.clone(), ..NamedObjects::default() }.command();
    let similar = match (error.kind(), error.get(ContextKind::SuggestedSubcommand)) {
        (ErrorKind::InvalidSubcommand, Some(similar)) => format!(", {similar}"),
        _ => String::new(),
    };
    // The most similar one is last.
    let similar = similar.rsplit_once(", ").map_or_else(String::new, |(_, it)| format!(" {it}"));
    print_lines(&message, Some(&format!("{command}{similar} --help")));
    eprintln!("{}", args::usage(&path));
    code
}

fn print_lines(message: &str, help: Option<&str>) {
    let one_line = |text: &str| printable(&text.replace(['\r', '\n'], " "));
    let red = Style::new().for_stderr().red().bold();
    eprintln!("{} {}", red.apply_to("headwater:"), one_line(message));
    if let Some(help) = help {
        eprintln!("{} {}", style("help:").for_stderr().bold(), one_line(help));
    }
}

fn command_that_helps(failure: &CliError, message: &str, named: &NamedObjects) -> String {
    // The place where the error was found knows best.
    if let Some(command) = quoted_command(message, "headwater ") {
        return command;
    }
    if let Some(option) = quoted_command(message, "--url ") {
        return this_command_with(&option);
    }
    if message.contains("pass --yes") {
        return this_command_with("--yes");
    }
    if message.contains("cannot write") || message.contains("No space left") {
        return "df -h".to_owned();
    }
    if message.contains("HEADWATER_TOKEN") || message.contains("this token has the role") {
        return "export HEADWATER_TOKEN=TOKEN".to_owned();
    }
    if message.contains("byte budget of topic") {
        return format!("headwater topic alter {} --byte-budget SIZE", named.topic());
    }
    if message.contains("cannot read standard input") {
        return format!("{} --help", named.command());
    }
    match failure {
        CliError::Usage(_) if named.verb() == "report" && !message.contains("--format") => {
            "headwater report list".to_owned()
        }
        CliError::Usage(_) | CliError::Settings(_) => format!("{} --help", named.command()),
        CliError::OutdatedSchema { .. } => "headwater migrate".to_owned(),
        CliError::Unreachable(_) if message.contains("--url") => "headwater serve".to_owned(),
        CliError::Unreachable(_) => "headwater doctor".to_owned(),
        CliError::NotFound(_) => list_command(message, named),
        _ if message.contains("is reserved") => "headwater topic list".to_owned(),
        _ => match (named.verb(), &named.id) {
            ("issue", Some(id)) => format!("headwater issue why {}", shell_word(id)),
            ("topic" | "group", _) if named.topic.is_some() => {
                format!("headwater topic describe {}", named.topic())
            }
            _ => "headwater doctor".to_owned(),
        },
    }
}

/// The command that lists objects like the one that was not found.
fn list_command(message: &str, named: &NamedObjects) -> String {
    match named.verb() {
        "group" | "pending" if message.contains("group") => {
            format!("headwater group list {}", named.topic())
        }
        "dlq" if message.contains("dead letter") => format!("headwater dlq list {}", named.topic()),
        verb @ ("issue" | "ticket" | "draft" | "effect" | "prompt" | "session" | "outbox"
        | "plan") => {
            format!("headwater {verb} list")
        }
        "audit" | "migrate" => "headwater migrate".to_owned(),
        _ => "headwater topic list".to_owned(),
    }
}

/// The first text in backticks that begins so.
fn quoted_command(message: &str, start: &str) -> Option<String> {
    let quoted = message.split('`').skip(1).step_by(2).find(|text| text.starts_with(start));
    quoted.map(str::to_owned)
}

/// This command line with one more option; passwords in URLs are hidden.
fn this_command_with(option: &str) -> String {
    let shown = |word: String| if word.contains("://") { shown_url(&word) } else { word };
    let words = std::env::args().skip(1).map(|word| shell_word(&shown(word))).collect::<Vec<_>>();
    format!("headwater {} {option}", words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(path: &[&str], topic: Option<&str>, id: Option<&str>) -> NamedObjects {
        let path = path.iter().map(|word| (*word).to_owned()).collect();
        NamedObjects { path, topic: topic.map(str::to_owned), id: id.map(str::to_owned) }
    }

    #[test]
    fn every_error_names_a_command_that_helps() {
        for (failure, named, command) in [
            (
                CliError::NotFound(
                    "topic `a` does not exist; create it with `headwater topic create a`"
                        .to_owned(),
                ),
                named(&["produce"], Some("a"), None),
                "headwater topic create a",
            ),
            (
                CliError::NotFound("topic `a` has no group `g`".to_owned()),
                named(&["group", "describe"], Some("a b"), None),
                "headwater group list 'a b'",
            ),
            (
                CliError::usage("no"),
                named(&["dlq", "purge"], None, None),
                "headwater dlq purge --help",
            ),
            (
                CliError::new("not quarantined"),
                named(&["issue", "release"], None, Some("7")),
                "headwater issue why 7",
            ),
            (
                CliError::Unreachable("gone".to_owned()),
                named(&["tail"], None, None),
                "headwater doctor",
            ),
            (CliError::new("odd"), named(&["bench"], None, None), "headwater doctor"),
        ] {
            assert_eq!(command_that_helps(&failure, &failure.to_string(), &named), command);
        }
    }
}
