//! Grow and trim a topic, purge and export one cause, retry all that wait: with a dry run first, the role, and the audit log.

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::{Value, json};

use crate::fixture::{ConsoleFixture, Reader};
use crate::support::{Server, ServerDir, text};

async fn topic(server: &Server) -> Result<Value> {
    let (status, topic) = server.get("/api/v1/topics/orders").await?;
    ensure!(status == 200, "{topic}");
    Ok(topic)
}

#[tokio::test]
async fn topics_grow_and_are_trimmed_and_a_cause_is_purged_without_scripts() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    fixture.fill().await?;
    let server = &fixture.server;
    let reader = Reader::start(server, BrowserScripts::Off).await?;

    // Grow: the dry run changes nothing.
    reader.open("/console/topics/orders").await?;
    reader.find_xpath("//summary[.='Add partitions']").await?.click().await?;
    reader.fill("partitions", "6").await?;
    reader.click("Grow…").await?;
    reader.until_shown("Add 2 partitions?").await?;
    reader.until_shown("headwater topic grow orders --partitions 6").await?;
    reader.until_shown("Groups that share the new partitions: billing.").await?;
    ensure!(topic(server).await?["partitions"].as_array().context("partitions")?.len() == 4);
    reader.click("Add 2 partitions").await?;
    reader.until_shown("2 partitions were added.").await?;
    ensure!(topic(server).await?["partitions"].as_array().context("partitions")?.len() == 6);
    for wrong in ["3", "2000", "x"] {
        reader.open("/console/topics/orders").await?;
        reader.find_xpath("//summary[.='Add partitions']").await?.click().await?;
        reader.fill("partitions", wrong).await?;
        reader.click("Grow…").await?;
        reader.until_shown("Code").await?;
    }

    // Trim: what the group has not read stays, unless it is forced.
    let before = topic(server).await?["length"].as_u64().context("a length")?;
    ensure!(before == 6, "{before} messages");
    let (_, tried) =
        server.post("/api/v1/topics/orders/trim", &json!({"count": 0, "dry_run": true})).await?;
    let free = tried["removed"].as_u64().context("a number")?;
    ensure!(tried["held_back"] == true && tried["is_done"] == false && free < 6, "{tried}");
    reader.open("/console/topics/orders").await?;
    reader.find_xpath("//summary[.='Remove the oldest messages']").await?.click().await?;
    reader.fill("trim-count", "0").await?;
    reader.find("input[name=force]").await?.click().await?;
    reader.click("Trim…").await?;
    reader.until_shown("Trim 6 messages?").await?;
    reader.until_shown("headwater topic trim orders --count 0 --force --yes").await?;
    reader.until_shown("are lost.").await?;
    ensure!(topic(server).await?["length"] == 6, "a dry run changes nothing");
    reader.click("Trim 6 messages").await?;
    reader.until_shown("6 messages were removed.").await?;
    ensure!(topic(server).await?["length"] == 0);
    // By age: all that is left is younger. The group has not read it, which does not matter.
    let message = json!({"messages": [{"payload": "young"}]});
    ensure!(server.post("/api/v1/topics/orders/messages", &message).await?.0 == 201);
    reader.open("/console/topics/orders").await?;
    reader.find_xpath("//summary[.='Remove the oldest messages']").await?.click().await?;
    reader.fill("trim-hours", "24").await?;
    reader.find("input[name=force]").await?.click().await?;
    reader.click("Trim…").await?;
    reader.until_shown("Nothing matches, so there is nothing to do.").await?;
    reader.until_shown("headwater topic trim orders --age 24h --force --yes").await?;
    ensure!(topic(server).await?["length"] == 1);
    // Nothing to keep is refused.
    reader.open("/console/topics/orders").await?;
    reader.find_xpath("//summary[.='Remove the oldest messages']").await?.click().await?;
    reader.click("Trim…").await?;
    reader.until_shown("it keeps everything").await?;

    // One cause: exported, then purged.
    reader.open("/console/failures").await?;
    reader.click("order # has no address").await?;
    let address = reader.find("a[download]").await?.attribute("href").await?.context("a link")?;
    let (status, exported) = server.get(&address).await?;
    ensure!(status == 200 && exported["ids"].as_array().map(Vec::len) == Some(3), "{exported}");
    ensure!(exported["curve"].as_array().map(Vec::len) == Some(24), "{exported}");
    reader.click("Purge 3 dead letters…").await?;
    reader.until_shown("This cannot be undone.").await?;
    reader.until_shown("Groups of the topic: billing.").await?;
    reader.click("Purge 3 dead letters").await?;
    reader.until_shown("3 deleted permanently.").await?;
    ensure!(topic(server).await?["dead_letters"] == 1);

    // Issues that wait are retried; a text of the error selects.
    let waiting = "UPDATE issues SET quarantined_at = NULL, processing_status = 'queued', pending_events = 1,
        not_before = now() + interval '1 day', first_pending_at = now() WHERE external_project_id = 'acme/shop' AND external_issue_id IN ('1', '2')";
    fixture.database.query(waiting)?;
    reader.open("/console/issues?status=queued").await?;
    reader.fill("error", "payment 2").await?;
    reader.click("Filter").await?;
    // The page before it shows this issue, too.
    let is_filtered =
        "return location.search.includes('error=') && document.readyState === 'complete'";
    reader.until(is_filtered).await?;
    reader.until_shown("payment 2 refused").await?;
    reader.click("Retry all that wait…").await?;
    reader.until_shown("Retry 1 issue?").await?;
    reader.until_shown("headwater issue retry --all --waiting --error 'payment 2' --yes").await?;
    reader.click("Retry 1 issue").await?;
    reader.until_shown("1 do not wait any longer.").await?;

    let (_, audit) = server.get("/api/v1/audit?limit=500").await?;
    let entries = audit["entries"].as_array().context("entries")?;
    for (path, expected) in
        [("/api/v1/topics/orders/dead-letters/purge", 1), ("/api/v1/issues/retry", 1)]
    {
        let found = entries.iter().filter(|entry| entry["path"] == path).count();
        ensure!(found == expected, "{path}: {found}");
    }
    // Once, although each was tried first; what was refused is in the log, too.
    for (path, refused) in [("/api/v1/topics/orders/grow", 3), ("/api/v1/topics/orders/trim", 1)] {
        let with = |status| {
            entries
                .iter()
                .filter(|entry| entry["path"] == path && entry["status"] == status)
                .count()
        };
        ensure!((with(200), with(400)) == (1, refused), "{path}: {audit:#}");
    }
    reader.must_be_clean(&["status of 400"]).await?;
    reader.browser.quit().await
}

#[tokio::test]
async fn topics_are_found_by_a_part_of_their_name() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    for name in ["payments", "orders", "order-mails", "a_b"] {
        let topic = json!({"name": name, "partitions": 1});
        ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201, "{name}");
    }
    let listed = async |query: &str| {
        let (status, page) = server.get(&format!("/api/v1/topics?{query}")).await?;
        ensure!(status == 200, "{query}: {page}");
        let topics = page["topics"].as_array().context("topics")?;
        let names: Vec<String> = topics.iter().map(|topic| topic["name"].to_string()).collect();
        Ok((names.join(" ").replace('"', ""), page["next_cursor"].clone()))
    };
    ensure!(listed("name=ORDER").await? == ("order-mails orders".to_owned(), Value::Null));
    ensure!(listed("name=none").await? == (String::new(), Value::Null));
    ensure!(listed("name=_").await? == ("a_b".to_owned(), Value::Null), "no wildcard");
    let (first, next) = listed("name=order&limit=1").await?;
    ensure!(first == "order-mails" && next == "order-mails", "{first} {next}");
    let further = listed("name=order&limit=1&cursor=order-mails").await?;
    ensure!(further == ("orders".to_owned(), Value::Null), "{further:?}");

    let url = server.url("");
    let found = dir.run(&["topic", "list", "--name", "mails", "--json", "--url", &url])?;
    let found = text(&found.stdout);
    ensure!(found.lines().count() == 1 && found.contains("\"order-mails\""), "{found}");

    let page = async |path: &str| {
        anyhow::Ok(server.client.get(server.url(path)).send().await?.text().await?)
    };
    let shown = page("/console/topics?name=order").await?;
    for part in ["/console/topics/orders", "/console/topics/order-mails", "topic list --name order"]
    {
        ensure!(shown.contains(part), "{part}: {shown}");
    }
    ensure!(!shown.contains("/console/topics/payments"), "{shown}");
    ensure!(page("/console/topics?name=none").await?.contains("No topic has this in its name."));
    Ok(())
}
