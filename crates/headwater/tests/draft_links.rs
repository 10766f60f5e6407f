//! Links that approve or reject one version of a draft without a token, on the real binary.

mod support;

use anyhow::{Context, Result, ensure};
use headwater_testkit::Postgres;
use reqwest::header::HeaderMap;
use serde_json::{Value, json};

use crate::support::receivers::Receiver;
use crate::support::sender::{SECRET, github, github_comment, github_issues, send};
use crate::support::{Server, ServerDir, eventually, text};

const SQLITE: &str = "sqlite:headwater-data/headwater.db";
const TOKENS: &str = "[[token]]\nname = \"boss\"\nrole = \"admin\"\ntoken = \"admin-admin-admin-admin\"\n\
    [[token]]\nname = \"reader\"\nrole = \"read\"\ntoken = \"read-read-read-read\"\n";
const BOSS: &str = "admin-admin-admin-admin";

fn place(url: &str, more: &str) -> Result<ServerDir> {
    let settings = format!(
        "{more}\n[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\nbase_url = \"{url}\"\n\
         reply_token_env = \"TOKEN\"\nmode = \"draft\"\n{TOKENS}"
    );
    let place = ServerDir::new()?.settings(&settings)?.variable("TOKEN", "a token");
    let place = place.variable("HEADWATER_TOKEN", BOSS);
    Ok(place.variable("HEADWATER_DESK_LINK_SECRET", "sixteen letters or more"))
}

fn serve(place: &ServerDir, database: &str) -> Result<Server> {
    let quick = ["--issue-quiet", "10ms", "--analytics-path", "", "--database-url", database];
    place.serve(&quick)
}

async fn get(server: &Server, path: &str, token: &str) -> Result<(u16, Value)> {
    send(server.client.get(server.url(path)).bearer_auth(token)).await
}

/// Sends an issue and waits for its draft.
async fn draft(server: &Server, number: u64) -> Result<Value> {
    let body = github_issues("opened", number, "Where is it?").to_string();
    let delivery = format!("d-{number}");
    let (status, body) = send(github(server, "issues", &delivery, body.as_bytes())).await?;
    ensure!(status == 200, "{status} {body}");
    for _ in 0..3000 {
        let (_, page) = get(server, "/api/v1/drafts?status=pending", BOSS).await?;
        let drafts = page["drafts"].as_array().cloned().unwrap_or_default();
        let of_issue = |draft: &&Value| draft["external_issue_id"] == *number.to_string();
        if let Some(draft) = drafts.iter().find(of_issue) {
            return Ok(draft.clone());
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    anyhow::bail!("no draft for issue {number}:\n{}", server.log())
}

/// The links of a draft: to approve and to reject.
async fn links(server: &Server, draft: &Value) -> Result<[String; 2]> {
    let (status, body) = get(server, &format!("/api/v1/drafts/{}/link", draft["id"]), BOSS).await?;
    ensure!(status == 200, "{status} {body}");
    let link = |name: &str| body[name].as_str().map(str::to_owned).context("a link");
    Ok([link("approve")?, link("reject")?])
}

/// Opens a link without a token.
async fn open(server: &Server, link: &str) -> Result<(u16, HeaderMap, String)> {
    let response = server.client.get(link).send().await?;
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    Ok((status, headers, response.text().await?))
}

/// Presses the button of the page.
async fn press(server: &Server, link: &str, more: &str) -> Result<(u16, String)> {
    let (page, value) = link.split_once("?link=").context("a link")?;
    let request = server.client.post(page).body(format!("link={value}{more}"));
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    let response = request.send().await?;
    Ok((response.status().as_u16(), response.text().await?))
}

async fn status(server: &Server, draft: &Value) -> Result<Value> {
    let (_, shown) = get(server, &format!("/api/v1/drafts/{}", draft["id"]), BOSS).await?;
    Ok(shown["status"].clone())
}

async fn audited(server: &Server) -> Result<Vec<(String, u64)>> {
    let (_, log) = get(server, "/api/v1/audit", BOSS).await?;
    let entries = log["entries"].as_array().cloned().unwrap_or_default();
    let by_link = entries.iter().filter(|entry| entry["caller"] == "link");
    let entry = |entry: &Value| {
        let path = entry["path"].as_str().unwrap_or_default().to_owned();
        (path, entry["status"].as_u64().unwrap_or_default())
    };
    Ok(by_link.map(entry).collect())
}

async fn a_link_decides_about_one_version_of_a_draft_once(database: &str) -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "")?;
    let server = serve(&place, database)?;
    let first = draft(&server, 1).await?;
    let [approve, reject] = links(&server, &first).await?;

    // Opening a link, also several times and by programs, changes nothing.
    for _ in 0..2 {
        let (code, headers, page) = open(&server, &approve).await?;
        assert_eq!(code, 200, "{page}");
        assert!(page.contains("Approve and post") && page.contains("parcel"), "{page}");
        let policy = headers["content-security-policy"].to_str()?;
        assert!(policy.contains("default-src 'none'") && policy.contains("form-action 'self'"));
        assert_eq!(headers["cache-control"], "no-store");
    }
    assert_eq!(server.client.head(&approve).send().await?.status().as_u16(), 200);
    assert_eq!(status(&server, &first).await?, "pending");
    assert_eq!((receiver.requests().len(), audited(&server).await?.len()), (0, 0));

    let (code, page) = press(&server, &approve, "").await?;
    assert_eq!(code, 200, "{page}");
    assert!(page.contains("is approved and is posted"), "{page}");
    eventually("the comment", || receiver.accepted().len() == 1).await?;
    let path = format!("/links/drafts/{}", first["id"]);
    assert_eq!(audited(&server).await?, [(path.clone(), 200)], "once, and without the link");
    let (_, shown) = get(&server, &format!("/api/v1/drafts/{}", first["id"]), BOSS).await?;
    assert_eq!((&shown["decided_by"], &shown["status"]), (&json!("link"), &json!("approved")));

    // A replay, and the other decision.
    for link in [&approve, &reject] {
        let (code, page) = press(&server, link, "").await?;
        assert_eq!(code, 409, "{page}");
        assert!(page.contains("was approved by link at "), "{page}");
        assert_eq!(open(&server, link).await?.0, 409);
    }
    assert_eq!(audited(&server).await?.len(), 1, "what changes nothing is not a change");

    // An edit ends the links of the version before.
    let second = draft(&server, 2).await?;
    let [approve, _] = links(&server, &second).await?;
    let edit = server.url(&format!("/api/v1/drafts/{}/edit", second["id"]));
    let edit = server.client.post(edit).bearer_auth(BOSS).json(&json!({"content": "Soon."}));
    assert_eq!(send(edit).await?.0, 200);
    let (code, page) = press(&server, &approve, "").await?;
    assert!(code == 409 && page.contains("was edited after this link was made"), "{code} {page}");
    let [_, reject] = links(&server, &second).await?;
    assert!(open(&server, &reject).await?.2.contains("Soon."), "the text of the person");
    assert_eq!(press(&server, &reject, "&reason=Too+short.").await?.0, 200);
    let (_, shown) = get(&server, &format!("/api/v1/drafts/{}", second["id"]), BOSS).await?;
    assert_eq!(
        (&shown["status"], &shown["decision_reason"]),
        (&json!("rejected"), &json!("Too short."))
    );

    // A newer message makes the draft outdated.
    let third = draft(&server, 3).await?;
    let [approve, _] = links(&server, &third).await?;
    let body = github_comment(3, "ann", "Hello?").to_string();
    send(github(&server, "issue_comment", "c-3", body.as_bytes())).await?;
    let (code, page) = press(&server, &approve, "").await?;
    assert!(code == 409 && page.contains("is outdated"), "{code} {page}");
    assert_eq!(receiver.accepted().len(), 1, "nothing else was posted");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_decides_about_one_version_of_a_draft_once_on_sqlite() -> Result<()> {
    a_link_decides_about_one_version_of_a_draft_once(SQLITE).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_decides_about_one_version_of_a_draft_once_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    a_link_decides_about_one_version_of_a_draft_once(&database.url()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_expired_and_foreign_links_change_nothing() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "")?;
    let server = serve(&place, SQLITE)?;
    let (one, two) = (draft(&server, 1).await?, draft(&server, 2).await?);
    let [approve, reject] = links(&server, &one).await?;
    let (page, value) = approve.split_once("?link=").context("a link")?;
    let parts: Vec<&str> = value.split('.').collect();
    let other_page = format!("/links/drafts/{}", two["id"]);
    let rejecting = reject.replace(".reject.", ".approve.");
    let later = value.replace(parts[5], "9999999999");
    for (what, forged) in [
        ("another action", rejecting),
        ("a later end", format!("{page}?link={later}")),
        ("another draft", format!("{}?link={value}", server.url(&other_page))),
        ("no signature", format!("{page}?link={}", parts[..6].join("."))),
        ("no link", format!("{page}?link=")),
        ("a long one", format!("{page}?link={}", "x".repeat(5000))),
    ] {
        for (code, text) in
            [(open(&server, &forged).await?.0, String::new()), press(&server, &forged, "").await?]
        {
            assert_eq!(code, 403, "{what}: {text}");
        }
    }
    // The same draft of another database, with the same secret.
    let elsewhere = self::place(&url, "")?;
    let other = serve(&elsewhere, SQLITE)?;
    let [foreign, _] = links(&other, &draft(&other, 1).await?).await?;
    let foreign = foreign.replace(&other.url(""), &server.url(""));
    assert_eq!(press(&server, &foreign, "").await?.0, 403);
    assert!(!server.log().contains(value), "no link is logged");

    // A link that lasts a second.
    drop(server);
    let quick = ["--issue-quiet", "10ms", "--analytics-path", "", "--desk-draft-link-ttl", "1s"];
    let server = place.serve(&quick)?;
    let [approve, _] = links(&server, &one).await?;
    let end = std::time::Instant::now() + crate::support::LIMIT;
    while open(&server, &approve).await?.0 != 410 {
        ensure!(std::time::Instant::now() < end, "the link does not expire");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let (code, text) = press(&server, &approve, "").await?;
    assert!(code == 410 && text.contains("time of this link is over"), "{code} {text}");
    for draft in [&one, &two] {
        assert_eq!(status(&server, draft).await?, "pending");
    }
    assert_eq!((receiver.requests().len(), audited(&server).await?.len()), (0, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_presses_at_once_one_decides() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let place = place(&url, "")?;
    let server = serve(&place, SQLITE)?;
    let draft = draft(&server, 1).await?;
    let [approve, reject] = links(&server, &draft).await?;
    let presses = (0..20).map(|place| {
        let link = if place % 2 == 0 { &approve } else { &reject };
        press(&server, link, "")
    });
    let pressed = futures_util::future::try_join_all(presses).await?;
    let decided = pressed.iter().filter(|(code, _)| *code == 200).count();
    assert_eq!(decided, 1, "{pressed:?}");
    assert!(pressed.iter().all(|(code, _)| [200, 409].contains(code)), "{pressed:?}");
    let audited = audited(&server).await?;
    assert_eq!(audited.iter().filter(|(_, status)| *status == 200).count(), 1, "{audited:?}");
    let expected = usize::from(status(&server, &draft).await? == "approved");
    eventually("the comment", || receiver.accepted().len() == expected).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn links_need_a_secret_an_address_and_the_role_write() -> Result<()> {
    let (_, url) = Receiver::start().await?;
    let dir = place(&url, "[http]\npublic_url = \"https://desk.example/\"")?;
    let server = serve(&dir, SQLITE)?;
    let draft = draft(&server, 1).await?;
    let path = format!("/api/v1/drafts/{}/link", draft["id"]);
    assert_eq!(get(&server, &path, "read-read-read-read").await?.0, 403);
    assert_eq!(get(&server, "/api/v1/drafts/999/link", BOSS).await?.0, 404);
    let (_, made) = get(&server, &path, BOSS).await?;
    let begin = format!("https://desk.example/links/drafts/{}?link=v1.", draft["id"]);
    assert!(made["approve"].as_str().is_some_and(|link| link.starts_with(&begin)), "{made}");
    let at = server.url("");
    let run = |more: &[&str]| {
        let words = ["draft", "link", &draft["id"].to_string(), "--url", &at];
        dir.run(&[&words[..], more].concat())
    };
    let shown = text(&run(&[])?.stdout);
    assert!(shown.contains(&format!("approve: {begin}")) && shown.contains("reject: "), "{shown}");
    assert!(text(&run(&["--json"])?.stdout).contains("expires_at"));

    // Without a secret there are none, and a short secret or an unknown address is an error.
    let dir = place(&url, "")?.variable("HEADWATER_DESK_LINK_SECRET", "");
    let server = serve(&dir, SQLITE)?;
    let draft = self::draft(&server, 1).await?;
    let path = format!("/api/v1/drafts/{}/link", draft["id"]);
    let (code, refused) = get(&server, &path, BOSS).await?;
    assert_eq!((code, &refused["error"]["code"]), (409, &json!("links_disabled")), "{refused}");
    let page = format!("/links/drafts/{}?link=v1.1.2.3.4.5.6", draft["id"]);
    assert_eq!(open(&server, &server.url(&page)).await?.0, 404);
    for (name, value, expected) in [
        ("HEADWATER_DESK_LINK_SECRET", "short", "at least 16 are required"),
        ("HEADWATER_HTTP_LISTEN", "0.0.0.0:8080", "set `http.public_url`"),
    ] {
        let output = place(&url, "")?.variable(name, value).run(&["config"])?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    Ok(())
}
