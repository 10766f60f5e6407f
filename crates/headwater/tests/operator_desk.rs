//! The verbs on issues, tickets, sessions, the outbox and the audit, by the real binary: on servers that it opens itself,
//! embedded and on Redis with Postgres, and over a server.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use serde_json::{Value, json};
use support::reach::{Reach, until};
use support::sender::{github, github_issues, integrations, send};
use support::{Place, text};

/// A desk that answered a ticket: its id, its issue and its session.
struct Answered {
    ticket: String,
    issue: String,
    session: String,
}

/// Opens a ticket and waits until it is answered. A place without a server gets one for this.
fn answered(reach: &Reach) -> Answered {
    let words = ["ticket", "new", "--title", "Wi-Fi", "--content", "It is slow.", "--user", "ada"];
    let opened = &reach.json(&words)[0];
    assert_eq!(opened["duplicate"], false);
    let ticket = opened["ticket_id"].as_str().unwrap().to_owned();
    reach.while_serving(|ask| {
        until(ask, &["ticket", "show", &ticket], |shown| {
            let messages = shown[0]["messages"].as_array().unwrap();
            messages.len() == 2 && messages[1]["author"] == "assistant"
        });
        until(ask, &["audit"], |books| books[0]["pending"] == 0);
    });
    let sessions = reach.json(&["session", "list"]);
    let issue = opened["issue_id"].to_string();
    let session = sessions[0]["session"].as_str().unwrap().to_owned();
    assert!(session.starts_with(&format!("issue-{issue}-run-")), "{session}");
    Answered { ticket, issue, session }
}

fn every_verb(reach: &Reach) {
    let Answered { ticket, issue, session } = answered(reach);
    tickets(reach, &ticket);
    if reach.has_server() {
        // What is said twice is the same only when nobody works on it meanwhile.
        reach.while_serving(|ask| {
            until(ask, &["audit"], |books| books[0]["pending"] == 0);
        });
    }
    issues(reach, &issue);
    sessions(reach, &session);
    rest(reach);
}

fn tickets(reach: &Reach, ticket: &str) {
    let list = reach.json(&["ticket", "list", "--status", "open"]);
    assert_eq!((list.len(), &list[0]["title"]), (1, &json!("Wi-Fi")));
    let table = reach.said(&["ticket", "list", "--user", "ada"]);
    assert!(table.starts_with("TICKET"), "{table}");
    assert!(reach.json(&["ticket", "list", "--user", "nobody"]).is_empty());

    let words = ["ticket", "reply", ticket, "--content", "-", "--message-id"];
    let id = "6f1c1a35-5a0e-4f6f-8f43-3d1f7a1a0001";
    let reply = &reach.json_of(&[&words[..], &[id]].concat(), "We look into it.\n")[0];
    assert_eq!((&reply["message_id"], &reply["duplicate"]), (&json!(id), &json!(false)));
    let again = &reach.json_of(&[&words[..], &[id]].concat(), "We look into it.\n")[0];
    assert_eq!(again["duplicate"], true);
    let shown = &reach.json(&["ticket", "show", ticket])[0];
    let authors: Vec<_> =
        shown["messages"].as_array().unwrap().iter().map(|one| &one["author"]).collect();
    assert_eq!(authors, ["user", "assistant", "agent"]);

    assert_eq!(reach.json(&["ticket", "close", ticket])[0]["changed"], true);
    assert_eq!(reach.json(&["ticket", "close", ticket])[0]["changed"], false);
    assert_eq!(reach.json(&["ticket", "list", "--status", "closed"]).len(), 1);
    let reopened = &reach.json(&["ticket", "reopen", ticket])[0];
    assert_eq!((&reopened["changed"], &reopened["status"]), (&json!(true), &json!("open")));
    assert_eq!(reach.json(&["ticket", "reopen", ticket])[0]["changed"], false);
    // Whoever took over gives it back in the same way.
    assert_eq!(reach.json(&["ticket", "show", ticket])[0]["handed_over"], false);
    reach.json(&["ticket", "close", ticket]);
    let said = reach.refused(&["ticket", "show", "6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff"], 1);
    assert!(said.contains("no ticket"), "{said}");
}

fn issues(reach: &Reach, issue: &str) {
    let list = reach.json(&["issue", "list", "--integration", "desk"]);
    assert_eq!(list[0]["id"].to_string(), issue);
    assert!(reach.json(&["issue", "list", "--quarantined"]).is_empty());
    let table = reach.said(&["issue", "list"]);
    assert!(table.starts_with("ID  INTEGRATION"), "{table}");
    let shown = &reach.json(&["issue", "show", issue])[0];
    assert!(shown["events"].as_array().unwrap().len() >= 2, "{shown}");
    let why = &reach.json(&["issue", "why", issue])[0];
    assert_eq!(why["issue_id"].to_string(), issue);
    let said = reach.said(&["issue", "why", issue]);
    assert_eq!(said.trim_end(), why["sentence"].as_str().unwrap());
    let said = reach.refused(&["issue", "release", issue], 1);
    assert!(said.contains("is not quarantined"), "{said}");
    // What is left to do depends on whether somebody works; the exit code follows what is said.
    let output = reach.run(&["issue", "retry", issue, "--json"], "");
    let retried: Value = serde_json::from_slice(&output.stdout).unwrap();
    let result = retried["result"].as_str().unwrap();
    assert!(["queued", "processing", "idle"].contains(&result), "{retried}");
    assert_eq!(output.status.success(), result == "queued", "{}", text(&output.stderr));
    for verb in ["show", "why", "retry", "release"] {
        let said = reach.refused(&["issue", verb, "987654"], 1);
        assert!(said.contains("issue 987654"), "{said}");
    }
}

fn sessions(reach: &Reach, session: &str) {
    let shown = &reach.json(&["session", "show", session])[0];
    assert_eq!((&shown["stage"], &shown["problem"]), (&json!("open"), &Value::Null));
    let events = shown["events"].as_u64().unwrap();
    assert!(events >= 2, "{shown}");
    let replay = reach.json(&["session", "replay", session]);
    assert_eq!(replay.len() as u64, events);
    assert_eq!(replay[0]["type"], "weakincentives.runtime.events.PromptRendered");
    assert!(
        replay[0]["payload"]["rendered_prompt"].as_str().unwrap().contains("Wi-Fi"),
        "{replay:?}"
    );
    let first = replay[0]["id"].as_str().unwrap();
    let part = reach.json(&["session", "replay", session, "--until", first]);
    assert_eq!(part, replay[..1]);

    let forked = &reach.json(&["session", "fork", session, "half", "--until", first])[0];
    assert_eq!((&forked["length"], &forked["parent"]["session"]), (&json!(1), &json!(session)));
    let said = reach.refused(&["session", "fork", session, "half"], 1);
    assert!(said.contains("exists already"), "{said}");
    reach.refused(&["session", "fork", session, "never", "--until", "7-7"], 2);

    let exported = &reach.json(&["session", "export", session, "--output", "run.jsonl"])[0];
    assert_eq!(exported["lines"].as_u64().unwrap(), events + 2);
    let file = std::fs::read_to_string(reach.place.path().join("run.jsonl")).unwrap();
    assert_eq!(reach.said(&["session", "export", session]), file);
    let imported = &reach.json(&["session", "import", "copy", "--input", "run.jsonl"])[0];
    assert_eq!(imported["length"], events);
    reach.json_of(&["session", "import", "piped"], &file);
    let names = |value: &[Value]| -> Vec<String> {
        value.iter().map(|one| one["payload"].to_string()).collect()
    };
    assert_eq!(names(&reach.json(&["session", "replay", "piped"])), names(&replay));
    // A file that was cut off leaves nothing behind.
    let torn: String = file.lines().take(2).map(|line| format!("{line}\n")).collect();
    let refused = reach.run(&["session", "import", "torn"], &torn);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
    let said = reach.refused(&["session", "show", "torn"], 1);
    assert!(said.contains("no session"), "{said}");
    let names: Vec<Value> =
        reach.json(&["session", "list"]).into_iter().map(|one| one["session"].clone()).collect();
    for name in [session, "half", "copy", "piped"] {
        assert!(names.contains(&json!(name)), "{name}: {names:?}");
    }
    assert!(!names.contains(&json!("torn")), "{names:?}");
}

fn rest(reach: &Reach) {
    assert!(reach.json(&["outbox", "list"]).is_empty());
    let said = reach.refused(&["outbox", "retry", "987654"], 1);
    assert!(said.contains("987654"), "{said}");
    assert_eq!(reach.json(&["outbox", "retry", "--all", "--yes"]), [json!({"queued": 0})]);
    assert_eq!(reach.json(&["issue", "release", "--all", "--yes"]), [json!({"released": 0})]);
    let books = &reach.json(&["audit"])[0];
    assert_eq!((&books["balances"], &books["quarantined"]), (&json!(true), &json!(0)));
    assert_eq!(&reach.json(&["audit", "books"])[0], books);
    let log = reach.json(&["audit", "log"]);
    // Who changed it over HTTP is known by a token, and who opened the servers to the operating system.
    let opened = log.iter().find(|entry| entry["path"] == "/api/v1/tickets").unwrap();
    let caller = opened["caller"].as_str().unwrap();
    assert_eq!(caller.starts_with("cli:"), !reach.has_server(), "{opened}");
    assert_eq!((&opened["method"], &opened["status"]), (&json!("POST"), &json!(201)), "{opened}");
    assert!(reach.said(&["audit", "log"]).starts_with("AT"));
}

#[test]
fn every_verb_of_the_desk_on_embedded_streams() {
    every_verb(&Reach::embedded());
}

#[test]
fn every_verb_of_the_desk_on_redis_and_postgres() {
    every_verb(&Reach::redis());
}

#[test]
fn every_verb_of_the_desk_over_a_server() {
    every_verb(&Reach::server());
}

#[tokio::test]
async fn what_was_given_up_is_listed_and_sent_again() {
    // Its replies have nowhere to go: there is no token.
    let place = Place::new().unwrap().settings(&integrations()).unwrap();
    let reach = Reach::embedded_at(place).serving();
    let event = github_issues("opened", 7, "Where is it?");
    let sent =
        send(github(reach.the_server(), "issues", "d-1", event.to_string().as_bytes())).await;
    assert_eq!(sent.unwrap().0, 200);
    let ask = |verb: &[&str]| reach.run(verb, "");
    let dead =
        until(&ask, &["outbox", "list"], |rows| rows.iter().any(|row| row["kind"] == "reply"));
    let reply = dead.iter().find(|row| row["kind"] == "reply").unwrap();
    assert!(reply["error"].as_str().unwrap().contains("reply_token_env"), "{reply}");
    assert!(reach.said(&["outbox", "list"]).starts_with("ID"));

    let id = reply["id"].to_string();
    assert_eq!(reach.json(&["outbox", "retry", &id])[0]["result"], "queued");
    // It is given up again: there still is no token.
    until(&ask, &["outbox", "list"], |rows| rows.iter().any(|row| row["id"] == reply["id"]));
}

/// More than one call sends again or releases.
const MANY: usize = 120;

#[test]
fn all_that_was_given_up_or_quarantined_goes_on_or_all_of_one_integration() {
    let reach = Reach::redis();
    reach.json(&["ticket", "new", "--title", "t", "--content", "c"]);
    let database = reach.database.as_ref().unwrap();
    let made = format!(
        "INSERT INTO integrations (name, provider) VALUES ('shop', 'github');
         INSERT INTO issues (integration_id, external_project_id, external_issue_id, quarantined_at)
         SELECT (SELECT id FROM integrations WHERE name = CASE WHEN n % 4 = 0 THEN 'shop' ELSE 'desk' END),
             'many', n::text, now() FROM generate_series(1, {MANY}) AS n;
         INSERT INTO outbox (issue_id, kind, target, idempotency_key, payload, status, due_at, last_error)
         SELECT id, 'reply', 't', 'many-' || id, '{{}}', 'dead', now(), 'gone' FROM issues
         WHERE external_project_id = 'many'"
    );
    database.query(&made).unwrap();
    for (list, go_on, counted) in [
        (&["outbox", "list"][..], &["outbox", "retry", "--all", "--yes"][..], "queued"),
        (&["issue", "list", "--quarantined"], &["issue", "release", "--all", "--yes"], "released"),
    ] {
        let left = || reach.json(&[list, &["--limit", "1000"]].concat()).len();
        assert_eq!(left(), MANY);
        let some = &reach.json(&[go_on, &["--integration", "shop"]].concat())[0];
        assert_eq!((&some[counted], left()), (&json!(MANY / 4), MANY - MANY / 4));
        let rest = &reach.json(go_on)[0];
        assert_eq!((&rest[counted], left()), (&json!(MANY - MANY / 4), 0));
    }
}

#[test]
fn what_lies_in_tables_is_looked_at_while_redis_is_away() {
    let reach = Reach::redis();
    let ticket = reach.json(&["ticket", "new", "--title", "t", "--content", "c"])[0].clone();
    let (ticket, issue) = (ticket["ticket_id"].as_str().unwrap(), ticket["issue_id"].to_string());
    reach.redis.as_ref().unwrap().stop().unwrap();
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
        let output = reach.run(verb, "");
        assert!(output.status.success(), "{verb:?}: {}", text(&output.stderr));
    }
}

#[test]
fn what_lies_in_tables_is_looked_at_beside_a_server_that_has_the_streams() {
    let reach = Reach::embedded().serving();
    reach.json(&["ticket", "new", "--title", "t", "--content", "c"]);
    let to: Vec<&str> = reach.direct.iter().map(String::as_str).collect();
    for verb in [&["ticket", "list", "--json"][..], &["issue", "list", "--json"]] {
        let output = reach.run_at(verb, &to, "");
        assert_eq!(support::reach::lines(verb, &output).len(), 1);
    }
    let output = reach.run_at(&["topic", "list"], &to, "");
    assert_eq!(output.status.code(), Some(1), "the streams are in use: {}", text(&output.stderr));
}
