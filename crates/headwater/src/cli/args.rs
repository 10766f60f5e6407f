//! The command line: commands, and a flag for every setting.
//!
//! Upstream: the user. Downstream: `entry.rs` runs the command, `config` reads the flags. Guarantees: flags come from
//! the table of settings, so flags and settings always match. `--url`, `--json`, `--wide` and settings may precede or
//! follow the command. To add a command, add a variant to [`HeadwaterCommand`], an arm in `entry.rs` and a line in
//! `help.rs`.

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::cli;
use crate::cli::advice::NamedObjects;
use crate::cli::completion;
use crate::cli::help::{self, GLOBAL};
use crate::config::{Setting, TABLE, ValueType};

/// Durable event processing: from webhook to reply in one binary.
#[derive(Debug, Parser)]
#[command(name = "headwater", version, about, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 success, 1 failure, 2 invalid usage or setting, 3 server unreachable, 4 `doctor` found warnings."
)]
pub(crate) struct CommandLine {
    /// Read settings from this file instead of headwater.toml.
    #[arg(long, global = true, value_name = "FILE", help_heading = GLOBAL)]
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
    /// What errors refer to.
    pub(crate) named: NamedObjects,
}

/// Parses the command line.
pub(crate) fn parse(
    arguments: impl IntoIterator<Item = std::ffi::OsString>,
) -> Result<ParsedCommandLine, clap::Error> {
    let matches = definition().try_get_matches_from(arguments)?;
    let path = path(&matches);
    let innermost = innermost(&matches);
    for option in help::missing_options(&path.join(" ")) {
        // An option that the command defines itself is its own.
        let is_given = innermost.try_contains_id(option).is_ok()
            && innermost.value_source(option) == Some(ValueSource::CommandLine);
        if is_given {
            let message = format!("unexpected argument '--{option}' found");
            return Err(with_command(&path, |command| {
                command.error(ErrorKind::UnknownArgument, message)
            }));
        }
    }
    let word = |name: &str| {
        let mut words = innermost.try_get_raw(name).ok().flatten()?;
        words.next().map(|word| word.to_string_lossy().into_owned())
    };
    let is_topic = path.first().is_some_and(|verb| verb == "topic");
    let topic = if is_topic { word("name") } else { word("topic") };
    let named = NamedObjects { path, topic, id: word("id") };
    let line = CommandLine::from_arg_matches(&matches)?;
    Ok(ParsedCommandLine { line, flags: flags(innermost), named })
}

/// Names of the command and its subcommands among words that could not be parsed.
pub(crate) fn path_of(words: impl IntoIterator<Item = String>) -> Vec<String> {
    let definition = definition();
    let (mut command, mut path) = (&definition, Vec::new());
    for word in words {
        if let Some(below) = command.find_subcommand(&word) {
            (command, path) = (below, [path, vec![word]].concat());
        }
    }
    path
}

/// Usage of a command, for usage errors.
pub(crate) fn usage(path: &[String]) -> String {
    with_command(path, |command| command.render_usage().to_string())
}

/// Calls `use_it` with the definition of a command.
fn with_command<T>(path: &[String], use_it: impl FnOnce(&mut Command) -> T) -> T {
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
    use_it(verb)
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

/// Global flags may precede or follow the command; clap propagates them to the innermost one.
fn innermost(matches: &ArgMatches) -> &ArgMatches {
    let mut matches = matches;
    while let Some((_, below)) = matches.subcommand() {
        matches = below;
    }
    matches
}

/// All commands and flags; also used for completions.
pub(crate) fn definition() -> Command {
    let mut command = CommandLine::command();
    // Each command with a server shows these options; here they may precede the command.
    let connection = cli::ConnectionArgs::augment_args(Command::new("connection"));
    for option in connection.get_arguments() {
        command = command.arg(option.clone().hide(true));
    }
    for setting in settings() {
        command = command.arg(setting_argument(setting).hide_short_help(true));
    }
    for verb in help::VERBS {
        let path: Vec<&str> = verb.verb.split(' ').collect();
        command = complete(command, &path, verb);
    }
    command
}

/// Adds examples and settings to the command at `path`. A command that is not built in is skipped.
fn complete(command: Command, path: &[&str], verb: &help::VerbHelp) -> Command {
    match path.split_first() {
        Some((name, rest)) if command.find_subcommand(name).is_some() => {
            command.mut_subcommand(name, |below| complete(below, rest, verb))
        }
        Some(_) => command,
        None => {
            let shown = settings().filter(|setting| verb.settings.contains(&setting.name));
            let command =
                shown.fold(command, |command, setting| command.arg(setting_argument(setting)));
            let command = command.mut_args(|argument| completion::with_names(verb.verb, argument));
            command.after_help(help::examples(verb))
        }
    }
}

/// The settings with a flag.
fn settings() -> impl Iterator<Item = &'static Setting> {
    TABLE.iter().filter(|setting| !matches!(setting.value_type, ValueType::Secret))
}

fn setting_argument(setting: &'static Setting) -> Arg {
    let default = match setting.default {
        "" => String::new(),
        default => format!(" [default: {default}]"),
    };
    Arg::new(setting.name)
        .long(setting.flag())
        .global(true)
        .value_name("VALUE")
        .help_heading(GLOBAL)
        .help(format!("{}{default}", setting.description))
}

fn flags(matches: &ArgMatches) -> Vec<(&'static str, String)> {
    settings()
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

    /// Calls `check` with every command that does something, and its words.
    fn each_verb(check: &mut dyn FnMut(&str, &mut Command)) {
        fn walk(path: &str, command: &mut Command, check: &mut dyn FnMut(&str, &mut Command)) {
            // `audit` alone is `audit books`.
            if !command.has_subcommands() {
                check(path.trim_start(), command);
            }
            for below in command.get_subcommands_mut().filter(|below| below.get_name() != "help") {
                walk(&format!("{path} {}", below.get_name()), below, check);
            }
        }
        let mut command = definition();
        command.build();
        walk("", &mut command, check);
    }

    #[test]
    fn the_definition_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn global_flags_may_precede_or_follow_the_command() {
        for words in [
            ["headwater", "serve", "--http-listen", "127.0.0.1:0"],
            ["headwater", "--http-listen", "127.0.0.1:0", "serve"],
            ["headwater", "topic", "list", "--http-listen=127.0.0.1:0"],
        ] {
            let parsed = parse_args(&words).unwrap();
            assert_eq!(parsed.flags, [("http.listen", "127.0.0.1:0".to_owned())]);
        }
        for words in [
            ["headwater", "--url", "http://a", "--json", "topic", "list"],
            ["headwater", "topic", "--url", "http://a", "--json", "list"],
            ["headwater", "topic", "list", "--url", "http://a", "--json"],
        ] {
            let line = format!("{:?}", parse_args(&words).unwrap().line);
            assert!(line.contains("url: Some(\"http://a\"), json: true"), "{words:?}: {line}");
        }
    }

    #[test]
    fn connection_options_are_refused_where_they_have_no_effect() {
        for words in [
            &["headwater", "--url", "http://a", "serve"][..],
            &["headwater", "worker", "--json"],
            &["headwater", "migrate", "--wide"],
            &["headwater", "--url", "http://a", "config"],
        ] {
            let error = parse_args(words).expect_err("the option has no effect");
            assert!(error.to_string().contains("unexpected argument"), "{error}");
        }
        for words in
            [&["headwater", "--json", "config"][..], &["headwater", "bench", "produce", "--json"]]
        {
            parse_args(words).unwrap();
        }
    }

    #[test]
    fn every_command_has_an_example_that_parses() {
        each_verb(&mut |path, _| {
            let verb = help::VERBS.iter().find(|verb| verb.verb == path);
            let verb = verb.unwrap_or_else(|| panic!("`{path}` has no examples"));
            assert!(!verb.examples.is_empty(), "{path}");
            for example in verb.examples {
                assert!(example.starts_with(path), "{example}");
                let words = example.split(" > ").next().unwrap_or_default();
                let words = shell_words(words);
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                parse_args(&[&["headwater"][..], &words].concat())
                    .unwrap_or_else(|error| panic!("{example}: {error}"));
            }
        });
    }

    /// The words of a shell line with single quotes.
    fn shell_words(line: &str) -> Vec<String> {
        let parts = line.split('\'').enumerate();
        let words = parts.flat_map(|(number, part)| match number % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        });
        words.collect()
    }

    #[test]
    fn every_argument_is_described() {
        each_verb(&mut |path, command| {
            for argument in command.get_arguments() {
                let described = argument.get_help().map(ToString::to_string).unwrap_or_default();
                assert!(!described.is_empty(), "`{path}`: {}", argument.get_id());
            }
        });
    }

    #[test]
    fn the_short_help_shows_only_settings_that_matter() {
        each_verb(&mut |path, command| {
            let help = command.render_help().to_string();
            assert!(help.lines().count() <= 50, "{help}");
            let shows = |flag: &str| help.contains(&format!("  --{flag} "));
            assert_eq!(shows("http-listen"), path == "serve", "{help}");
            assert_eq!(shows("worker-listen"), path == "worker", "{help}");
            // Own options come first.
            let own = help.find("\nOptions:").unwrap_or(0);
            let global = help.find(&format!("\n{GLOBAL}:"));
            assert!(global.is_none_or(|global| own < global), "{help}");
        });
    }

    #[test]
    fn the_command_is_found_among_invalid_words() {
        let path = |line: &str| path_of(line.split(' ').map(str::to_owned)).join(" ");
        assert_eq!(
            path("headwater --url http://a topic create x --partitions many"),
            "topic create"
        );
        assert_eq!(path("headwater tail topic --from now"), "tail");
        assert_eq!(path("headwater topic cretae"), "topic");
    }

    #[test]
    fn unknown_commands_and_flags_are_usage_errors() {
        for words in [&["headwater", "sevre"][..], &["headwater", "serve", "--http-listne", "a"]] {
            assert_eq!(parse_args(words).expect_err("the arguments are invalid").exit_code(), 2);
        }
    }
}
