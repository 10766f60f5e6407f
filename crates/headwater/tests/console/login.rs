//! Login, logout, roles, origins, and what a client without a login sees.

use anyhow::{Context, Result, ensure};
use headwater_testkit::{BrowserScripts, WallClock};
use reqwest::StatusCode;
use reqwest::header::{COOKIE, LOCATION, ORIGIN, SET_COOKIE};

use crate::fixture::Reader;
use crate::support::{Server, ServerDir};

const TOKENS: &str = r#"
[[token]]
name = "ann"
role = "read"
token = "reader-token-of-ann"
[[token]]
name = "root"
role = "admin"
token = "admin-token-of-root"
"#;

fn start(dir: &ServerDir) -> Result<Server> {
    let mut server = dir.serve(&[])?;
    // Redirects are looked at, not followed.
    server.client =
        reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build()?;
    Ok(server)
}

/// A login as a browser sends it.
async fn log_in(server: &Server, token: &str) -> Result<reqwest::Response> {
    let request = server.client.post(server.url("/console/login")).header(ORIGIN, server.url(""));
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    Ok(request.body(format!("token={token}&next=%2Fconsole%2Fissues")).send().await?)
}

/// The cookie of a successful login.
async fn session(server: &Server, token: &str) -> Result<String> {
    let response = log_in(server, token).await?;
    ensure!(response.status() == StatusCode::SEE_OTHER, "{response:?}");
    ensure!(response.headers()[LOCATION] == "/console/issues");
    let cookie = response.headers()[SET_COOKIE].to_str()?;
    ensure!(cookie.contains("; HttpOnly; SameSite=Lax;"), "{cookie}");
    Ok(cookie.split(';').next().context("a cookie")?.to_owned())
}

async fn look(server: &Server, path: &str, cookie: &str) -> Result<(StatusCode, String)> {
    let response = server.client.get(server.url(path)).header(COOKIE, cookie).send().await?;
    Ok((response.status(), response.text().await?))
}

#[tokio::test]
async fn a_browser_logs_in_sees_its_role_and_logs_out() -> Result<()> {
    let dir = ServerDir::new()?.settings(TOKENS)?;
    let server = start(&dir)?;
    let reader = Reader::start(&server, BrowserScripts::On).await?;

    reader.open("/console/issues?status=queued").await?;
    ensure!(reader.path().await?.starts_with("/console/login?next="), "{}", reader.path().await?);
    reader.must_be_accessible("/console/login").await?;
    reader.picture("91-login").await?;
    reader.fill("token", "not-a-token-at-all").await?;
    reader.click("Log in").await?;
    reader.until_shown("This token is not known.").await?;
    reader.must_be_clean(&["status of 401"]).await?;
    reader.fill("token", "reader-token-of-ann").await?;
    reader.click("Log in").await?;
    reader.until_shown("ann").await?;
    ensure!(reader.path().await? == "/console/issues?status=queued", "back to where it came from");

    // What the role does not allow is disabled, and says which role it needs.
    let shown = reader.open("/console/doctor").await?;
    ensure!(shown.contains("role `admin` required"), "{shown}");
    let (_, page) =
        look(&server, "/console/tickets", &session(&server, "reader-token-of-ann").await?).await?;
    ensure!(!page.contains("admin-token"), "no token is shown");
    reader.must_be_accessible("/console/doctor").await?;

    reader.click("Log out").await?;
    reader.until_shown("Log in").await?;
    reader.open("/console").await?;
    ensure!(reader.path().await?.starts_with("/console/login"), "{}", reader.path().await?);

    // The login ends while a page is open.
    reader.fill("token", "reader-token-of-ann").await?;
    reader.click("Log in").await?;
    reader.until_shown("Live").await?;
    let log_out = "fetch('/console/logout', {method: 'POST'}).then(() => { window.isOut = true })";
    reader.driver().execute(log_out).await?;
    reader.until("return window.isOut === true").await?;
    reader.click("Pause").await?;
    reader.until_shown("Paused").await?;
    reader.click("Resume").await?;
    reader.until_shown("Logged out: reload to log in").await?;
    reader.must_be_clean(&["status of 401", "MIME type"]).await?;
    reader.browser.quit().await
}

#[tokio::test]
async fn foreign_and_missing_origins_forged_cookies_and_wrong_roles_change_nothing() -> Result<()> {
    let dir = ServerDir::new()?.settings(TOKENS)?;
    let server = start(&dir)?;
    let admin = session(&server, "admin-token-of-root").await?;
    let read = session(&server, "reader-token-of-ann").await?;
    let new = server.client.post(server.url("/api/v1/topics")).bearer_auth("admin-token-of-root");
    let new = new.json(&serde_json::json!({"name": "orders", "partitions": 1})).send().await?;
    ensure!(new.status() == StatusCode::CREATED);

    let delete = async |cookie: &str, origin: Option<&str>| -> Result<(StatusCode, String)> {
        let mut request = server.client.post(server.url("/console/do/topics/orders/delete"));
        request = request
            .header(COOKIE, cookie)
            .header("content-type", "application/x-www-form-urlencoded");
        if let Some(origin) = origin {
            request = request.header(ORIGIN, origin);
        }
        let response = request.body("confirm=1&typed=orders").send().await?;
        Ok((response.status(), response.text().await?))
    };
    let own = server.url("");
    for (cookie, origin, status, reason) in [
        (&admin, Some("https://evil.example"), 403, "cross-origin"),
        (&admin, Some("null"), 403, "cross-origin"),
        (&admin, None, 403, "Origin"),
        (&read, Some(own.as_str()), 403, "role `write` required"),
        (
            &"headwater=v1.cm9vdA.9999999999.x.00".to_owned(),
            Some(own.as_str()),
            401,
            "not logged in",
        ),
        (&format!("{admin}0"), Some(own.as_str()), 401, "not logged in"),
        (&String::new(), Some(own.as_str()), 401, "not logged in"),
    ] {
        let (found, page) = delete(cookie, origin).await?;
        ensure!(
            found.as_u16() == status && page.contains(reason),
            "{cookie} {origin:?}: {found} {page}"
        );
    }
    // So are logins and logouts of other pages: neither gives nor takes a cookie.
    for path in ["/console/login", "/console/logout"] {
        for origin in [Some("https://evil.example"), Some("null"), None] {
            let mut request = server.client.post(server.url(path)).header(COOKIE, &admin);
            request = request.header("content-type", "application/x-www-form-urlencoded");
            if let Some(origin) = origin {
                request = request.header(ORIGIN, origin);
            }
            let response = request.body("token=reader-token-of-ann").send().await?;
            let (status, headers) = (response.status(), response.headers().clone());
            let (page, reason) =
                (response.text().await?, origin.map_or("Origin", |_| "cross-origin"));
            ensure!(status == StatusCode::FORBIDDEN, "{path} {origin:?}: {status} {page}");
            ensure!(!headers.contains_key(SET_COOKIE), "{path} {origin:?}: {headers:?}");
            ensure!(page.contains(reason), "{path} {origin:?}: {page}");
        }
        // With its own origin it is neither.
        let request = server.client.post(server.url(path)).header(ORIGIN, &own);
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        let response = request.body("token=reader-token-of-ann").send().await?;
        ensure!(response.status() == StatusCode::SEE_OTHER, "{path}: {response:?}");
        ensure!(response.headers().contains_key(SET_COOKIE), "{path}: {response:?}");
    }
    // What is shown disabled is refused as well, for every action that needs `admin`.
    for action in ["topics/orders/grow", "topics/orders/trim", "topics/orders/dead-letters/purge"] {
        let request = server.client.post(server.url(&format!("/console/do/{action}")));
        let request = request.header(COOKIE, &read).header(ORIGIN, &own);
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        let form = "confirm=1&partitions=2&count=0&select=matching";
        let response = request.body(form).send().await?;
        ensure!(response.status() == StatusCode::FORBIDDEN, "{action}: {response:?}");
    }

    // The cookie is for the console, not for the API.
    let (status, _) = look(&server, "/api/v1/topics", &admin).await?;
    ensure!(status == StatusCode::UNAUTHORIZED);
    let still = server
        .client
        .get(server.url("/api/v1/topics/orders"))
        .bearer_auth("admin-token-of-root")
        .send()
        .await?;
    ensure!(still.status() == StatusCode::OK, "the topic is still there");

    // With everything right it is deleted.
    let (status, page) = delete(&admin, Some(&own)).await?;
    ensure!(status == StatusCode::SEE_OTHER, "{page}");

    // A changed token ends the session; other sessions stay.
    let address = TOKENS.replace("admin-token-of-root", "another-token-of-root");
    drop(server);
    let dir = dir.settings(&address)?;
    let server = start(&dir)?;
    ensure!(
        look(&server, "/console", &admin).await?.0 == StatusCode::SEE_OTHER,
        "redirected to the login"
    );
    ensure!(
        look(&server, "/console", &read).await?.0 == StatusCode::OK,
        "a session survives a restart"
    );
    Ok(())
}

#[tokio::test]
async fn an_expired_login_is_refused_and_changes_nothing() -> Result<()> {
    let clock = WallClock::start()?;
    let mut dir = ServerDir::new()?.settings(TOKENS)?;
    for (name, value) in clock.environment() {
        dir = dir.variable(&name, &value);
    }
    let server = start(&dir)?;
    let admin = session(&server, "admin-token-of-root").await?;
    let new = server.client.post(server.url("/api/v1/topics")).bearer_auth("admin-token-of-root");
    let new = new.json(&serde_json::json!({"name": "orders", "partitions": 1})).send().await?;
    ensure!(new.status() == StatusCode::CREATED);
    ensure!(look(&server, "/console", &admin).await?.0 == StatusCode::OK);

    // The login lasts 12 hours.
    clock.set(13 * 3600)?;
    let (status, _) = look(&server, "/console/topics/orders", &admin).await?;
    ensure!(status == StatusCode::SEE_OTHER, "{status}");
    let (status, page) = look(&server, "/console/live?of=%2Fconsole", &admin).await?;
    ensure!(status != StatusCode::OK, "a live page needs a login, too: {page}");
    let request = server.client.post(server.url("/console/do/topics/orders/delete"));
    let request = request.header(COOKIE, &admin).header(ORIGIN, server.url(""));
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    let refused = request.body("confirm=1&typed=orders").send().await?;
    ensure!(refused.status() == StatusCode::UNAUTHORIZED);
    ensure!(refused.text().await?.contains("not logged in"));
    let still = server.client.get(server.url("/api/v1/topics/orders"));
    let still = still.bearer_auth("admin-token-of-root").send().await?;
    ensure!(still.status() == StatusCode::OK, "the topic is still there");
    Ok(())
}

#[tokio::test]
async fn attempts_to_log_in_are_limited_and_audited() -> Result<()> {
    let dir = ServerDir::new()?.settings(TOKENS)?;
    let server = start(&dir)?;
    session(&server, "admin-token-of-root").await?;
    for _ in 0..4 {
        ensure!(log_in(&server, "guess").await?.status() == StatusCode::UNAUTHORIZED);
    }
    let refused = log_in(&server, "admin-token-of-root").await?;
    ensure!(refused.status() == StatusCode::TOO_MANY_REQUESTS);
    ensure!(refused.text().await?.contains("too many attempts"));
    let log = server
        .client
        .get(server.url("/api/v1/audit"))
        .bearer_auth("admin-token-of-root")
        .send()
        .await?;
    let log: serde_json::Value = log.json().await?;
    let entries = log["entries"].as_array().context("entries")?;
    let of = |caller: &str, status: u16| {
        entries
            .iter()
            .filter(|entry| {
                entry["caller"] == caller
                    && entry["status"] == status
                    && entry["path"] == "/console/login"
            })
            .count()
    };
    ensure!((of("root", 303), of("unknown", 401)) == (1, 4), "{log:#}");
    ensure!(entries.iter().all(|entry| entry["client"] == "127.0.0.1"), "{log:#}");
    ensure!(!log.to_string().contains("guess"), "no token is in the log");
    Ok(())
}

#[tokio::test]
async fn pages_have_the_security_headers_and_assets_are_immutable() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = start(&dir)?;
    let response = server.client.get(server.url("/console")).send().await?;
    let header = |name: &str| response.headers()[name].to_str().unwrap_or_default().to_owned();
    ensure!(
        header("content-security-policy")
            == "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
        connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    );
    ensure!(
        header("referrer-policy") == "same-origin" && header("x-content-type-options") == "nosniff"
    );
    ensure!(
        header("cache-control") == "no-store"
            && header("cross-origin-opener-policy") == "same-origin"
    );
    let page = response.text().await?;
    ensure!(
        !page.contains(" style=")
            && !page.contains(" onclick")
            && !page.contains("http://")
            && !page.contains("https://")
    );
    let style = page
        .split("rel=\"stylesheet\" href=\"")
        .nth(1)
        .and_then(|rest| rest.split('"').next())
        .context("a style")?;
    let asset =
        server.client.get(server.url(style)).header("accept-encoding", "gzip").send().await?;
    ensure!(asset.headers()["cache-control"] == "public, max-age=31536000, immutable");
    ensure!(asset.headers()["content-encoding"] == "gzip");
    let old = style.replace("/assets/", "/assets/0");
    ensure!(server.client.get(server.url(&old)).send().await?.status() == StatusCode::NOT_FOUND);
    // Another site may link to the console, but neither frame it nor load it as an image.
    let from_elsewhere = |mode: &'static str, dest: &'static str| {
        let request =
            server.client.get(server.url("/console/topics")).header("sec-fetch-site", "cross-site");
        request.header("sec-fetch-mode", mode).header("sec-fetch-dest", dest).send()
    };
    ensure!(from_elsewhere("navigate", "document").await?.status() == StatusCode::OK);
    ensure!(from_elsewhere("no-cors", "image").await?.status() == StatusCode::FORBIDDEN);
    ensure!(from_elsewhere("navigate", "iframe").await?.status() == StatusCode::FORBIDDEN);
    Ok(())
}
