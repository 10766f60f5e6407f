//! Actions that fail because PostgreSQL or Redis is down: the page says whether something was done, and offers the same form again.

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use headwater_testkit::{Postgres, Redis};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use crate::support::desk::{all_idle, open};
use crate::support::{LIMIT, Server, ServerDir};

/// Sends a form as a browser does. Returns the status and the page.
async fn submit(server: &Server, path: &str, form: &str) -> Result<(u16, String)> {
    let request = server.client.post(server.url(path)).header("origin", server.url(""));
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    let response = request.body(form.to_owned()).send().await?;
    Ok((response.status().as_u16(), response.text().await?))
}

/// The fields of the form of a page that posts to this path: what a browser would send again.
fn fields(page: &str, path: &str) -> Result<String> {
    let form = page.split(&format!("method=\"post\" action=\"{path}\"")).nth(1);
    let form = form.and_then(|rest| rest.split("</form>").next());
    let form = form.with_context(|| format!("no form for {path}: {page}"))?;
    let mut fields = Vec::new();
    for field in form.split(" name=\"").skip(1) {
        let (name, rest) = field.split_once('"').context("a name")?;
        let value = match rest.strip_prefix(" value=\"") {
            Some(rest) => rest.split('"').next(),
            // A browser leaves out the first line break.
            None => rest.split(">\n").nth(1).and_then(|rest| rest.split("</textarea>").next()),
        };
        let value = value.with_context(|| format!("a value of {name}"))?.replace("&amp;", "&");
        let value: String = value.bytes().map(|byte| format!("%{byte:02X}")).collect();
        fields.push(format!("{name}={value}"));
    }
    Ok(fields.join("&"))
}

/// Sends a form until its page is that of an action that failed.
async fn failed(server: &Server, path: &str, form: &str, title: &str) -> Result<String> {
    let deadline = std::time::Instant::now() + LIMIT;
    loop {
        let (status, page) = submit(server, path, form).await?;
        ensure!(status == 503, "{path}: {status} {page}");
        if page.contains(&format!("<h1><bdi>{title}</bdi></h1>")) {
            ensure!(page.contains("Try again") && page.contains("Go back"), "{path}: {page}");
            ensure!(!page.contains("The rest of this page"), "{path}: {page}");
            return Ok(page);
        }
        ensure!(std::time::Instant::now() < deadline, "{path} is not {title:?}: {page}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_that_fails_says_whether_something_was_done_and_keeps_what_was_typed()
-> Result<()> {
    let (redis, postgres) = (Redis::start()?, Postgres::start()?);
    let database = postgres.database()?;
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--stream-url", &redis.url(), "--database-url", &database.url()])?;
    let ticket = open(&server, "Hello.").await?;
    let ticket = ticket["ticket_id"].as_str().context("a ticket")?.to_owned();
    all_idle(&server).await?;
    let topic = json!({"name": "orders", "partitions": 1});
    ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201);

    postgres.stop()?;
    let reply = format!("/console/do/tickets/{ticket}/reply");
    let typed =
        "message_id=0199f4b4-3d0c-7d5c-9c1b-2f60b4b0a001&content=Please+unplug+it+%26+wait.";
    let page = failed(&server, &reply, typed, "The reply was not stored").await?;
    ensure!(page.contains("Nothing was changed: "), "{page}");
    ensure!(page.contains(&format!("<a href=\"/console/tickets/{ticket}\">Go back</a>")), "{page}");
    let again = fields(&page, &reply)?;
    // What it fails with again is the same.
    let page = failed(&server, &reply, &again, "The reply was not stored").await?;
    ensure!(fields(&page, &reply)? == again, "{page}");
    let filter = "select=matching&reason=no+address&confirm=3";
    let close = format!("/console/do/tickets/{ticket}/close");
    let others = [
        (&*close, "", "The ticket was not closed"),
        ("/console/do/issues/1/retry", "", "The issue was not retried"),
        ("/console/do/issues/retry", "confirm=1", "The issues were not retried"),
        ("/console/do/outbox/1/retry", "", "The reply was not queued"),
        ("/console/do/drafts/1/approve", "version=1&content=Yes.", "The draft was not approved"),
        ("/console/do/plans/1/pause", "", "The replay plan was not paused"),
        (
            "/console/do/topics/orders/dead-letters/purge",
            filter,
            "The dead letters were not purged",
        ),
    ];
    // At once: those whose route does not fail fast wait for a connection.
    let others = others.map(|(path, form, title)| failed(&server, path, form, title));
    for page in try_join_all(others).await? {
        ensure!(page.contains("Nothing was changed: "), "{page}");
    }
    ensure!(server.log().contains("an action of the console failed"), "{}", server.log());

    postgres.restart()?;
    server.until("/api/v1/overview", |_, overview| overview["issues"].is_object()).await?;
    for _ in 0..2 {
        let (status, page) = submit(&server, &reply, &again).await?;
        ensure!(status == 200 && page.contains("The reply is stored."), "{status} {page}");
    }
    let (_, shown) = server.get(&format!("/api/v1/tickets/{ticket}")).await?;
    let is_reply = |message: &&Value| message["content"] == "Please unplug it & wait.";
    let messages = shown["messages"].as_array().context("messages")?;
    ensure!(messages.iter().filter(is_reply).count() == 1, "{shown}");
    // A refusal has its own status.
    let (status, page) = submit(&server, "/console/do/topics/no/delete", "").await?;
    ensure!(status == 404 && page.contains("The topic was not deleted"), "{status} {page}");
    ensure!(!page.contains("Try again"), "{page}");

    redis.kill9()?;
    let produce = "/console/do/topics/orders/produce";
    let typed = "key=k&payload=%0Aorder+7";
    let page = failed(&server, produce, typed, "The message may have been stored").await?;
    ensure!(page.contains("sent again, it may be stored twice"), "{page}");
    ensure!(fields(&page, produce)? == "key=%6B&payload=%0A%6F%72%64%65%72%20%37", "{page}");
    let purge = "/console/do/topics/orders/dead-letters/purge";
    let page = failed(&server, purge, filter, "The dead letters were not purged").await?;
    let back = "/console/topics/orders/dead-letters?reason=no%20address";
    ensure!(page.contains(&format!("<a href=\"{back}\">Go back</a>")), "{page}");
    the_request_id_of_a_page_is_in_the_log(&server).await
}

/// Redis is down: the request id of a page that cannot be shown is in the log.
async fn the_request_id_of_a_page_is_in_the_log(server: &Server) -> Result<()> {
    let response = server.client.get(server.url("/console/topics/orders")).send().await?;
    let id = response.headers()["x-request-id"].to_str()?.to_owned();
    let page = response.text().await?;
    ensure!(page.contains("cannot be shown") && page.contains(&id), "{page}");
    let deadline = Instant::now() + LIMIT;
    while !server.log().contains(&id) {
        ensure!(Instant::now() < deadline, "{id} is not in the log: {}", server.log());
        sleep(Duration::from_millis(20)).await;
    }

    Ok(())
}
