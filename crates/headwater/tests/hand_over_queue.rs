//! The queue of tickets that are handed over, on the real binary: reason, time, assignee, and the way back.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use anyhow::{Context, Result};
use headwater_testkit::Postgres;
use serde_json::{Value, json};

use crate::support::cli::{CliFixture, until};
use crate::support::desk::{all_idle, open};
use crate::support::{Server, ServerDir, answer};

const SQLITE: &str = "sqlite:headwater-data/headwater.db";

/// Two people with tokens of their own, and one who only reads.
const TOKENS: [(&str, &str); 3] = [("ada", "write"), ("bob", "write"), ("eve", "read")];

fn token(name: &str) -> String {
    format!("token-of-{name}-{name}-{name}")
}

/// Calls a route as one of the people.
async fn call(
    server: &Server,
    name: &str,
    path: &str,
    body: Option<Value>,
) -> Result<(u16, Value)> {
    let url = server.url(&format!("/api/v1{path}"));
    let request = match body {
        Some(body) => server.client.post(url).json(&body),
        None => server.client.get(url),
    };
    answer(request.bearer_auth(token(name)).send().await?).await
}

fn ids(page: &Value) -> Vec<String> {
    let tickets = page["tickets"].as_array().into_iter().flatten();
    tickets.map(|ticket| ticket["ticket_id"].as_str().unwrap().to_owned()).collect()
}

async fn a_hand_over_has_a_queue_an_assignee_and_a_way_back(database: &str) -> Result<()> {
    let tokens = TOKENS.map(|(name, role)| {
        let token = token(name);
        format!("[[token]]\nname = \"{name}\"\nrole = \"{role}\"\ntoken = \"{token}\"\n")
    });
    let place = ServerDir::new()?.settings(&tokens.concat())?;
    let arguments = ["--issue-quiet", "10ms", "--analytics-path", "", "--database-url", database];
    let server = place.serve(&arguments)?;
    let create = async |content: &str| {
        let new = json!({"title": "Parcel", "content": content, "user_id": "kim"});
        let (status, created) = call(&server, "ada", "/tickets", Some(new)).await?;
        assert_eq!(status, 201, "{created}");
        anyhow::Ok(created["ticket_id"].as_str().context("an id")?.to_owned())
    };
    // Waits until a ticket is as expected.
    let shown = async |id: &str, is_it: &dyn Fn(&Value) -> bool| loop {
        let (_, ticket) = call(&server, "eve", &format!("/tickets/{id}"), None).await?;
        if is_it(&ticket) {
            return anyhow::Ok(ticket);
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    let act = async |name: &str, id: &str, verb: &str, body: Value| {
        call(&server, name, &format!("/tickets/{id}/{verb}"), Some(body)).await
    };
    let list = async |filter: &str| {
        let (status, page) = call(&server, "eve", &format!("/tickets?{filter}"), None).await?;
        assert_eq!(status, 200, "{page}");
        anyhow::Ok(ids(&page))
    };

    let (one, two, answered) = (
        create("I want to speak to a human").await?,
        create("A person, please").await?,
        create("Where is it?").await?,
    );
    let ticket = shown(&one, &|ticket| ticket["handed_over"] == true).await?;
    assert_eq!(ticket["hand_over_reason"], "the user asked for a person", "{ticket:#}");
    assert_eq!(ticket["assignee"], Value::Null, "{ticket:#}");
    let since = ticket["handed_over_at"].as_str().context("a time")?.to_owned();
    assert!(since.as_str() >= ticket["created_at"].as_str().context("a time")?, "{ticket:#}");
    shown(&two, &|ticket| ticket["handed_over"] == true).await?;
    let ticket =
        shown(&answered, &|ticket| ticket["messages"].as_array().map(Vec::len) == Some(2)).await?;
    assert_eq!(ticket["handed_over_at"], Value::Null, "{ticket:#}");
    assert_eq!(list("handed_over=true").await?, [two.as_str(), one.as_str()]);
    assert_eq!(list("handed_over=false").await?, [answered.as_str()]);
    assert_eq!(list("unassigned=true").await?, [two.as_str(), one.as_str()]);

    // Of two people, the first one gets it.
    let (status, taken) = act("ada", &one, "take", json!({})).await?;
    assert_eq!((status, &taken["assignee"], &taken["changed"]), (200, &json!("ada"), &json!(true)));
    let (status, again) = act("ada", &one, "take", json!({})).await?;
    assert_eq!((status, &again["changed"]), (200, &json!(false)), "{again:#}");
    let (status, refused) = act("bob", &one, "take", json!({})).await?;
    assert_eq!((status, &refused["error"]["code"]), (409, &json!("assigned")), "{refused:#}");
    assert!(refused["error"]["message"].to_string().contains("assigned to `ada`"), "{refused:#}");
    assert_eq!(act("eve", &one, "take", json!({})).await?.0, 403);
    assert_eq!(list("unassigned=true").await?, [two.as_str()]);
    assert_eq!(list("assignee=ada").await?, [one.as_str()]);
    let why = call(&server, "eve", &format!("/tickets/{one}/why"), None).await?.1;
    assert!(why.to_string().contains("assigned to ada"), "{why:#}");

    // An assignment overrides, and can be removed.
    let (status, given) = act("ada", &one, "assign", json!({"assignee": "bob"})).await?;
    assert_eq!((status, &given["assignee"]), (200, &json!("bob")), "{given:#}");
    assert_eq!(given["handed_over_at"], json!(since), "the time stays: {given:#}");
    let (status, none) = act("ada", &one, "unassign", json!({})).await?;
    assert_eq!((status, &none["assignee"]), (200, &Value::Null), "{none:#}");
    // Refused without an effect.
    for bad in
        [json!({}), json!({"assignee": " "}), json!({"assignee": "a\nb"}), json!({"to": "x"})]
    {
        assert_eq!(act("ada", &one, "assign", bad.clone()).await?.0, 400, "{bad}");
    }
    assert_eq!(act("ada", &one, "assign", json!({"assignee": "x".repeat(200)})).await?.0, 400);
    for (verb, body) in
        [("take", json!({})), ("assign", json!({"assignee": "bob"})), ("unassign", json!({}))]
    {
        let (status, refused) = act("ada", &answered, verb, body).await?;
        let code = &refused["error"]["code"];
        assert_eq!((status, code), (409, &json!("not_handed_over")), "{verb}: {refused:#}");
    }
    assert_eq!(list("assignee=bob").await?, Vec::<String>::new());

    // Who answers gets the ticket, unless it has an assignee.
    let reply = |agent: &str| json!({"content": "I do it", "author": "agent", "agent": agent});
    for (id, reason) in [(&two, "the user asked for a person"), (&answered, "a person answered")] {
        assert_eq!(act("ada", id, "messages", reply("Grace")).await?.0, 201);
        assert_eq!(act("ada", id, "messages", reply("Linus")).await?.0, 201);
        let ticket = shown(id, &|ticket| ticket["handed_over"] == true).await?;
        assert_eq!(
            (&ticket["assignee"], &ticket["hand_over_reason"]),
            (&json!("Grace"), &json!(reason))
        );
    }

    // The gauge counts open tickets.
    let gauge = async |expected: [&str; 2]| loop {
        let request = server.client.get(server.url("/metrics")).bearer_auth(token("eve"));
        let metrics = request.send().await?.text().await?;
        let [unassigned, assigned] = expected;
        let lines = [
            format!("headwater_tickets_handed_over{{assigned=\"false\"}} {unassigned}\n"),
            format!("headwater_tickets_handed_over{{assigned=\"true\"}} {assigned}\n"),
        ];
        if lines.iter().all(|line| metrics.contains(line)) {
            return anyhow::Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    };
    gauge(["1", "2"]).await?;

    // Closing keeps the hand-over; the way back ends it, and the desk answers again.
    act("ada", &two, "close", json!({})).await?;
    assert_eq!(list("handed_over=true&status=open").await?, [answered.as_str(), one.as_str()]);
    let ticket = shown(&two, &|ticket| ticket["status"] == "closed").await?;
    assert_eq!(ticket["assignee"], "Grace", "{ticket:#}");
    gauge(["1", "1"]).await?;
    let (_, back) = act("ada", &one, "reopen", json!({})).await?;
    assert_eq!(back["changed"], true, "{back:#}");
    let ticket = shown(&one, &|ticket| ticket["handed_over"] == false).await?;
    for field in ["handed_over_at", "hand_over_reason", "assignee"] {
        assert_eq!(ticket[field], Value::Null, "{field}: {ticket:#}");
    }
    let before = ticket["messages"].as_array().map(Vec::len).context("messages")?;
    act("ada", &one, "messages", json!({"content": "Where is it?"})).await?;
    shown(&one, &|ticket| ticket["messages"].as_array().map(Vec::len) == Some(before + 2)).await?;
    // A second hand-over has its own time, and no assignee of the first one.
    act("ada", &one, "messages", json!({"content": "A human, please"})).await?;
    let ticket = shown(&one, &|ticket| ticket["handed_over"] == true).await?;
    assert_eq!(ticket["assignee"], Value::Null, "{ticket:#}");
    assert!(ticket["handed_over_at"].as_str().context("a time")? > since.as_str(), "{ticket:#}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_has_a_queue_an_assignee_and_a_way_back_on_sqlite() -> Result<()> {
    tokio::time::timeout(
        2 * support::LIMIT,
        a_hand_over_has_a_queue_an_assignee_and_a_way_back(SQLITE),
    )
    .await?
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_has_a_queue_an_assignee_and_a_way_back_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let url = database.url();
    tokio::time::timeout(
        2 * support::LIMIT,
        a_hand_over_has_a_queue_an_assignee_and_a_way_back(&url),
    )
    .await?
}

/// Twenty people at once: one of them gets the ticket.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_people_who_take_a_ticket_at_once_one_gets_it() -> Result<()> {
    let names: Vec<String> = (0..20).map(|number| format!("agent-{number:02}")).collect();
    let tokens = names.iter().map(|name| {
        let token = token(name);
        format!("[[token]]\nname = \"{name}\"\nrole = \"write\"\ntoken = \"{token}\"\n")
    });
    let database = Postgres::shared()?.database()?;
    let place = ServerDir::new()?.settings(&tokens.collect::<String>())?;
    let url = database.url();
    let arguments = ["--issue-quiet", "10ms", "--analytics-path", "", "--database-url", &url];
    let server = place.serve(&arguments)?;
    let new = json!({"title": "Parcel", "content": "Where is it?"});
    let (_, created) = call(&server, &names[0], "/tickets", Some(new)).await?;
    let id = created["ticket_id"].as_str().context("an id")?;
    // Handed over at once, to nobody: by an agent without a name.
    let reply = json!({"content": "One moment", "author": "agent"});
    call(&server, &names[0], &format!("/tickets/{id}/messages"), Some(reply)).await?;
    let path = format!("/tickets/{id}/take");
    let takes = names.iter().map(|name| call(&server, name, &path, Some(json!({}))));
    let results = futures_util::future::try_join_all(takes).await?;
    let winners: Vec<_> = results.iter().filter(|(status, _)| *status == 200).collect();
    assert_eq!(winners.len(), 1, "{results:#?}");
    assert!(results.iter().all(|(status, _)| [200, 409].contains(status)), "{results:#?}");
    let (_, ticket) = call(&server, &names[0], &format!("/tickets/{id}"), None).await?;
    assert_eq!(ticket["assignee"], winners[0].1["assignee"], "{ticket:#}");
    Ok(())
}

fn every_command_on_the_queue(cli: &CliFixture) {
    let new = ["ticket", "new", "--title", "Refund", "--content", "I want to speak to a human"];
    let id = cli.json(&new)[0]["ticket_id"].as_str().unwrap().to_owned();
    let id = id.as_str();
    let queue = ["ticket", "list", "--handed-over"];
    cli.while_serving(|ask| {
        until(ask, &queue, |found| found.len() == 1);
        until(ask, &["audit"], |books| books[0]["pending"] == 0);
    });
    let table = cli.stdout(&queue);
    assert!(table.contains("ASSIGNEE") && table.contains("the user asked for a person"), "{table}");
    // Under the name of the account of this command.
    assert!(cli.stdout(&["ticket", "take", id]).contains("to cli:"));
    assert!(cli.stdout(&["ticket", "take", id]).contains("nothing was changed"));
    assert!(cli.json(&["ticket", "list", "--unassigned"]).is_empty());
    assert!(cli.stdout(&["ticket", "assign", id, "--to", "grace"]).contains("to grace"));
    assert_eq!(cli.json(&["ticket", "list", "--assignee", "grace"]).len(), 1);
    let shown = cli.stdout(&["ticket", "show", id]);
    assert!(shown.contains("(the user asked for a person)") && shown.contains("assigned to grace"));
    let message = cli.fails(&["ticket", "take", id], 1);
    assert!(message.contains("assigned to `grace`"), "{message}");
    assert!(cli.stdout(&["ticket", "assign", id, "--nobody"]).contains("to nobody"));
    assert_eq!(cli.json(&["ticket", "list", "--unassigned"]).len(), 1);
    cli.fails(&["ticket", "assign", id], 2);
    cli.fails(&["ticket", "assign", id, "--to", "a", "--nobody"], 2);
    assert_eq!(cli.json(&["ticket", "reopen", id])[0]["changed"], true);
    assert!(cli.json(&queue).is_empty());
    let message = cli.fails(&["ticket", "take", id], 1);
    assert!(message.contains("is not handed over"), "{message}");
}

#[test]
fn every_command_on_the_queue_works_without_a_server() {
    every_command_on_the_queue(&CliFixture::embedded());
}

#[test]
fn every_command_on_the_queue_works_on_redis_and_postgres() {
    every_command_on_the_queue(&CliFixture::redis());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_console_shows_the_queue_and_assigns() -> Result<()> {
    let place = ServerDir::new()?;
    let server = place.serve(&["--issue-quiet", "10ms", "--analytics-path", ""])?;
    let ticket = open(&server, "A human, please").await?;
    let id = ticket["ticket_id"].as_str().context("an id")?.to_owned();
    let path = format!("/api/v1/tickets/{id}");
    server.until(&path, |_, ticket| ticket["handed_over"] == true).await?;
    all_idle(&server).await?;
    let page = async |path: &str| {
        anyhow::Ok(server.client.get(server.url(path)).send().await?.text().await?)
    };
    let list = page("/console/tickets?status=handed_over").await?;
    assert!(list.contains(&id) && list.contains("headwater ticket list --handed-over"), "{list}");
    let shown = page(&format!("/console/tickets/{id}")).await?;
    for expected in ["Take ticket", "Assign to", "the user asked for a person", "nobody"] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    let act = async |verb: &str, form: &str| {
        let url = server.url(&format!("/console/do/tickets/{id}/{verb}"));
        let origin = server.url("");
        let request = server.client.post(url).header("origin", origin).body(form.to_owned());
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        anyhow::Ok(request.send().await?.text().await?)
    };
    assert!(act("take", "").await?.contains("You have taken the ticket."));
    assert_eq!(server.get(&path).await?.1["assignee"], "local");
    assert!(act("assign", "assignee=grace").await?.contains("The ticket has a new assignee."));
    assert_eq!(server.get(&path).await?.1["assignee"], "grace");
    assert!(act("unassign", "").await?.contains("The ticket is assigned to nobody."));
    assert_eq!(server.get(&path).await?.1["assignee"], Value::Null);
    act("reopen", "").await?;
    assert!(!page("/console/tickets?status=handed_over").await?.contains(&id));
    Ok(())
}
