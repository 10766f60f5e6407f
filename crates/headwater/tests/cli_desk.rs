//! Commands on issues, tickets, sessions, the outbox and the audit log: embedded, on Redis and PostgreSQL, and over a
//! server.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use serde_json::{Value, json};
use support::cli::{CliFixture, until};
use support::sender::{github, github_issues, integrations, send};
use support::{ServerDir, text};

/// An answered ticket with its issue and session.
struct AnsweredTicket {
    ticket: String,
    issue: String,
    session: String,
}

/// Opens a ticket and waits for the reply. Starts a server for this if there is none.
fn answered(cli: &CliFixture) -> AnsweredTicket {
    let words = ["ticket", "new", "--title", "Wi-Fi", "--content", "It is slow.", "--user", "ada"];
    let opened = &cli.json(&words)[0];
    assert_eq!(opened["duplicate"], false);
    let ticket = opened["ticket_id"].as_str().unwrap().to_owned();
    cli.while_serving(|ask| {
        until(ask, &["ticket", "show", &ticket], |shown| {
            let messages = shown[0]["messages"].as_array().unwrap();
            messages.len() == 2 && messages[1]["author"] == "assistant"
        });
        until(ask, &["audit"], |books| books[0]["pending"] == 0);
    });
    let sessions = cli.json(&["session", "list"]);
    let issue = opened["issue_id"].to_string();
    let session = sessions[0]["session"].as_str().unwrap().to_owned();
    assert!(session.starts_with(&format!("issue-{issue}-run-")), "{session}");
    AnsweredTicket { ticket, issue, session }
}

fn every_verb(cli: &CliFixture) {
    let AnsweredTicket { ticket, issue, session } = answered(cli);
    tickets(cli, &ticket);
    if cli.has_server() {
        // Repeated commands give the same result only when nothing is being processed.
        cli.while_serving(|ask| {
            until(ask, &["audit"], |books| books[0]["pending"] == 0);
        });
    }
    issues(cli, &issue);
    sessions(cli, &session);
    rest(cli);
}

fn tickets(cli: &CliFixture, ticket: &str) {
    let list = cli.json(&["ticket", "list", "--status", "open"]);
    assert_eq!((list.len(), &list[0]["title"]), (1, &json!("Wi-Fi")));
    let table = cli.stdout(&["ticket", "list", "--user", "ada"]);
    assert!(table.starts_with("TICKET"), "{table}");
    assert!(cli.json(&["ticket", "list", "--user", "nobody"]).is_empty());

    let words = ["ticket", "reply", ticket, "--content", "-", "--message-id"];
    let id = "6f1c1a35-5a0e-4f6f-8f43-3d1f7a1a0001";
    let reply = &cli.json_of(&[&words[..], &[id]].concat(), "We look into it.\n")[0];
    assert_eq!((&reply["message_id"], &reply["duplicate"]), (&json!(id), &json!(false)));
    let again = &cli.json_of(&[&words[..], &[id]].concat(), "We look into it.\n")[0];
    assert_eq!(again["duplicate"], true);
    let shown = &cli.json(&["ticket", "show", ticket])[0];
    let authors: Vec<_> =
        shown["messages"].as_array().unwrap().iter().map(|one| &one["author"]).collect();
    assert_eq!(authors, ["user", "assistant", "agent"]);

    assert_eq!(cli.json(&["ticket", "close", ticket])[0]["changed"], true);
    assert_eq!(cli.json(&["ticket", "close", ticket])[0]["changed"], false);
    assert_eq!(cli.json(&["ticket", "list", "--status", "closed"]).len(), 1);
    let reopened = &cli.json(&["ticket", "reopen", ticket])[0];
    assert_eq!((&reopened["changed"], &reopened["status"]), (&json!(true), &json!("open")));
    assert_eq!(cli.json(&["ticket", "reopen", ticket])[0]["changed"], false);
    // Reopening also returns a ticket that a person took over.
    assert_eq!(cli.json(&["ticket", "show", ticket])[0]["handed_over"], false);
    cli.json(&["ticket", "close", ticket]);
    let message = cli.fails(&["ticket", "show", "6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff"], 1);
    assert!(message.contains("does not exist"), "{message}");
}

fn issues(cli: &CliFixture, issue: &str) {
    let list = cli.json(&["issue", "list", "--integration", "desk"]);
    assert_eq!(list[0]["id"].to_string(), issue);
    assert!(cli.json(&["issue", "list", "--quarantined"]).is_empty());
    let table = cli.stdout(&["issue", "list"]);
    assert!(table.starts_with("ID  INTEGRATION"), "{table}");
    let shown = &cli.json(&["issue", "show", issue])[0];
    assert!(shown["events"].as_array().unwrap().len() >= 2, "{shown}");
    let event = &shown["events"][0];
    let id = event["id"].to_string();
    assert_eq!(&cli.json(&["issue", "event", &id])[0], event);
    let original: Value =
        serde_json::from_str(&cli.stdout(&["issue", "event", &id, "--original"])).unwrap();
    assert_eq!(original, event["payload"]);
    let message = cli.fails(&["issue", "event", "987654"], 1);
    assert!(message.contains("event log `987654` does not exist"), "{message}");
    let why = &cli.json(&["issue", "why", issue])[0];
    assert_eq!(why["issue_id"].to_string(), issue);
    let message = cli.stdout(&["issue", "why", issue]);
    assert!(message.starts_with(why["sentence"].as_str().unwrap()), "{message}");
    let message = cli.fails(&["issue", "release", issue], 1);
    assert!(message.contains("is not quarantined"), "{message}");
    // The result depends on whether a worker is active; the exit code follows it.
    let output = cli.run(&["issue", "retry", issue, "--json"], "");
    let retried: Value = serde_json::from_slice(&output.stdout).unwrap();
    let result = retried["result"].as_str().unwrap();
    assert!(["queued", "processing", "idle"].contains(&result), "{retried}");
    assert_eq!(output.status.success(), result == "queued", "{}", text(&output.stderr));
    for verb in ["show", "why", "retry", "release"] {
        let message = cli.fails(&["issue", verb, "987654"], 1);
        assert!(message.contains("issue 987654"), "{message}");
    }
}

fn sessions(cli: &CliFixture, session: &str) {
    let shown = &cli.json(&["session", "show", session])[0];
    assert_eq!((&shown["stage"], &shown["problem"]), (&json!("open"), &Value::Null));
    let events = shown["events"].as_u64().unwrap();
    assert!(events >= 2, "{shown}");
    let replay = cli.json(&["session", "replay", session]);
    assert_eq!(replay.len() as u64, events);
    assert_eq!(replay[0]["type"], "headwater.run.PromptRendered");
    assert!(
        replay[0]["payload"]["rendered_prompt"].as_str().unwrap().contains("Wi-Fi"),
        "{replay:?}"
    );
    let first = replay[0]["id"].as_str().unwrap();
    let part = cli.json(&["session", "replay", session, "--until", first]);
    assert_eq!(part, replay[..1]);

    let forked = &cli.json(&["session", "fork", session, "half", "--until", first])[0];
    assert_eq!((&forked["length"], &forked["parent"]["session"]), (&json!(1), &json!(session)));
    for compared in [&["session", "diff", "half"][..], &["session", "diff", "half", session]] {
        let found = &cli.json(compared)[0];
        assert_eq!((&found["same"], &found["only_left"]), (&json!(1), &json!([])), "{found}");
        assert_eq!(found["only_right"].as_array().unwrap()[..], replay[1..], "{found}");
    }
    let message = cli.fails(&["session", "diff", session], 2);
    assert!(message.contains("is no fork"), "{message}");
    let message = cli.fails(&["session", "fork", session, "half"], 1);
    assert!(message.contains("already exists"), "{message}");
    cli.fails(&["session", "fork", session, "never", "--until", "7-7"], 2);

    let exported = &cli.json(&["session", "export", session, "--output", "run.jsonl"])[0];
    assert_eq!(exported["lines"].as_u64().unwrap(), events + 2);
    let file = std::fs::read_to_string(cli.dir.path().join("run.jsonl")).unwrap();
    assert_eq!(cli.stdout(&["session", "export", session]), file);
    let imported = &cli.json(&["session", "import", "copy", "--input", "run.jsonl"])[0];
    assert_eq!(imported["length"], events);
    cli.json_of(&["session", "import", "piped"], &file);
    let names = |value: &[Value]| -> Vec<String> {
        value.iter().map(|one| one["payload"].to_string()).collect()
    };
    assert_eq!(names(&cli.json(&["session", "replay", "piped"])), names(&replay));
    // A truncated file leaves nothing behind.
    let torn: String = file.lines().take(2).map(|line| format!("{line}\n")).collect();
    let refused = cli.run(&["session", "import", "torn"], &torn);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
    let message = cli.fails(&["session", "show", "torn"], 1);
    assert!(message.contains("no session"), "{message}");
    let names: Vec<Value> =
        cli.json(&["session", "list"]).into_iter().map(|one| one["session"].clone()).collect();
    for name in [session, "half", "copy", "piped"] {
        assert!(names.contains(&json!(name)), "{name}: {names:?}");
    }
    assert!(!names.contains(&json!("torn")), "{names:?}");
}

fn rest(cli: &CliFixture) {
    assert!(cli.json(&["outbox", "list"]).is_empty());
    let message = cli.fails(&["outbox", "retry", "987654"], 1);
    assert!(message.contains("987654"), "{message}");
    assert_eq!(cli.json(&["outbox", "retry", "--all", "--yes"]), [json!({"queued": 0})]);
    assert_eq!(cli.json(&["issue", "release", "--all", "--yes"]), [json!({"released": 0})]);
    let books = &cli.json(&["audit"])[0];
    assert_eq!((&books["balances"], &books["quarantined"]), (&json!(true), &json!(0)));
    assert_eq!(&cli.json(&["audit", "books"])[0], books);
    let log = cli.json(&["audit", "log"]);
    // Over HTTP the caller is a token, otherwise the operating system user.
    let opened = log.iter().find(|entry| entry["path"] == "/api/v1/tickets").unwrap();
    let caller = opened["caller"].as_str().unwrap();
    assert_eq!(caller.starts_with("cli:"), !cli.has_server(), "{opened}");
    assert_eq!((&opened["method"], &opened["status"]), (&json!("POST"), &json!(201)), "{opened}");
    assert!(cli.stdout(&["audit", "log"]).starts_with("AT"));
}

#[test]
fn every_desk_command_on_embedded_streams() {
    every_verb(&CliFixture::embedded());
}

#[test]
fn every_desk_command_on_redis_and_postgres() {
    every_verb(&CliFixture::redis());
}

#[test]
fn every_desk_command_over_a_server() {
    every_verb(&CliFixture::with_server());
}

#[tokio::test]
async fn dead_replies_are_listed_and_retried() {
    // Replies cannot be delivered without a token.
    let dir = ServerDir::new().unwrap().settings(&integrations()).unwrap();
    let cli = CliFixture::embedded_at(dir).start_server();
    let event = github_issues("opened", 7, "Where is it?");
    let sent = send(github(cli.server(), "issues", "d-1", event.to_string().as_bytes())).await;
    assert_eq!(sent.unwrap().0, 200);
    let ask = |verb: &[&str]| cli.run(verb, "");
    let dead =
        until(&ask, &["outbox", "list"], |rows| rows.iter().any(|row| row["kind"] == "reply"));
    let reply = dead.iter().find(|row| row["kind"] == "reply").unwrap();
    assert!(reply["error"].as_str().unwrap().contains("reply_token_env"), "{reply}");
    assert!(cli.stdout(&["outbox", "list"]).starts_with("ID"));

    let id = reply["id"].to_string();
    assert_eq!(cli.json(&["outbox", "retry", &id])[0]["result"], "queued");
    // It becomes dead again, because there still is no token.
    until(&ask, &["outbox", "list"], |rows| rows.iter().any(|row| row["id"] == reply["id"]));
}

/// More than one batch of a retry or release.
const MANY: usize = 120;

#[test]
fn all_dead_rows_and_quarantined_issues_are_retried_also_by_integration() {
    let cli = CliFixture::redis();
    cli.json(&["ticket", "new", "--title", "t", "--content", "c"]);
    let database = cli.database.as_ref().unwrap();
    let made = format!(
        "INSERT INTO integrations (name, provider) VALUES ('shop', 'github');
         INSERT INTO issues (integration_id, external_project_id, external_issue_id, quarantined_at)
         SELECT (SELECT id FROM integrations WHERE name = CASE WHEN n % 4 = 0 THEN 'shop' ELSE 'desk' END),
             'many', n::text, now() FROM generate_series(1, {MANY}) AS n;
         INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, last_error)
         SELECT id, integration_id, 'reply', 't', 'many-' || id, '{{}}', 'dead', now(), 'gone' FROM issues
         WHERE external_project_id = 'many'"
    );
    database.query(&made).unwrap();
    for (list, go_on, counted) in [
        (&["outbox", "list"][..], &["outbox", "retry", "--all", "--yes"][..], "queued"),
        (
            &["issue", "list", "--status", "quarantined"],
            &["issue", "release", "--all", "--yes"],
            "released",
        ),
    ] {
        let left = || cli.json(&[list, &["--limit", "1000"]].concat()).len();
        assert_eq!(left(), MANY);
        let some = &cli.json(&[go_on, &["--integration", "shop"]].concat())[0];
        assert_eq!((&some[counted], left()), (&json!(MANY / 4), MANY - MANY / 4));
        let rest = &cli.json(go_on)[0];
        assert_eq!((&rest[counted], left()), (&json!(MANY - MANY / 4), 0));
    }
}

#[test]
fn database_commands_work_while_redis_is_down() {
    let cli = CliFixture::redis();
    let ticket = cli.json(&["ticket", "new", "--title", "t", "--content", "c"])[0].clone();
    let (ticket, issue) = (ticket["ticket_id"].as_str().unwrap(), ticket["issue_id"].to_string());
    cli.redis.as_ref().unwrap().stop().unwrap();
    for verb in [
        &["ticket", "list"][..],
        &["ticket", "show", ticket],
        &["issue", "list"],
        &["issue", "show", &issue],
        &["issue", "why", &issue],
        &["outbox", "list"],
        &["outbox", "retry", "--all", "--yes"],
        &["audit"],
        &["audit", "log"],
    ] {
        let output = cli.run(verb, "");
        assert!(output.status.success(), "{verb:?}: {}", text(&output.stderr));
    }
}

#[test]
fn database_commands_work_next_to_a_server_with_embedded_streams() {
    let cli = CliFixture::embedded().start_server();
    cli.json(&["ticket", "new", "--title", "t", "--content", "c"]);
    let to: Vec<&str> = cli.direct_args.iter().map(String::as_str).collect();
    for verb in [&["ticket", "list", "--json"][..], &["issue", "list", "--json"]] {
        let output = cli.run_at(verb, &to, "");
        assert_eq!(support::cli::lines(verb, &output).len(), 1);
    }
    let output = cli.run_at(&["topic", "list"], &to, "");
    assert_eq!(output.status.code(), Some(1), "the streams are in use: {}", text(&output.stderr));
}
