//! Mistakes that people make on the command line. Each gives one line that says what is wrong, one that names the command
//! that helps, and the documented exit code. `docs/mistakes.md` lists them; `HEADWATER_WRITE_DOCS=1` writes it anew.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use crate::support::{Server, ServerDir, text};

/// A token without rights to change anything.
const VIEWER: &str = "viewer-token-viewer-token-viewer-token";
const ADMIN: &str = "admin-token-admin-token-admin-token-admin";

/// Where a mistake is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In a directory with the topic `orders`, its group `baristas` and a ticket.
    Data,
    /// In a directory without data.
    Empty,
    /// In a directory with this settings file.
    Settings(&'static str),
    /// On a server with tokens, with this one.
    Token(&'static str),
    /// Next to a server that has the streams open.
    InUse,
}
use Place::{Data, Empty, InUse, Settings, Token};

/// What is done with the input and output of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pipe {
    Usual,
    /// Standard output is a full disk.
    FullDisk,
    /// The reader of standard output is gone.
    Closed,
    /// These bytes on standard input.
    Input(&'static [u8]),
}
use Pipe::{Closed, FullDisk, Input, Usual};

/// What is wrong, where, the command line, its input and output, the exit code.
type Mistake = (&'static str, Place, &'static str, Pipe, i32);

#[rustfmt::skip]
const MISTAKES: &[Mistake] = &[
    // Commands and arguments.
    ("unknown command", Empty, "sevre", Usual, 2),
    ("unknown subcommand", Empty, "topic cretae orders", Usual, 2),
    ("unknown option", Empty, "topic list --limt 5", Usual, 2),
    ("missing argument", Empty, "topic create", Usual, 2),
    ("missing option", Empty, "consume orders", Usual, 2),
    ("not a number", Empty, "topic create orders --partitions many", Usual, 2),
    ("number out of range", Data, "topic create other --partitions 0", Usual, 2),
    ("unknown unit of a size", Empty, "topic create orders --byte-budget 10XB", Usual, 2),
    ("unknown unit of a duration", Empty, "produce orders --payload x --delay soon", Usual, 2),
    ("invalid date", Empty, "tail orders --from 2026-13-01", Usual, 2),
    ("unknown position", Empty, "group reset orders baristas --to yesterday", Usual, 2),
    ("invalid time", Empty, "dlq list orders --from tomorrow", Usual, 2),
    ("header without a value", Empty, "produce orders --payload x --header urgent", Usual, 2),
    ("invalid base64", Data, "produce orders --payload-base64 %%", Usual, 2),
    ("conflicting payloads", Empty, "produce orders --payload x --payload-file x.bin", Usual, 2),
    ("conflicting selection", Empty, "issue release 1 --all", Usual, 2),
    ("nothing to read", Data, "produce orders --payload-file none.bin", Usual, 2),
    ("id without a single message", Data, "produce orders --id 7", Usual, 2),
    ("nothing to consume", Empty, "consume orders --group baristas --count 0", Usual, 2),
    ("empty list", Empty, "issue list --limit 0", Usual, 2),
    ("unknown status", Empty, "issue list --status broken", Usual, 2),
    ("invalid ticket id", Empty, "ticket show seven", Usual, 2),
    ("invalid issue id", Empty, "issue show abc", Usual, 2),
    ("invalid message id", Empty, "ticket new --title t --content c --message-id 7", Usual, 2),
    ("empty title", Data, "ticket new --title '' --content c", Usual, 2),
    ("input is not text", Data, "ticket new --title t --content -", Input(b"\xff\xfe"), 1),
    ("conflicting dead letters", Data, "dlq purge orders --all --reason timeout", Usual, 2),
    ("empty name", Data, "session show ''", Usual, 2),
    ("nothing selected", Data, "dlq replay orders", Usual, 2),
    ("nothing to change", Data, "topic alter orders", Usual, 2),
    ("no confirmation", Data, "topic delete orders", Usual, 2),
    ("unknown shell", Empty, "completion tcsh", Usual, 2),
    ("conflicting formats", Empty, "report list --json --format csv", Usual, 2),
    ("chart of a query", Empty, "sql 'SELECT 1' --format svg", Usual, 2),
    ("unknown report", Empty, "report tickets-per-yaer", Usual, 2),
    ("option without effect", Empty, "--url http://127.0.0.1:8080 serve", Usual, 2),
    // Names.
    ("unknown topic", Data, "topic describe nothing", Usual, 1),
    ("misspelt topic", Data, "produce order --payload x", Usual, 1),
    ("unknown group", Data, "group describe orders nobody", Usual, 1),
    ("unknown dead letter", Data, "dlq show orders 1-1", Usual, 1),
    ("unknown ticket", Data, "ticket show 0000", Usual, 1),
    ("unknown issue", Data, "issue why 987654", Usual, 1),
    ("unknown session", Data, "session show nothing", Usual, 1),
    ("unknown outbox row", Data, "outbox retry 987654", Usual, 1),
    ("name of the server", Data, "topic create ticket_events", Usual, 1),
    // States.
    ("topic with other settings", Data, "topic create orders --partitions 5", Usual, 1),
    ("fewer partitions", Data, "topic grow orders --partitions 1", Usual, 2),
    ("issue that is not quarantined", Data, "issue release 1", Usual, 1),
    ("no database", Empty, "audit --database-url sqlite:none.db", Usual, 1),
    ("streams in use", InUse, "topic list", Usual, 1),
    // Settings.
    ("invalid address", Empty, "serve --http-listen nowhere", Usual, 2),
    ("misspelt setting", Settings("[http]\nlisten_on = \"127.0.0.1:1\"\n"), "topic list", Usual, 2),
    ("setting of the wrong type", Settings("[worker]\nconcurrency = \"many\"\n"), "topic list", Usual, 2),
    ("invalid settings file", Settings("[http\n"), "topic list", Usual, 2),
    ("missing settings file", Empty, "topic list --settings none.toml", Usual, 2),
    // Servers.
    ("wrong scheme", Empty, "topic list --url ftp://127.0.0.1", Usual, 2),
    ("missing server", Empty, "topic list --url http://127.0.0.1:1", Usual, 3),
    ("missing Redis", Empty, "topic list --stream-url redis://127.0.0.1:1", Usual, 3),
    ("missing PostgreSQL", Empty, "ticket list --database-url postgres://ada@127.0.0.1:1/none", Usual, 3),
    ("missing token", Token(""), "topic list", Usual, 1),
    ("wrong token", Token("guessed-token-guessed-token-guessed"), "topic list", Usual, 1),
    ("no permission", Token(VIEWER), "topic create more", Usual, 1),
    ("full disk", Data, "topic list", FullDisk, 1),
    ("full disk for settings", Empty, "config", FullDisk, 1),
];

struct Fixtures {
    data: ServerDir,
    empty: ServerDir,
    in_use: ServerDir,
    in_use_server: Server,
    server: Server,
    /// Deleted after its server.
    _server_dir: ServerDir,
}

impl Fixtures {
    fn new() -> Self {
        let data = ServerDir::new().unwrap();
        for words in [
            &["topic", "create", "orders", "--partitions", "2"][..],
            &["produce", "orders", "--payload", "x"],
            &["consume", "orders", "--group", "baristas", "--count", "1", "--timeout", "90s"],
            &["ticket", "new", "--title", "t", "--content", "c"],
        ] {
            let output = data.run(words).unwrap();
            assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        }
        let in_use = ServerDir::new().unwrap();
        let in_use_server = in_use.serve(&[]).unwrap();
        let token = |name: &str, role: &str, token: &str| {
            format!("[[token]]\nname = \"{name}\"\nrole = \"{role}\"\ntoken = \"{token}\"\n")
        };
        let tokens = [token("boss", "admin", ADMIN), token("reader", "read", VIEWER)].concat();
        let server_dir = ServerDir::new().unwrap().settings(&tokens).unwrap();
        let server = server_dir.serve(&[]).unwrap();
        Self {
            data,
            empty: ServerDir::new().unwrap(),
            in_use,
            in_use_server,
            server,
            _server_dir: server_dir,
        }
    }

    fn command(&self, place: Place, words: &[String]) -> (Command, Option<ServerDir>) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match place {
            Data => (self.data.command(&words), None),
            Empty => (self.empty.command(&words), None),
            InUse => (self.in_use.command(&words), None),
            Settings(settings) => {
                let dir = ServerDir::new().unwrap().settings(settings).unwrap();
                (dir.command(&words), Some(dir))
            }
            Token(token) => {
                let mut command = self.empty.command(&words);
                command.env("HEADWATER_URL", format!("http://{}", self.server.address));
                command.env("HEADWATER_TOKEN", token);
                (command, None)
            }
        }
    }

    fn run(&self, mistake: &Mistake) -> Output {
        let (_, place, line, pipe, _) = mistake;
        let (mut command, _dir) = self.command(*place, &words(line));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if *pipe == FullDisk {
            command.stdout(OpenOptions::new().write(true).open("/dev/full").unwrap());
        }
        let mut child = command.spawn().unwrap();
        let input = match pipe {
            Input(bytes) => *bytes,
            _ => &[],
        };
        let _ = child.stdin.take().unwrap().write_all(input);
        if *pipe == Closed {
            drop(child.stdout.take());
        }
        child.wait_with_output().unwrap()
    }

    /// The text without what differs from run to run.
    fn masked(&self, text: &str) -> String {
        let process = self.in_use_server.pid().to_string();
        let text = text
            .replace(&self.in_use_server.address.to_string(), "127.0.0.1:8080")
            .replace(&self.server.address.to_string(), "127.0.0.1:8080")
            .replace(&format!("process {process} "), "process 4711 ");
        text.lines().map(|line| without_cause(line) + "\n").collect()
    }
}

/// The operating system and the load of the machine decide how a connection fails.
fn without_cause(line: &str) -> String {
    let Some((start, rest)) = line.split_once(" is unreachable: ") else { return line.to_owned() };
    let advice = rest.rsplit_once("; ").map_or("", |(_, advice)| advice);
    format!("{start} is unreachable: CAUSE; {advice}")
}

/// The words of a line with single quotes.
fn words(line: &str) -> Vec<String> {
    let parts = line.split('\'').enumerate();
    let words = parts.flat_map(|(number, part)| match number % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    });
    words.collect()
}

#[test]
fn every_mistake_is_explained_with_a_command_that_helps() {
    assert!(MISTAKES.len() >= 40, "{}", MISTAKES.len());
    let fixtures = Fixtures::new();
    let mut page = String::from(
        "# Mistakes and what helps\n\n\
         What the command line says about common mistakes. Each error is one line that says what is wrong and one, after \
         `help:`, with a command that helps; invalid usage is followed by the usage. Exit codes: 1 failure, 2 invalid usage \
         or setting, 3 server unreachable.\n\n\
         This page is generated: `HEADWATER_WRITE_DOCS=1 cargo nextest run -p headwater --test cli_mistakes`.\n",
    );
    let mut problems = String::new();
    for mistake in MISTAKES {
        let (what, place, line, pipe, code) = mistake;
        let output = fixtures.run(mistake);
        let stderr = fixtures.masked(&text(&output.stderr));
        let lines: Vec<&str> = stderr.lines().filter(|line| !line.contains("creates it")).collect();
        let said = lines.first().and_then(|line| line.strip_prefix("headwater: "));
        let help = lines.get(1).and_then(|line| line.strip_prefix("help: "));
        let rest = &lines[2.min(lines.len())..];
        let is_usage =
            rest.iter().all(|line| line.starts_with("Usage: ") || line.starts_with("       "));
        let help = help.filter(|help| {
            ["headwater ", "export ", "df "].iter().any(|start| help.starts_with(start))
        });
        let (Some(said), Some(help)) = (said, help) else {
            let _ = writeln!(problems, "{what}: `{line}` prints:\n{stderr}");
            continue;
        };
        if output.status.code() != Some(*code) || !is_usage || said.is_empty() {
            let _ = writeln!(problems, "{what}: `{line}` ends with {}:\n{stderr}", output.status);
        }
        // The command exists, with these arguments.
        if let Some(command) = help.strip_prefix("headwater ") {
            let mut words = words(command);
            words.push("--help".to_owned());
            let shown = fixtures.command(Empty, &words).0.output().unwrap();
            if !shown.status.success() {
                let _ = writeln!(
                    problems,
                    "{what}: `{help}` is not a command: {}",
                    text(&shown.stderr)
                );
            }
        }
        let _ = write!(page, "\n## {}{}\n\n", what[..1].to_uppercase(), &what[1..]);
        match place {
            Settings(settings) => {
                let _ = write!(page, "With this `headwater.toml`:\n\n```toml\n{settings}```\n\n");
            }
            Token(_) => page.push_str("On a server with tokens (`HEADWATER_URL`):\n\n"),
            InUse => page.push_str("While `headwater serve` runs in the same directory:\n\n"),
            Data | Empty => {}
        }
        let target = if *pipe == FullDisk { " > /dev/full" } else { "" };
        let _ = write!(
            page,
            "```text\n$ headwater {line}{target}\nheadwater: {said}\nhelp: {help}\n```\n\nExit code {code}.\n"
        );
    }
    assert!(problems.is_empty(), "{problems}");

    let path = headwater_testkit::package_folder().join("../../docs/mistakes.md");
    if std::env::var_os("HEADWATER_WRITE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        written, page,
        "docs/mistakes.md is out of date: HEADWATER_WRITE_DOCS=1 cargo nextest run -p headwater --test cli_mistakes"
    );
}

/// `head` closes its input; this is not a failure.
#[test]
fn a_closed_pipe_is_not_a_mistake() {
    let fixtures = Fixtures::new();
    for line in ["topic list", "config", "topic describe orders", "tail orders --from beginning"] {
        let output = fixtures.run(&("closed pipe", Data, line, Closed, 0));
        let stderr = text(&output.stderr);
        assert!(output.status.success() && stderr.is_empty(), "{line}: {} {stderr}", output.status);
    }
}
