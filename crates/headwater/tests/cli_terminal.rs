//! What a person sees on a terminal: wrapped text, tables, colours and progress; what a pipe gets instead.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use console::{measure_text_width, strip_ansi_codes};
use headwater_testkit::wait_until;
use serde_json::Value;

use crate::support::cli::CliFixture;
use crate::support::pty::{on_terminal, on_terminal_until};
use crate::support::{LIMIT, ServerDir, text};

/// Output of a command on a terminal with this many columns.
fn shown(cli: &CliFixture, verb: &[&str], columns: u16) -> String {
    let to: Vec<&str> = cli.args.iter().map(String::as_str).collect();
    let mut command = cli.dir.command(&[verb, &to].concat());
    command.env_remove("NO_COLOR");
    on_terminal(command, columns)
}

fn is_json(line: &str) -> bool {
    serde_json::from_str::<Value>(line).is_ok_and(|value| value.is_object())
}

const LONG: &str = "The printer on the third floor has printed only every second page since the last update, and \
    nobody in the office can find the page that says how to reset it without losing the queue.";

#[test]
fn a_ticket_is_shown_as_a_conversation_wrapped_to_the_terminal() {
    let cli = CliFixture::embedded();
    let words = ["ticket", "new", "--title", "Printer", "--content", LONG, "--user", "ada"];
    let ticket = cli.json(&words)[0]["ticket_id"].as_str().unwrap().to_owned();

    let printed = shown(&cli, &["ticket", "show", &ticket], 60);
    let printed = strip_ansi_codes(&printed);
    let widest = printed.lines().map(measure_text_width).max().unwrap();
    assert!(widest <= 60, "{widest} columns:\n{printed}");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&printed).contains(&words(LONG)), "nothing is cut:\n{printed}");
    for part in ["Printer\n", "\nuser  20", "\nopen; no answer yet: "] {
        assert!(printed.contains(part), "lacks {part:?}:\n{printed}");
    }
    assert!(words(&printed).contains(", user ada, opened 20"), "{printed}");

    // Not wrapped: with --wide, and in a pipe.
    let wide = shown(&cli, &["ticket", "show", &ticket, "--wide"], 60);
    assert!(wide.contains(LONG), "{wide}");
    assert!(cli.stdout(&["ticket", "show", &ticket]).contains(&format!("\n  {LONG}\n")));

    // A message of an agent hands the ticket over; the beginning of its id is enough.
    let start = &ticket[..8];
    let answer = cli.stdout(&["ticket", "reply", start, "--content", "first line\n\nsecond line"]);
    assert_eq!(answer, format!("added a message of the agent to ticket {ticket}\n"));
    let printed = cli.stdout(&["ticket", "show", start]);
    assert!(printed.contains("\n  first line\n\n  second line\n"), "{printed}");
    assert!(printed.contains("handed over to a person"), "{printed}");
    assert_eq!(cli.stdout(&["ticket", "close", start]), format!("closed ticket {ticket}\n"));
    assert_eq!(
        cli.stdout(&["ticket", "close", start]),
        format!("ticket {ticket} is already closed\n")
    );
    let printed = cli.stdout(&["ticket", "show", start]);
    assert!(printed.lines().last().unwrap().starts_with("closed 20"), "{printed}");
    assert_eq!(cli.stdout(&["ticket", "reopen", start]), format!("reopened ticket {ticket}\n"));
}

#[test]
fn colours_are_used_on_a_terminal_unless_no_color_is_set() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "orders"]);
    let coloured = shown(&cli, &["topic", "list"], 80);
    assert!(coloured.contains("\u{1b}[1mNAME"), "{coloured:?}");
    let to: Vec<&str> = cli.args.iter().map(String::as_str).collect();
    for verb in [&["topic", "list"][..], &["topic", "describe", "nothing"]] {
        let mut command = cli.dir.command(&[verb, &to].concat());
        command.env("NO_COLOR", "1");
        let plain = on_terminal(command, 80);
        assert!(!plain.contains("\u{1b}["), "{plain:?}");
    }
    let failed = shown(&cli, &["topic", "describe", "nothing"], 80);
    assert!(failed.contains("\u{1b}[31m"), "{failed:?}");
    assert!(!cli.stdout(&["topic", "list"]).contains('\u{1b}'));
}

#[test]
fn messages_are_rows_on_a_terminal_and_json_otherwise() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "orders"]);
    cli.json(&["produce", "orders", "--key", "ada", "--payload", LONG]);
    let tail = ["tail", "orders", "--from", "5m", "--count", "1"];
    let consume =
        |group| ["consume", "orders", "--group", group, "--count", "1", "--timeout", "90s"];
    for (verb, again) in [(&tail[..], &tail[..]), (&consume("a"), &consume("b"))] {
        let printed = shown(&cli, verb, 70);
        let printed = strip_ansi_codes(&printed);
        let lines: Vec<&str> = printed.lines().collect();
        assert!(lines[0].starts_with("ID") && lines[0].ends_with("PAYLOAD"), "{printed}");
        assert!(lines[1].contains("  ada  ") && lines[1].contains("The printer"), "{printed}");
        assert!(measure_text_width(lines[1]) <= 70 && lines[1].ends_with('…'), "{printed}");
        let asked = shown(&cli, &[again, &["--json"]].concat(), 70);
        assert!(asked.lines().any(is_json), "{asked}");
    }
    let piped = cli.stdout(&tail);
    assert!(is_json(piped.trim()), "{piped}");
    // What a reader looks for comes first.
    assert!(piped.starts_with("{\"id\":"), "{piped}");
}

#[test]
fn a_benchmark_is_a_table_on_a_terminal_and_json_otherwise() {
    let cli = CliFixture::embedded();
    let verb = ["bench", "produce", "--count", "100", "--payload-bytes", "1KiB"];
    let printed = shown(&cli, &verb, 120);
    let printed = strip_ansi_codes(&printed);
    let table = printed.find("WORKLOAD").unwrap_or_else(|| panic!("{printed}"));
    for part in ["embedded", "1 KiB", " s ", "/s"] {
        assert!(printed[table..].contains(part), "lacks {part:?}: {printed}");
    }
    let piped = cli.stdout(&verb);
    assert!(piped.starts_with("{\"workload\":\"produce\",\"backend\":\"embedded\""), "{piped}");
}

#[test]
fn top_redraws_a_screen_of_its_own_until_it_is_interrupted() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "orders"]);
    cli.json(&["produce", "orders", "--payload", "x"]);
    let to: Vec<&str> = cli.args.iter().map(String::as_str).collect();
    let command = cli.dir.command(&[&["top", "--every", "100ms"][..], &to].concat());
    let parts = ["\u{1b}[?1049h", "issues ", "TOPIC", "orders "];
    let printed = on_terminal_until(command, 70, Some(&parts));
    // The former content of the terminal and the cursor are back.
    assert!(printed.ends_with("\u{1b}[?25h\u{1b}[?1049l"), "{printed:?}");
    let frame = printed.split("\u{1b}[H\u{1b}[J").nth(1).unwrap();
    let widest = strip_ansi_codes(frame).lines().map(measure_text_width).max().unwrap();
    assert!(widest <= 70, "{widest} columns:\n{frame}");
}

#[test]
fn work_over_a_second_shows_that_it_goes_on() {
    let cli = CliFixture::embedded();
    cli.json(&["topic", "create", "orders"]);
    let printed = shown(&cli, &["topic", "grow", "orders", "--partitions", "2"], 120);
    assert!(
        printed.contains("growing topic `orders` until every producer knows of it"),
        "{printed}"
    );
    assert!(printed.ends_with("topic `orders` has 2 partitions\n"), "{printed}");
    let quick = shown(&cli, &["topic", "describe", "orders"], 120);
    assert!(!quick.contains("so far"), "{quick}");
}

#[test]
fn help_shows_own_options_first_with_an_example() {
    let dir = ServerDir::new().unwrap();
    for (verb, has, lacks) in [
        (&["worker"][..], &["--worker-listen", "--worker-concurrency"][..], &["--http-listen"][..]),
        (&["serve"], &["--http-listen", "--demo"], &["--worker-listen", "--url"]),
        (
            &["topic", "create"],
            &["--partitions", "--stream-url", "--url"],
            &["--http-listen", "--database-url"],
        ),
        (
            &["ticket", "show"],
            &["--messages", "--database-url"],
            &["--http-listen", "--stream-url"],
        ),
    ] {
        let output = dir.run(&[verb, &["-h"]].concat()).unwrap();
        let help = text(&output.stdout);
        let place = |flag: &str| help.find(&format!(" {flag} "));
        for flag in has {
            assert!(place(flag).is_some(), "{verb:?} lacks {flag}:\n{help}");
        }
        for flag in lacks {
            assert!(place(flag).is_none(), "{verb:?} has {flag}:\n{help}");
        }
        let example = format!("  headwater {}", verb.join(" "));
        assert!(help.contains("Example") && help.contains(&example), "{help}");
        if verb == ["topic", "create"] {
            assert!(place("--partitions") < help.find("Global options:"), "{help}");
            assert!(help.find("Global options:") < place("--url"), "{help}");
        }
    }
}

#[test]
fn completions_are_small_and_complete_names() {
    let cli = CliFixture::embedded();
    for shell in ["bash", "zsh", "fish"] {
        let output = cli.dir.run(&["completion", shell]).unwrap();
        assert!(output.status.success());
        assert!((100..5000).contains(&output.stdout.len()), "{shell}: {}", output.stdout.len());
    }
    cli.json(&["topic", "create", "orders"]);
    cli.json(&["topic", "create", "refunds"]);
    cli.json(&["produce", "orders", "--payload", "x"]);
    cli.json(&["consume", "orders", "--group", "baristas", "--count", "1", "--timeout", "90s"]);
    let words = ["ticket", "new", "--title", "Printer", "--content", "It is slow."];
    let ticket = cli.json(&words)[0]["ticket_id"].as_str().unwrap().to_owned();

    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_headwater"));
    let path = std::env::join_paths(
        std::iter::once(binary.parent().unwrap().to_owned())
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    let path = path.unwrap();
    let complete = |line: &str| {
        let words =
            format!("{line} --stream-url embedded:streams --database-url sqlite:headwater.db");
        let count = line.split(' ').count() - 1;
        let last = line.rsplit(' ').next().unwrap();
        let script = format!(
            "source <(headwater completion bash); COMP_WORDS=({}); COMP_CWORD={count}; \
             _clap_complete_headwater headwater '{last}'; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            if last.is_empty() { words.replacen("  ", " '' ", 1) } else { words }
        );
        let mut bash = std::process::Command::new("bash");
        bash.args(["-c", &script]).env("PATH", &path).current_dir(cli.dir.path());
        let output = bash.output().unwrap();
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        text(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    // A busy machine may need longer than a person would wait for names.
    let mut offered = Vec::new();
    let until = |line: &str, expected: &[&str], offered: &mut Vec<String>| {
        let waited = wait_until(line, LIMIT, || {
            *offered = complete(line);
            offered.starts_with(&expected.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
        });
        waited.unwrap_or_else(|_| panic!("{line}: {offered:?}"));
    };
    until("headwater topic describe ", &["orders", "refunds"], &mut offered);
    assert!(offered.contains(&"--stream-url".to_owned()), "{offered:?}");
    assert!(!offered.contains(&"--http-listen".to_owned()), "{offered:?}");
    until("headwater tail ord", &["orders"], &mut offered);
    until("headwater group describe orders bar", &["baristas"], &mut offered);
    until("headwater consume orders --group ", &["baristas"], &mut offered);
    until(&format!("headwater ticket show {}", &ticket[..4]), &[&ticket], &mut offered);
    assert!(complete("headwater topic al").contains(&"alter".to_owned()));
    assert!(complete("headwater topic create --ret").contains(&"--retention-age".to_owned()));
}
