//! Details of single objects: a long conversation, an issue with many events, the file of a session, a message as it was sent, and one that is gone.

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::json;

use crate::fixture::{ConsoleFixture, Reader};
use crate::support::Server;

#[tokio::test]
async fn long_conversations_files_of_sessions_and_messages_that_are_gone() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let server = &fixture.server;
    let reader = Reader::start(server, BrowserScripts::On).await?;

    // A conversation of more than one page.
    let insert = format!(
        "INSERT INTO ticket_messages (message_id, ticket_id, author, content, created_at)
         SELECT gen_random_uuid(), '{}', 'agent', 'note number ' || n, now() FROM generate_series(1, 205) AS n",
        data.ticket
    );
    fixture.database.query(&insert)?;
    let shown = reader.open(&format!("/console/tickets/{}", data.ticket)).await?;
    // The newest ones, which an agent answers.
    ensure!(shown.contains("note number 6\n") && !shown.contains("note number 5\n"), "{shown}");
    ensure!(shown.contains("note number 205"), "{shown}");
    reader.click("Earlier messages").await?;
    reader.until_shown("note number 5\n").await?;
    let shown = reader.text().await?;
    ensure!(!shown.contains("note number 6\n") && !shown.contains("Earlier messages"), "{shown}");
    ensure!(shown.contains("Since yesterday."), "{shown}");
    reader.must_be_accessible("the beginning of a long conversation").await?;
    reader.click("Newest messages").await?;
    reader.until_shown("note number 205").await?;
    let path = format!("/api/v1/tickets/{}/messages", data.ticket);
    let (status, both) = server.get(&format!("{path}?cursor=1&before=9")).await?;
    ensure!(status == 400, "{both}");
    let (_, none) = server.get(&format!("{path}?before=1")).await?;
    ensure!(none == json!({"messages": [], "next_cursor": null}), "{none}");

    // An issue with more events than a page has: the newest ones first.
    let insert = format!(
        "INSERT INTO event_logs (issue_id, integration_id, source, event_type, dedup_key, digest, payload, payload_bytes, processed_at)
         SELECT id, integration_id, 'console', 'event number ' || n, 'event-' || n, '', '{{}}', 2, now()
         FROM issues, generate_series(1, 21) AS n WHERE id = {}",
        data.quarantined
    );
    fixture.database.query(&insert)?;
    let shown = reader.open(&format!("/console/issues/{}", data.quarantined)).await?;
    ensure!(shown.contains("event number 21") && !shown.contains("event number 1 "), "{shown}");
    reader.click("Next page").await?;
    reader.until_shown("event number 1 ").await?;

    // A session as a file, which can be imported again.
    reader.open(&format!("/console/sessions/{}", data.session)).await?;
    let link = reader.find("a[download]").await?;
    let address = link.attribute("href").await?.context("an address")?;
    let file = server.client.get(server.url(&address)).send().await?;
    ensure!(file.headers()["content-disposition"] == "attachment; filename=\"session.jsonl\"");
    let file = file.text().await?;
    let import = server.client.post(server.url("/api/v1/sessions/imported/import"));
    let body = file.clone();
    let import = import.header("content-type", "application/x-ndjson").body(body).send().await?;
    ensure!(import.status().is_success(), "{}", import.text().await?);
    reader.open("/console/sessions/imported").await?;
    reader.until_shown("PromptExecuted").await?;
    forks_that_differ_are_marked(&reader, server, &data.session, &file).await?;

    // A payload as it was sent, beside the indented one.
    reader.open(&format!("/console/topics/orders/messages/{}", data.message)).await?;
    // Messages of several partitions may have the same id: all of them are shown.
    let open_all =
        "for (const one of document.querySelectorAll('main details:has(pre)')) one.open = true";
    reader.driver().execute(open_all).await?;
    reader.until_shown("{\"order\":5,\"total\":12.5}").await?;
    // The time of the reader is beside UTC.
    let hover = "const at = document.querySelector('main time'); at.dispatchEvent(new MouseEvent('mouseover', {bubbles: true})); return at.title";
    let title = reader.driver().execute(hover).await?;
    let title = title.as_str().context("a title")?;
    ensure!(title.contains(" here, ") && title.ends_with(" UTC"), "{title}");

    // A message that is gone: since when messages are stored.
    let body = json!({"count": 0, "force": true});
    let (status, trimmed) = server.post("/api/v1/topics/orders/trim", &body).await?;
    ensure!(status == 200, "{trimmed}");
    let message = json!({"messages": [{"key": "customer-5", "payload": "later"}]});
    let (_, sent) = server.post("/api/v1/topics/orders/messages", &message).await?;
    let oldest = sent["messages"][0]["id"].as_str().context("an id")?;
    let gone = format!("/console/topics/orders/messages/{}", data.message);
    // If several partitions had this id, that is known for another second.
    let since = format!("trimmed, or never stored; the oldest stored message is `{oldest}`, of ");
    reader.until_reopened(&gone, &since).await?;
    reader.until_shown("Message not found").await?;
    reader.must_be_clean(&["status of 404"]).await?;

    // A sample of dead replies leads to its row.
    reader.open("/console/failures").await?;
    reader.click("status #").await?;
    reader.find("main tbody th a").await?.click().await?;
    reader.until_shown("was given up after").await?;
    ensure!(reader.path().await? == format!("/console/outbox/{}", data.dead_reply));
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}

/// An exported session with the checksum of the entries that it has now.
fn with_checksum(file: &str) -> Result<String> {
    let mut lines: Vec<&str> = file.lines().collect();
    let mut end: serde_json::Value = serde_json::from_str(lines.pop().context("an end")?)?;
    let mut checksum = crc32fast::Hasher::new();
    for line in lines.iter().filter(|line| line.starts_with("{\"entry\"")) {
        checksum.update(line.as_bytes());
    }
    end["end"]["crc32"] = checksum.finalize().into();
    Ok(format!("{}\n{end}\n", lines.join("\n")))
}

/// Two sessions side by side: an event that differs, one that is the same, and those that only one of them has.
async fn forks_that_differ_are_marked(
    reader: &Reader,
    server: &Server,
    session: &str,
    file: &str,
) -> Result<()> {
    let compare = async |with: &str| {
        reader.open(&format!("/console/sessions/{session}/compare?with={with}")).await
    };
    // Another prompt at the beginning; what follows is the same.
    let edited = file.replacen("Since yesterday.", "Since the storm.", 1);
    ensure!(edited != file && file.lines().count() > 1, "{file}");
    let edited = with_checksum(&edited)?;
    let import = server.client.post(server.url("/api/v1/sessions/edited/import"));
    let import = import.header("content-type", "application/x-ndjson").body(edited).send().await?;
    ensure!(import.status().is_success(), "{}", import.text().await?);
    let shown = compare("edited").await?;
    ensure!(shown.contains("What follows differs:"), "{shown}");
    let marks = "return [...document.querySelectorAll('.side-by-side section')].map(section => [...section.querySelectorAll('mark')].map(mark => mark.textContent))";
    let marks: Vec<Vec<String>> = serde_json::from_value(reader.driver().execute(marks).await?)?;
    ensure!(marks.len() == 2 && marks.iter().all(|all| all.len() == 1), "{marks:?}");
    for (all, text) in marks.iter().zip(["Since yesterday.", "Since the storm."]) {
        ensure!(all[0].starts_with("Differs: ") && all[0].contains(text), "{marks:?}");
    }
    let badges =
        |shown: &str, text: &str| shown.lines().filter(|line| line.ends_with(text)).count();
    ensure!(badges(&shown, " differs") == 2 && badges(&shown, " the same") >= 2, "{shown}");
    reader.must_be_accessible("a comparison").await?;
    reader.browser.set_color_scheme("dark").await?;
    reader.must_have_contrast("a comparison").await?;
    reader.browser.set_color_scheme("light").await?;

    // A fork that ends after the first event.
    let (_, events) = server.get(&format!("/api/v1/sessions/{session}/events")).await?;
    let events = events["events"].as_array().context("events")?;
    let fork = json!({"session": "short", "until": events[0]["id"]});
    let (status, forked) = server.post(&format!("/api/v1/sessions/{session}/fork"), &fork).await?;
    ensure!(status < 300, "{forked}");
    let shown = compare("short").await?;
    ensure!(shown.contains("No further event."), "{shown}");
    ensure!(badges(&shown, " only here") == events.len() - 1, "{shown}");
    ensure!(reader.driver().count("mark").await? == 0, "{shown}");
    reader.must_be_clean(&[]).await
}
