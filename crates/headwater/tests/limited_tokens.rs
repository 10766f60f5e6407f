//! Tokens that are limited to integrations: no route shows or changes anything of another one.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::receivers::{Fault, Receiver};
use crate::support::sender::{SECRET, github, github_issues, gitlab, gitlab_issue, send};
use crate::support::{Server, ServerDir, text};

const BOSS: &str = "admin-admin-admin-admin";
const SHOP: &str = "shop-shop-shop-shop";
const WORKS: &str = "works-works-works-works";
/// In every text of the integration `shop`.
const MARK: &str = "zebracrossing";
/// An id that no object has, and such a ticket.
const NOTHING: &str = "1234567890";
const NO_TICKET: &str = "/tickets/6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff";

fn place(url: &str) -> Result<ServerDir> {
    let integration = |id: &str, provider: &str| {
        format!(
            "[[integration]]\nid = \"{id}\"\nprovider = \"{provider}\"\nsecret = \"{SECRET}\"\nbase_url = \"{url}\"\n\
             reply_token_env = \"TOKEN\"\n"
        )
    };
    let token = |name: &str, token: &str, more: &str| {
        format!("[[token]]\nname = \"{name}\"\nrole = \"admin\"\ntoken = \"{token}\"\n{more}\n")
    };
    let rules = "[[integration.rule]]\nmode = \"draft\"\nwords = [\"draft\"]\n";
    let settings = [
        integration("shop", "github") + rules,
        integration("works", "gitlab"),
        token("boss", BOSS, ""),
        token("of-shop", SHOP, "integrations = [\"shop\", \"desk\"]"),
        token("of-works", WORKS, "integrations = [\"works\"]"),
    ];
    let place = ServerDir::new()?.settings(&settings.concat())?.variable("TOKEN", "a token");
    Ok(place.variable("HEADWATER_DESK_LINK_SECRET", "sixteen letters or more"))
}

async fn call(
    server: &Server,
    method: &str,
    path: &str,
    token: &str,
    body: Option<Value>,
) -> Result<(u16, Value)> {
    let method = Method::from_bytes(method.to_uppercase().as_bytes())?;
    let request = server.client.request(method, server.url(path)).bearer_auth(token);
    let request = match body {
        Some(body) => request.json(&body),
        None => request,
    };
    let response = request.send().await?;
    let status = response.status().as_u16();
    // An event stream has no end to wait for.
    let kind = response.headers().get("content-type").cloned();
    if status == 200 && kind.is_some_and(|kind| kind == "text/event-stream") {
        return Ok((status, json!("an event stream")));
    }
    let text = response.text().await?;
    Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
}

async fn until(server: &Server, path: &str, is_it: impl Fn(&Value) -> bool) -> Result<Value> {
    for _ in 0..3000 {
        let (_, body) = call(server, "get", path, BOSS, None).await?;
        if is_it(&body) {
            return Ok(body);
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    anyhow::bail!("condition not met for {path}:\n{}", server.log())
}

/// A server with issues, a draft, a dead reply, events and sessions of `shop`, a ticket, and an issue of `works`. Returns the
/// ids that paths of the API take.
async fn fill(server: &Server, receiver: &Receiver) -> Result<BTreeMap<&'static str, String>> {
    // The reply to the first issue is rejected, and so dead.
    receiver.fail_next(Fault::RespondWithBody(422, "unprocessable"));
    for (number, text) in [(1, "Hello"), (2, "A draft, please")] {
        let body = github_issues("opened", number, &format!("{text} {MARK}")).to_string();
        let delivery = format!("d-{number}");
        let (status, body) = send(github(server, "issues", &delivery, body.as_bytes())).await?;
        ensure!(status == 200, "{status} {body}");
        if number == 1 {
            until(server, "/api/v1/outbox/dead", |body| body["rows"] != json!([])).await?;
        }
    }
    let drafts = until(server, "/api/v1/drafts", |body| body["drafts"] != json!([])).await?;
    let (_, dead) = call(server, "get", "/api/v1/outbox/dead", BOSS, None).await?;
    let payload = gitlab_issue("open", 3, json!({}));
    ensure!(send(gitlab(server, "Issue Hook", "g-3", &payload)).await?.0 == 200);
    let ticket = json!({"title": MARK, "content": MARK, "user_id": MARK});
    let (_, ticket) = call(server, "post", "/api/v1/tickets", BOSS, Some(ticket)).await?;
    let sessions = until(server, "/api/v1/sessions", |body| {
        let found = body["sessions"].as_array().map_or(0, Vec::len);
        found >= 4
    });
    let sessions = sessions.await?;
    let issue = drafts["drafts"][0]["issue_id"].to_string();
    let session = sessions["sessions"].as_array().context("sessions")?.iter().find_map(|one| {
        let name = one["session"].as_str()?;
        name.starts_with(&format!("issue-{issue}-run-")).then(|| name.to_owned())
    });
    let path = format!("/api/v1/issues/{issue}/events");
    let (_, events) = call(server, "get", &path, BOSS, None).await?;
    let (_, failures) = call(server, "get", "/api/v1/failures", BOSS, None).await?;
    let cluster = failures["clusters"][0]["id"].as_str().context("a cluster")?;
    Ok(BTreeMap::from([
        ("issues", issue),
        ("drafts", drafts["drafts"][0]["id"].to_string()),
        ("outbox", dead["rows"][0]["id"].to_string()),
        ("event-logs", events["events"][0]["id"].to_string()),
        ("event", events["events"][0]["id"].to_string()),
        ("sessions", session.context("the session")?),
        ("tickets", ticket["ticket_id"].as_str().context("a ticket")?.to_owned()),
        ("prompts", "shop".to_owned()),
        ("failures", cluster.to_owned()),
    ]))
}

/// The address of an operation, with ids of objects of `shop`.
fn address(path: &str, ids: &BTreeMap<&str, String>) -> String {
    let parts: Vec<&str> = path.split('/').collect();
    let filled = parts.iter().enumerate().map(|(place, part)| match *part {
        "{event}" => ids["event"].clone(),
        part if part.starts_with('{') => {
            ids.get(parts[place - 1]).cloned().unwrap_or_else(|| "ticket_events".to_owned())
        }
        part => part.to_owned(),
    });
    let filled: Vec<String> = filled.collect();
    let query = if path.ends_with("/search") { format!("?q={MARK}") } else { String::new() };
    format!("{}{query}", filled.join("/"))
}

/// Operations that do not need a token.
fn is_open(path: &str) -> bool {
    path.starts_with("/health") || path.starts_with("/webhooks")
}

#[tokio::test(flavor = "multi_thread")]
async fn no_operation_of_the_api_shows_or_changes_another_integration() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url)?;
    let server = place.serve(&["--issue-quiet", "10ms"])?;
    let ids = fill(&server, &receiver).await?;
    let (_, description) = call(&server, "get", "/openapi.json", BOSS, None).await?;
    let paths = description["paths"].as_object().context("paths")?;
    let (mut refused, mut hidden, mut filtered) = (Vec::new(), Vec::new(), Vec::new());
    for (path, item) in paths.iter().filter(|(path, _)| !is_open(path)) {
        for method in
            ["get", "post", "put", "delete"].into_iter().filter(|one| item.get(one).is_some())
        {
            let name = format!("{method} {path}");
            let address = address(path, &ids);
            let body = (method == "post").then(|| json!({}));
            let (status, answer) = call(&server, method, &address, WORKS, body).await?;
            assert!(!answer.to_string().contains(MARK), "{name} shows {answer}");
            match status {
                403 => {
                    assert_eq!(answer["error"]["code"], "limited_token", "{name}: {answer}");
                    refused.push(name);
                }
                404 => hidden.push(name),
                200 => filtered.push(name),
                other => panic!("{name}: {other} {answer}"),
            }
            // What is refused does not depend on whether the object exists.
            if path.contains('{') {
                let nothing = ids.keys().map(|kind| (*kind, NOTHING.to_owned())).collect();
                let unknown =
                    self::address(path, &nothing).replace("/tickets/1234567890", NO_TICKET);
                let body = (method == "post").then(|| json!({}));
                let (again, other) = call(&server, method, &unknown, WORKS, body).await?;
                assert_eq!(again, status, "{method} {unknown}: {other}");
            }
        }
    }
    // A route is refused until it is listed as allowed for limited tokens.
    assert!(refused.len() > 40 && hidden.len() > 20, "{refused:?} {hidden:?}");
    assert_eq!(
        filtered,
        [
            "get /api/v1/drafts",
            "get /api/v1/failures",
            "get /api/v1/issues",
            "post /api/v1/issues/release",
            "post /api/v1/issues/retry",
            "get /api/v1/me",
            "get /api/v1/outbox",
            "get /api/v1/outbox/dead",
            "post /api/v1/outbox/retry",
            "get /api/v1/prompts",
            "get /api/v1/search",
            "get /api/v1/sessions",
            "get /api/v1/webhooks",
            "get /openapi.json",
        ]
    );
    // Nothing of `shop` was changed.
    let (_, dead) = call(&server, "get", "/api/v1/outbox/dead", BOSS, None).await?;
    assert_eq!(dead["rows"][0]["id"].to_string(), ids["outbox"], "{dead:#}");
    let path = format!("/api/v1/drafts/{}", ids["drafts"]);
    let (_, draft) = call(&server, "get", &path, BOSS, None).await?;
    assert_eq!((&draft["status"], &draft["version"]), (&json!("pending"), &json!(1)), "{draft:#}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limited_token_sees_and_changes_its_own_integrations() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url)?;
    let server = place.serve(&["--issue-quiet", "10ms", "--analytics-path", ""])?;
    let ids = fill(&server, &receiver).await?;
    let count = async |path: &str, list: &str, token: &str| {
        let (status, body) = call(&server, "get", path, token, None).await?;
        ensure!(status == 200, "{path}: {status} {body}");
        anyhow::Ok(body[list].as_array().map_or(0, Vec::len))
    };
    for (path, list, of_shop, of_works) in [
        ("/api/v1/issues", "issues", 3, 1),
        ("/api/v1/issues?integration=shop", "issues", 2, 0),
        ("/api/v1/drafts", "drafts", 1, 0),
        ("/api/v1/drafts?integration=shop", "drafts", 1, 0),
        ("/api/v1/outbox/dead", "rows", 1, 0),
        ("/api/v1/outbox/dead?limit=1", "rows", 1, 0),
        ("/api/v1/outbox?status=dead", "rows", 1, 0),
        ("/api/v1/failures", "clusters", 1, 0),
        ("/api/v1/prompts", "prompts", 2, 1),
        ("/api/v1/webhooks", "integrations", 1, 1),
        ("/api/v1/sessions", "sessions", 3, 1),
        (&format!("/api/v1/search?q={MARK}"), "results", 1, 0),
    ] {
        assert_eq!(count(path, list, SHOP).await?, of_shop, "{path}");
        assert_eq!(count(path, list, WORKS).await?, of_works, "{path}");
    }
    // A number may be that of an issue, an event and an outbox row; each is found only by who can see its issue.
    for (token, expected) in [(SHOP, 1), (WORKS, 0)] {
        let path = format!("/api/v1/search?q={}", ids["issues"]);
        let (_, found) = call(&server, "get", &path, token, None).await?;
        let results = found["results"].as_array().cloned().unwrap_or_default();
        let issues = results.iter().filter(|one| one["kind"] == "issue").count();
        assert_eq!(issues, expected, "{found:#}");
        let of_issue = format!("of issue {}", ids["issues"]);
        let details = results.iter().filter_map(|one| one["details"].as_str());
        let is_of = |details: &&str| details.ends_with(&of_issue);
        assert!(expected == 1 || !details.into_iter().any(|text| is_of(&text)), "{found:#}");
    }
    // Pages follow ids over several integrations.
    let (_, first) = call(&server, "get", "/api/v1/issues?limit=2", SHOP, None).await?;
    let path = format!("/api/v1/issues?limit=2&cursor={}", first["next_cursor"]);
    assert_eq!(count(&path, "issues", SHOP).await?, 1, "{first:#}");

    for path in [
        "issues/{id}",
        "issues/{id}/why",
        "issues/{id}/events",
        "drafts/{id}",
        "drafts/{id}/link",
        "outbox/{id}",
        "outbox/{id}/why",
        "event-logs/{id}",
        "event-logs/{id}/original",
        "sessions/{session}",
        "sessions/{session}/events",
        "tickets/{id}",
        "tickets/{id}/why",
        "prompts/{integration}",
        "failures/{id}",
    ] {
        let path = address(&format!("/api/v1/{path}"), &ids);
        let (status, body) = call(&server, "get", &path, SHOP, None).await?;
        assert_eq!(status, 200, "{path}: {body}");
    }
    let (status, retried) =
        call(&server, "post", "/api/v1/outbox/retry", WORKS, Some(json!({}))).await?;
    assert_eq!((status, &retried["queued"]), (200, &json!(0)), "{retried}");
    let (_, retried) = call(&server, "post", "/api/v1/outbox/retry", SHOP, Some(json!({}))).await?;
    assert_eq!(retried["queued"], 1, "{retried}");
    let approve = address("/api/v1/drafts/{id}/approve", &ids);
    assert_eq!(call(&server, "post", &approve, WORKS, Some(json!({}))).await?.0, 404);
    assert_eq!(call(&server, "post", &approve, SHOP, Some(json!({}))).await?.0, 200);
    let (_, me) = call(&server, "get", "/api/v1/me", SHOP, None).await?;
    assert_eq!(me["integrations"], json!(["shop", "desk"]));

    // The console calls the same API: a page of another integration shows nothing.
    let page = format!("/console/issues/{}", ids["issues"]);
    let shown = async |token: &str| {
        let request = server.client.get(server.url(&page)).bearer_auth(token);
        anyhow::Ok(request.send().await?.text().await?)
    };
    assert!(shown(SHOP).await?.contains(MARK));
    assert!(!shown(WORKS).await?.contains(MARK));
    Ok(())
}

#[test]
fn a_token_names_only_integrations_that_exist() -> Result<()> {
    let token = |more: &str| {
        format!("[[token]]\nname = \"a\"\nrole = \"read\"\ntoken = \"{BOSS}\"\n{more}\n")
    };
    for (more, expected) in [
        ("integrations = []", "has empty `integrations`"),
        ("integrations = [\"desk\", \"shpo\"]", "names the unknown integration `shpo`"),
    ] {
        let output = ServerDir::new()?.settings(&token(more))?.run(&["config"])?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    let output =
        ServerDir::new()?.settings(&token("integrations = [\"desk\"]"))?.run(&["config"])?;
    assert!(text(&output.stdout).contains("integrations=desk"), "{}", text(&output.stdout));
    Ok(())
}
