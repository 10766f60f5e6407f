//! The global search and the search within the list of tickets, on the real binary: over HTTP, as commands and on the console.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Database, Postgres, Redis};
use serde_json::{Value, json};

use crate::support::{Server, ServerDir, answer, is_whole_search, is_whole_search_page, text};

/// Traces are recorded although nothing receives them.
const TRACED: [&str; 2] = ["--otlp-url", "http://127.0.0.1:1"];
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// A server on embedded streams with SQLite, and one on Redis with PostgreSQL.
struct Place {
    server: Server,
    dir: ServerDir,
    /// Dropped last.
    _backends: Option<(Redis, Database)>,
}

impl Place {
    fn embedded(settings: &str) -> Result<Self> {
        let dir = ServerDir::new()?.settings(settings)?;
        let server = dir.serve(&TRACED)?;
        Ok(Self { server, dir, _backends: None })
    }

    fn servers() -> Result<Self> {
        let (redis, dir) = (Redis::start()?, ServerDir::new()?);
        let database = Postgres::shared()?.database()?;
        let backends = ["--stream-url", &redis.url(), "--database-url", &database.url()];
        let server = dir.serve(&[&backends[..], &TRACED].concat())?;
        Ok(Self { server, dir, _backends: Some((redis, database)) })
    }
}

/// Opens a ticket in the trace [`TRACE`].
async fn open(server: &Server, title: &str, content: &str) -> Result<Value> {
    let ticket = json!({"title": title, "content": content, "user_id": "ada"});
    let request = server.client.post(server.url("/api/v1/tickets")).json(&ticket);
    let request = request.header("traceparent", format!("00-{TRACE}-00f067aa0ba902b7-01"));
    let (status, posted) = answer(request.send().await?).await?;
    ensure!(status == 201, "{posted}");
    Ok(posted)
}

async fn html(server: &Server, path: &str) -> Result<String> {
    Ok(server.client.get(server.url(path)).send().await?.text().await?)
}

/// The results of a kind, and the answer in which all sources have looked at everything.
async fn found(server: &Server, words: &str, kind: &str) -> Result<(Vec<Value>, Value)> {
    let path = format!("/api/v1/search?q={words}");
    let is_whole = |status: u16, answer: &Value| status == 200 && is_whole_search(answer);
    let answer = server.until(&path, is_whole).await?;
    let all = answer["results"].as_array().cloned().unwrap_or_default();
    Ok((all.into_iter().filter(|result| result["kind"] == kind).collect(), answer))
}

/// How far a source looked.
fn scope<'a>(answer: &'a Value, source: &str) -> &'a str {
    let sources = answer["sources"].as_array().into_iter().flatten();
    let mut sources = sources.filter(|one| one["name"] == source);
    sources.next().and_then(|one| one["scope"].as_str()).unwrap_or_default()
}

async fn ids_of_messages_traces_and_dead_letters_are_found(place: Place) -> Result<()> {
    let server = &place.server;
    let posted = open(server, "Router blinks red", "Since yesterday.").await?;

    // The message of a ticket.
    let message = posted["message_id"].as_str().context("a message id")?;
    let (tickets, answer) = found(server, message, "ticket").await?;
    ensure!(tickets.len() == 1 && tickets[0]["id"] == posted["ticket_id"], "{answer}");
    ensure!(tickets[0]["details"].to_string().contains("has message"), "{answer}");
    let ticket = posted["ticket_id"].as_str().context("a ticket id")?;
    let (tickets, answer) = found(server, ticket, "ticket").await?;
    ensure!(tickets.len() == 1 && tickets[0]["id"] == ticket, "{answer}");

    // The trace of an event, alone and as a `traceparent`.
    let traceparent = format!("00-{TRACE}-00f067aa0ba902b7-01");
    for words in [TRACE.to_owned(), TRACE.to_uppercase(), traceparent] {
        let (events, answer) = found(server, &words, "event").await?;
        let issue = posted["issue_id"].to_string();
        let is_of_ticket = |event: &Value| event["id"] == issue.as_str();
        ensure!(events.iter().any(is_of_ticket), "{words}: {answer}");
        ensure!(scope(&answer, "Traces").contains("newest 10000 events"), "{answer}");
    }
    let (events, answer) = found(server, &TRACE.replace('4', "5"), "event").await?;
    ensure!(events.is_empty() && scope(&answer, "Traces").contains("10000"), "{answer}");

    // A dead letter, by its entry id and by that of its message.
    let post = async |path: &str, body: Value| {
        let (status, answer) = server.post(path, &body).await?;
        ensure!(status < 300, "{path}: {status} {answer}");
        anyhow::Ok(answer)
    };
    for topic in ["orders", "parcels"] {
        post("/api/v1/topics", json!({"name": topic, "partitions": 1})).await?;
    }
    let group = "/api/v1/topics/orders/groups/billing";
    let mut entries = Vec::new();
    for number in 0..3 {
        let message = json!({"messages": [{"payload": format!("order {number}")}]});
        post("/api/v1/topics/orders/messages", message).await?;
        // The first call may join the group only.
        let pulled = loop {
            let pulled = post(&format!("{group}/pull"), json!({"max": 1, "wait_ms": 5000})).await?;
            if pulled["messages"].as_array().is_some_and(|all| !all.is_empty()) {
                break pulled;
            }
        };
        let reason = format!("order {number} has no address");
        let lease = &pulled["messages"][0]["lease"];
        let settled = json!({"lease": lease, "outcome": "dead_letter", "reason": reason});
        post(&format!("{group}/settle"), json!({"settlements": [settled]})).await?;
        let has_all = |_: u16, page: &Value| {
            page["dead_letters"].as_array().is_some_and(|all| all.len() == number + 1)
        };
        let page = server.until("/api/v1/topics/orders/dead-letters", has_all).await?;
        let letter = &page["dead_letters"][number];
        let id = |name: &str| letter[name].as_str().map(str::to_owned).context("an id");
        entries.push((id("id")?, id("original_id")?, reason));
    }
    for (id, original, reason) in &entries {
        for words in [id, original] {
            let (letters, answer) = found(server, words, "dead_letter").await?;
            ensure!(letters.len() == 1 && letters[0]["id"] == **id, "{words}: {answer}");
            ensure!(letters[0]["topic"] == "orders", "{answer}");
            ensure!(letters[0]["details"].to_string().contains(reason.as_str()), "{answer}");
            let looked = scope(&answer, "Dead letters");
            ensure!(
                looked.contains(words.as_str()) && looked.contains("at most 500 of a topic"),
                "{answer}"
            );
        }
        let (messages, answer) = found(server, original, "message").await?;
        ensure!(messages.iter().any(|message| message["id"] == **original), "{answer}");
    }
    let (id, original, _) = &entries[1];
    let path = format!("/console/search?q={original}");
    let is_whole = |_: u16, page: &Value| page.as_str().is_some_and(is_whole_search_page);
    let shown = server.until(&path, is_whole).await?;
    let address = format!("/console/topics/orders/dead-letters/{id}");
    ensure!(shown.as_str().is_some_and(|shown| shown.contains(&address)), "{shown}");
    ensure!(html(server, &address).await?.contains("order 1 has no address"));
    let printed = place.dir.run(&["search", original, "--url", &server.url(""), "--json"])?;
    ensure!(text(&printed.stdout).contains("dead_letter"), "{}", text(&printed.stderr));

    // Anything else is not looked for there.
    let (letters, answer) = found(server, "7-7", "dead_letter").await?;
    ensure!(letters.is_empty() && scope(&answer, "Dead letters").contains("7-7"), "{answer}");
    let (_, answer) = found(server, "router", "ticket").await?;
    ensure!(scope(&answer, "Dead letters") == "searched by entry id only", "{answer}");
    ensure!(scope(&answer, "Traces") == "searched by trace id only", "{answer}");
    ensure!(scope(&answer, "Tickets").contains("newest 1000 tickets"), "{answer}");
    Ok(())
}

#[tokio::test]
async fn ids_of_messages_traces_and_dead_letters_are_found_on_sqlite() -> Result<()> {
    ids_of_messages_traces_and_dead_letters_are_found(Place::embedded("")?).await
}

#[tokio::test]
async fn ids_of_messages_traces_and_dead_letters_are_found_on_redis_and_postgres() -> Result<()> {
    ids_of_messages_traces_and_dead_letters_are_found(Place::servers()?).await
}

#[tokio::test]
async fn a_limited_token_finds_no_trace_or_dead_letter_of_others() -> Result<()> {
    const SETTINGS: &str = r#"
[[integration]]
id = "shop"
provider = "github"
secret = "not-sent-by-anybody"
[[token]]
name = "root"
role = "admin"
token = "admin-token-of-root"
[[token]]
name = "of-shop"
role = "read"
token = "reader-token-of-shop"
integrations = ["shop"]
"#;
    let mut place = Place::embedded(SETTINGS)?;
    let client = |token: &str| -> Result<reqwest::Client> {
        let bearer = format!("Bearer {token}").parse()?;
        let headers = [(reqwest::header::AUTHORIZATION, bearer)].into_iter().collect();
        Ok(reqwest::Client::builder().default_headers(headers).build()?)
    };
    place.server.client = client("admin-token-of-root")?;
    let posted = open(&place.server, "Router blinks red", "Since yesterday.").await?;
    ensure!(!found(&place.server, TRACE, "event").await?.0.is_empty());

    place.server.client = client("reader-token-of-shop")?;
    let message = posted["message_id"].as_str().context("a message id")?;
    for words in [TRACE, message, "1-0"] {
        let (_, answer) = found(&place.server, words, "").await?;
        ensure!(answer["results"] == json!([]), "{words}: {answer}");
        for source in ["Tickets", "Dead letters"] {
            ensure!(scope(&answer, source) == "not visible for this token", "{answer}");
        }
    }
    Ok(())
}

fn titles(page: &Value) -> Vec<&str> {
    let tickets = page["tickets"].as_array().into_iter().flatten();
    tickets.filter_map(|ticket| ticket["title"].as_str()).collect()
}

async fn the_list_of_tickets_is_searched_for_words(place: Place) -> Result<()> {
    let server = &place.server;
    let first = open(server, "Router blinks red", "Since yesterday.").await?;
    open(server, "Parcel", "The router came broken").await?;
    open(server, "Invoice", "It is too high").await?;
    let close = format!("/api/v1/tickets/{}/close", first["ticket_id"].as_str().context("an id")?);
    ensure!(server.post(&close, &json!({})).await?.0 == 200);
    for (query, expected, matching, searched) in [
        ("words=ROUTER%20please", &["Parcel", "Router blinks red"][..], None, 3),
        ("words=router&count=true&oldest_first=true", &["Router blinks red", "Parcel"], Some(2), 3),
        ("words=router&status=open&count=true", &["Parcel"], Some(1), 2),
        ("words=router&user_id=bob&count=true", &[], Some(0), 0),
        ("words=router&handed_over=true", &[], None, 0),
        ("words=yesterday&user_id=ada", &["Router blinks red"], None, 3),
    ] {
        let (status, page) = server.get(&format!("/api/v1/tickets?{query}")).await?;
        ensure!(status == 200 && titles(&page) == expected, "{query}: {page}");
        ensure!(page["searched"] == searched && page["next_cursor"].is_null(), "{query}: {page}");
        ensure!(page["matching"] == json!(matching), "{query}: {page}");
    }
    let (_, page) = server.get("/api/v1/tickets?words=router&limit=1").await?;
    let next = format!("/api/v1/tickets?words=router&limit=1&cursor={}", page["next_cursor"]);
    ensure!(titles(&server.get(&next).await?.1) == ["Router blinks red"], "{page}");
    let (_, page) = server.get("/api/v1/tickets").await?;
    ensure!(page.get("searched").is_none() && titles(&page).len() == 3, "{page}");
    for bad in ["", "ab", "a%20b", "%00nul", &"router".repeat(40)] {
        let (status, refused) = server.get(&format!("/api/v1/tickets?words={bad}")).await?;
        ensure!(status == 400, "{bad}: {refused}");
        ensure!(refused["error"]["message"].to_string().contains("3 letters"), "{refused}");
    }

    let (dir, url) = (&place.dir, server.url(""));
    let listed = dir.run(&["ticket", "list", "--words", "router", "--json", "--url", &url])?;
    let lines = text(&listed.stdout);
    ensure!(lines.lines().count() == 2 && lines.contains("Parcel"), "{}", text(&listed.stderr));
    let refused = dir.run(&["ticket", "list", "--words", "ab", "--url", &url])?;
    ensure!(refused.status.code() == Some(2), "{}", text(&refused.stderr));

    let shown = html(server, "/console/tickets?words=router&status=open").await?;
    for part in
        ["Parcel", "1 ticket matches.", "headwater ticket list --status open --words router"]
    {
        ensure!(shown.contains(part), "{part}: {shown}");
    }
    ensure!(!shown.contains("Invoice"), "{shown}");
    let shown = html(server, "/console/tickets?words=ab").await?;
    ensure!(shown.contains("3 letters or more"), "{shown}");
    Ok(())
}

#[tokio::test]
async fn the_list_of_tickets_is_searched_for_words_on_sqlite() -> Result<()> {
    the_list_of_tickets_is_searched_for_words(Place::embedded("")?).await
}

#[tokio::test]
async fn the_list_of_tickets_is_searched_for_words_on_postgres() -> Result<()> {
    the_list_of_tickets_is_searched_for_words(Place::servers()?).await
}
