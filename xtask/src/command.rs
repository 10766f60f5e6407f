//! The command line: parses arguments into a command.

use crate::exit::{ExitError, USAGE};

pub(crate) const HELP: &str = "\
Usage: cargo xtask <command>

  test [-- ARGS]       install missing tools, then run all checks and tests;
                       ARGS go to `cargo nextest run`
  demo [--analytics] [-- ARGS]
                       build and run the demo, which needs no server; with reports
                       on request, which take as long to build as all the rest
  bench [-- ARGS]      run the benchmarks; ARGS go to the benchmark
  bench console [--quick] [--only NAME]
                       measure the web console in a browser; with --quick on little data and
                       a debug build, to see that it works; with --only the tests with NAME
                       in their names, such as sqlite, postgres, browser or issue_runs
  chaos [--minutes N]  run the crash and differential tests with N times the work,
                       stopped after N minutes (default 10)
  screenshots          write the pictures of the documentation (docs/images): the demo in a
                       browser
  tidy                 check what the compiler cannot: paths, sizes, type names, crate order, layout
  lines                count the lines of product code, per crate
  setup                install the tools that the tests need
  help                 print this list

Builds share one cache between checkouts: $CARGO_TARGET_DIR if it is set, else
headwater/target below $XDG_CACHE_HOME or ~/.cache.
";

const CHAOS_MINUTES_DEFAULT: u32 = 10;
const CHAOS_MINUTES_MAX: u32 = 24 * 60;

/// A command of xtask.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum XtaskCommand {
    Help,
    Setup,
    Test { nextest_arguments: Vec<String> },
    Tidy,
    Lines,
    Demo { analytics: bool, arguments: Vec<String> },
    Bench { arguments: Vec<String> },
    BenchConsole { quick: bool, only: Option<String> },
    Chaos { minutes: u32 },
    Screenshots,
}

impl XtaskCommand {
    pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Self, ExitError> {
        let mut arguments = arguments.into_iter();
        let Some(name) = arguments.next() else { return Ok(Self::Help) };
        let rest: Vec<String> = arguments.collect();

        if rest.first().is_some_and(|first| is_help(first)) {
            return Ok(Self::Help);
        }
        match name.as_str() {
            name if is_help(name) => Ok(Self::Help),
            "setup" => without_arguments(Self::Setup, &rest),
            "tidy" => without_arguments(Self::Tidy, &rest),
            "lines" => without_arguments(Self::Lines, &rest),
            "screenshots" => without_arguments(Self::Screenshots, &rest),
            "test" => Ok(Self::Test { nextest_arguments: passed_on(rest)? }),
            "demo" => {
                let (analytics, rest) = demo_flag(rest);
                Ok(Self::Demo { analytics, arguments: passed_on(rest)? })
            }
            "bench" if rest.first().is_some_and(|first| first == "console") => {
                bench_console(&rest[1..])
            }
            "bench" => Ok(Self::Bench { arguments: passed_on(rest)? }),
            "chaos" => Ok(Self::Chaos { minutes: minutes(&rest)? }),
            unknown => Err(usage(&format!("unknown command `{unknown}`"))),
        }
    }
}

fn is_help(argument: &str) -> bool {
    matches!(argument, "help" | "--help" | "-h")
}

fn usage(message: &str) -> ExitError {
    ExitError::with_code(format!("{message}; `cargo xtask help` lists the commands"), USAGE)
}

fn without_arguments(command: XtaskCommand, rest: &[String]) -> Result<XtaskCommand, ExitError> {
    match rest.first() {
        None => Ok(command),
        Some(first) => {
            Err(usage(&format!("unexpected argument `{first}`: the command takes no arguments")))
        }
    }
}

/// Whether the demo has analytics, and the other arguments.
fn demo_flag(mut rest: Vec<String>) -> (bool, Vec<String>) {
    let analytics = rest.first().is_some_and(|first| first == "--analytics");
    if analytics {
        rest.remove(0);
    }
    (analytics, rest)
}

/// The arguments after `--`, passed on to the program.
fn passed_on(mut rest: Vec<String>) -> Result<Vec<String>, ExitError> {
    match rest.first().map(String::as_str) {
        None => Ok(rest),
        Some("--") => {
            rest.remove(0);
            Ok(rest)
        }
        Some(first) => Err(usage(&format!(
            "unexpected argument `{first}`: arguments to pass on come after `--`"
        ))),
    }
}

/// Which tests of the console run, and whether on little data.
fn bench_console(mut rest: &[String]) -> Result<XtaskCommand, ExitError> {
    let (mut quick, mut only) = (false, None);
    loop {
        rest = match rest {
            [] => return Ok(XtaskCommand::BenchConsole { quick, only }),
            [flag, rest @ ..] if flag == "--quick" => {
                quick = true;
                rest
            }
            // The name becomes part of a filter expression.
            [flag, name, rest @ ..] if flag == "--only" && is_name(name) => {
                only = Some(name.clone());
                rest
            }
            [other, ..] => {
                let expected = "`--quick` and `--only NAME`, a part of the name of a test";
                return Err(usage(&format!("unexpected argument `{other}`: only {expected}")));
            }
        };
    }
}

/// Whether a text can be part of the name of a test.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn minutes(rest: &[String]) -> Result<u32, ExitError> {
    let value = match rest {
        [] => return Ok(CHAOS_MINUTES_DEFAULT),
        [flag, value] if flag == "--minutes" => value,
        _ => return Err(usage("chaos takes only `--minutes N`")),
    };
    match value.parse() {
        Ok(minutes) if (1..=CHAOS_MINUTES_MAX).contains(&minutes) => Ok(minutes),
        _ => Err(usage(&format!("invalid minutes `{value}`; 1 to {CHAOS_MINUTES_MAX}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<XtaskCommand, ExitError> {
        XtaskCommand::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn nothing_and_every_spelling_of_help_show_the_list() {
        for line in ["", "help", "--help", "-h", "test --help"] {
            assert_eq!(parse(line), Ok(XtaskCommand::Help), "for `{line}`");
        }
    }

    #[test]
    fn every_command_of_the_list_is_understood() {
        let commands = HELP.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
        for name in commands.filter(|name| !name.is_empty()) {
            assert!(parse(name).is_ok(), "`{name}` is in the list");
        }
    }

    #[test]
    fn what_stands_after_two_dashes_is_passed_on_untouched() {
        let expected = ["-p", "headwater-stream", "--", "--nocapture"].map(str::to_owned).to_vec();
        assert_eq!(
            parse("test -- -p headwater-stream -- --nocapture"),
            Ok(XtaskCommand::Test { nextest_arguments: expected })
        );
        assert_eq!(
            parse("bench -- --help"),
            Ok(XtaskCommand::Bench { arguments: vec!["--help".to_owned()] })
        );
    }

    #[test]
    fn the_console_is_measured_on_little_or_much_data() {
        let console = |quick, only: Option<&str>| {
            Ok(XtaskCommand::BenchConsole { quick, only: only.map(str::to_owned) })
        };
        assert_eq!(parse("bench console"), console(false, None));
        assert_eq!(parse("bench console --quick"), console(true, None));
        assert_eq!(parse("bench console --only issue_runs"), console(false, Some("issue_runs")));
        assert_eq!(parse("bench console --only sqlite --quick"), console(true, Some("sqlite")));
        for line in ["--slow", "--only", "--only a) | test(b", "--quick sqlite"] {
            assert!(parse(&format!("bench console {line}")).is_err(), "`{line}`");
        }
    }

    #[test]
    fn the_demo_has_analytics_on_request() {
        let demo = |line| match parse(line) {
            Ok(XtaskCommand::Demo { analytics, arguments }) => (analytics, arguments.len()),
            other => panic!("`{line}` is {other:?}"),
        };
        assert_eq!(demo("demo"), (false, 0));
        assert_eq!(demo("demo --analytics -- --demo-exit"), (true, 1));
        assert!(parse("demo --demo-exit").is_err());
    }

    #[test]
    fn what_is_not_understood_ends_with_the_usage_code() {
        for line in ["tset", "test some_name", "tidy now", "chaos --hours 1", "chaos --minutes"] {
            assert_eq!(parse(line).unwrap_err().code, USAGE, "for `{line}`");
        }
    }

    #[test]
    fn chaos_has_a_default_and_limits() {
        assert_eq!(parse("chaos"), Ok(XtaskCommand::Chaos { minutes: CHAOS_MINUTES_DEFAULT }));
        assert_eq!(parse("chaos --minutes 3"), Ok(XtaskCommand::Chaos { minutes: 3 }));
        assert!(parse("chaos --minutes 0").is_err());
        assert!(parse("chaos --minutes 1441").is_err());
        assert!(parse("chaos --minutes ten").is_err());
    }
}
