//! The command line: verbs, and a flag for every setting.
//!
//! Upstream: the user. Downstream: `command` runs a verb, `settings` reads the flags.
//! Promises: flags of settings come from the table of settings, so there is none without a name in the file and none
//! forgotten. A new verb is a new line of [`Verb`] and a new arm in `command`.

use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::cli;
use crate::config::{Kind, TABLE};

/// Settings that `-h` shows; `--help` shows all of them.
const IN_SHORT_HELP: [&str; 3] = ["stream.url", "database.url", "http.listen"];

/// Durable event processing: from webhook to reply in one binary.
#[derive(Debug, Parser)]
#[command(name = "headwater", version, about, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage or setting, 3 a server cannot be reached, 4 `doctor` has warnings."
)]
pub(crate) struct CommandLine {
    /// Read settings from this file instead of headwater.toml.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) settings: Option<std::path::PathBuf>,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Run everything in one process: HTTP, webhooks, workers, sweeper, outbox.
    Serve(Serve),
    /// Run a worker without HTTP, but for health and metrics, beside other processes on the same Redis and Postgres.
    Worker,
    /// Print each setting and where it came from.
    Config(Config),
    #[command(flatten)]
    Operator(Box<cli::Verb>),
    // More verbs go here.
}

/// How to serve.
#[derive(Debug, clap::Args)]
pub(crate) struct Serve {
    /// Open a few tickets, send a signed webhook to itself, tell what happened, and go on serving.
    #[arg(long)]
    pub(crate) demo: bool,
    /// Stop after the demo instead of going on.
    #[arg(long, requires = "demo")]
    pub(crate) demo_exit: bool,
}

/// How to print settings.
#[derive(Debug, clap::Args)]
pub(crate) struct Config {
    /// As JSON.
    #[arg(long, conflicts_with = "markdown")]
    pub(crate) json: bool,
    /// As the page of the documentation.
    #[arg(long)]
    pub(crate) markdown: bool,
}

/// The command line with the values of its flags for settings.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) line: CommandLine,
    pub(crate) flags: Vec<(&'static str, String)>,
    /// The names of the verb, from the outside in.
    pub(crate) path: Vec<String>,
}

/// Reads the command line.
pub(crate) fn parse(
    arguments: impl IntoIterator<Item = std::ffi::OsString>,
) -> Result<Parsed, clap::Error> {
    let matches = definition().try_get_matches_from(arguments)?;
    let line = CommandLine::from_arg_matches(&matches)?;
    Ok(Parsed { line, flags: flags(&matches), path: path(&matches) })
}

/// How a verb is used, for whoever used it wrongly.
pub(crate) fn usage(path: &[String]) -> String {
    let mut command = definition();
    // Gives the verbs their full names.
    command.build();
    let mut verb = &mut command;
    for name in path {
        // What was parsed has a definition.
        if verb.find_subcommand(name).is_none() {
            break;
        }
        verb = verb.find_subcommand_mut(name).expect("it was there a moment ago");
    }
    format!("{}\n\nFor more information, try '--help'.", verb.render_usage())
}

fn path(matches: &ArgMatches) -> Vec<String> {
    let mut matches = matches;
    let mut path = Vec::new();
    while let Some((name, below)) = matches.subcommand() {
        path.push(name.to_owned());
        matches = below;
    }
    path
}

/// Verbs and flags together; for completions, too.
pub(crate) fn definition() -> Command {
    let mut command = CommandLine::command();
    for setting in TABLE.iter().filter(|setting| !matches!(setting.kind, Kind::Secret)) {
        let default = match setting.default {
            "" => String::new(),
            default => format!(" [default: {default}]"),
        };
        let argument = Arg::new(setting.name)
            .long(setting.flag())
            .global(true)
            .value_name("VALUE")
            .help_heading("Settings")
            .hide_short_help(!IN_SHORT_HELP.contains(&setting.name))
            .help(format!("{}{default}", setting.meaning));
        command = command.arg(argument);
    }
    command
}

/// Flags are global, so each may stand before or after the verb; clap gives the deepest one to all.
fn flags(matches: &ArgMatches) -> Vec<(&'static str, String)> {
    let mut matches = matches;
    while let Some((_, below)) = matches.subcommand() {
        matches = below;
    }
    let given = TABLE.iter().filter(|setting| !matches!(setting.kind, Kind::Secret));
    given
        .filter_map(|setting| {
            let value = matches.get_one::<String>(setting.name)?;
            Some((setting.name, value.clone()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(words: &[&str]) -> Result<Parsed, clap::Error> {
        parse(words.iter().map(Into::into))
    }

    #[test]
    fn the_definition_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn flags_of_settings_may_stand_before_and_after_the_verb() {
        for words in [
            ["headwater", "serve", "--http-listen", "127.0.0.1:0"],
            ["headwater", "--http-listen", "127.0.0.1:0", "serve"],
            ["headwater", "topic", "list", "--http-listen=127.0.0.1:0"],
        ] {
            let parsed = parse_words(&words).unwrap();
            assert_eq!(parsed.flags, [("http.listen", "127.0.0.1:0".to_owned())]);
        }
    }

    #[test]
    fn the_short_help_of_every_verb_fits_on_a_screen() {
        fn check(command: &mut Command) {
            let help = command.render_help().to_string();
            let lines = help.lines().count();
            assert!(lines <= 50, "{lines} lines:\n{help}");
            command.get_subcommands_mut().for_each(check);
        }
        let mut command = definition();
        command.build();
        check(&mut command);
    }

    #[test]
    fn what_nobody_knows_is_wrong_usage() {
        for words in [&["headwater", "sevre"][..], &["headwater", "serve", "--http-listne", "a"]] {
            assert_eq!(parse_words(words).expect_err("it is wrong").exit_code(), 2);
        }
    }
}
