//! The command line: commands, and a flag for every setting.
//!
//! Upstream: the user. Downstream: `entry.rs` runs the command, `config` reads the flags. Guarantees: flags come from
//! the table of settings, so flags and settings always match. To add a command, add a variant to [`HeadwaterCommand`]
//! and an arm in `entry.rs`.

use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::cli;
use crate::config::{TABLE, ValueType};

/// Settings shown by `-h`; `--help` shows all.
const IN_SHORT_HELP: [&str; 3] = ["stream.url", "database.url", "http.listen"];

/// Durable event processing: from webhook to reply in one binary.
#[derive(Debug, Parser)]
#[command(name = "headwater", version, about, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 success, 1 failure, 2 invalid usage or setting, 3 server unreachable, 4 `doctor` found warnings."
)]
pub(crate) struct CommandLine {
    /// Read settings from this file instead of headwater.toml.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) settings: Option<std::path::PathBuf>,
    #[command(subcommand)]
    pub(crate) verb: HeadwaterCommand,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum HeadwaterCommand {
    /// Run everything in one process: HTTP, webhooks, workers, sweeper, outbox.
    Serve(ServeArgs),
    /// Run only a worker, with health and metrics, next to other processes on the same Redis and PostgreSQL.
    Worker,
    /// Print each setting and its source.
    Config(ConfigArgs),
    #[command(flatten)]
    Operator(Box<cli::OperatorCommand>),
}

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// Open tickets and send a signed webhook to this server, print each step, then keep serving.
    #[arg(long)]
    pub(crate) demo: bool,
    /// Exit after the demo.
    #[arg(long, requires = "demo")]
    pub(crate) demo_exit: bool,
}

/// Arguments of `config`.
#[derive(Debug, clap::Args)]
pub(crate) struct ConfigArgs {
    /// Print JSON.
    #[arg(long, conflicts_with = "markdown")]
    pub(crate) json: bool,
    /// Print the documentation page.
    #[arg(long)]
    pub(crate) markdown: bool,
}

/// The parsed command line with its setting flags.
#[derive(Debug)]
pub(crate) struct ParsedCommandLine {
    pub(crate) line: CommandLine,
    pub(crate) flags: Vec<(&'static str, String)>,
    /// Names of the command and its subcommands.
    pub(crate) path: Vec<String>,
}

/// Parses the command line.
pub(crate) fn parse(
    arguments: impl IntoIterator<Item = std::ffi::OsString>,
) -> Result<ParsedCommandLine, clap::Error> {
    let matches = definition().try_get_matches_from(arguments)?;
    let line = CommandLine::from_arg_matches(&matches)?;
    Ok(ParsedCommandLine { line, flags: flags(&matches), path: path(&matches) })
}

/// Usage of a command, for usage errors.
pub(crate) fn usage(path: &[String]) -> String {
    let mut command = definition();
    // Sets the full names of subcommands.
    command.build();
    let mut verb = &mut command;
    for name in path {
        // A parsed command is always defined.
        if verb.find_subcommand(name).is_none() {
            break;
        }
        verb = verb.find_subcommand_mut(name).expect("checked above");
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

/// All commands and flags; also used for completions.
pub(crate) fn definition() -> Command {
    let mut command = CommandLine::command();
    for setting in TABLE.iter().filter(|setting| !matches!(setting.value_type, ValueType::Secret)) {
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
            .help(format!("{}{default}", setting.description));
        command = command.arg(argument);
    }
    command
}

/// Flags are global and may precede or follow the command; clap propagates them to the innermost one.
fn flags(matches: &ArgMatches) -> Vec<(&'static str, String)> {
    let mut matches = matches;
    while let Some((_, below)) = matches.subcommand() {
        matches = below;
    }
    let given = TABLE.iter().filter(|setting| !matches!(setting.value_type, ValueType::Secret));
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

    fn parse_args(words: &[&str]) -> Result<ParsedCommandLine, clap::Error> {
        parse(words.iter().map(Into::into))
    }

    #[test]
    fn the_definition_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn setting_flags_may_precede_or_follow_the_command() {
        for words in [
            ["headwater", "serve", "--http-listen", "127.0.0.1:0"],
            ["headwater", "--http-listen", "127.0.0.1:0", "serve"],
            ["headwater", "topic", "list", "--http-listen=127.0.0.1:0"],
        ] {
            let parsed = parse_args(&words).unwrap();
            assert_eq!(parsed.flags, [("http.listen", "127.0.0.1:0".to_owned())]);
        }
    }

    #[test]
    fn the_short_help_of_every_command_fits_on_a_screen() {
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
    fn unknown_commands_and_flags_are_usage_errors() {
        for words in [&["headwater", "sevre"][..], &["headwater", "serve", "--http-listne", "a"]] {
            assert_eq!(parse_args(words).expect_err("the arguments are invalid").exit_code(), 2);
        }
    }
}
