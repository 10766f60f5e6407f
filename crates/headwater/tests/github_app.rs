//! Replies by a GitHub App: a fake GitHub verifies the signed request for a token and accepts only the tokens it has given out.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::process::Command;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use headwater_stream::clock::{Clock, SystemClock};
use serde_json::{Value, json};

use crate::support::sender::{SECRET, github, github_issues, now, send};
use crate::support::tool_desk::{decide, planned};
use crate::support::tool_service::{CallPlan, ToolModel, ToolService};
use crate::support::{Server, ServerDir, eventually, text};

const APP: &str = "123456";
const INSTALLATION: u64 = 77;

/// A key pair of an App, made by another program.
struct KeyPair {
    directory: tempfile::TempDir,
}

impl KeyPair {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let openssl = |arguments: &[&str]| -> Result<()> {
            let done = Command::new("openssl").args(arguments).current_dir(&directory).output()?;
            ensure!(done.status.success(), "{}", text(&done.stderr));
            Ok(())
        };
        openssl(&["genrsa", "-traditional", "-out", "key.pem", "2048"])?;
        openssl(&["rsa", "-in", "key.pem", "-pubout", "-out", "public.pem"])?;
        Ok(Self { directory })
    }

    fn pem(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.directory.path().join("key.pem"))?)
    }

    /// The claims of a JWT, if its signature is valid.
    fn claims(&self, jwt: &str) -> Result<Value> {
        let (signed, signature) = jwt.rsplit_once('.').context("three parts")?;
        let (header, claims) = signed.split_once('.').context("three parts")?;
        let header: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(header)?)?;
        ensure!(header["alg"] == "RS256", "{header}");
        let path = |name: &str| self.directory.path().join(name);
        std::fs::write(path("signed"), signed)?;
        std::fs::write(path("signature"), URL_SAFE_NO_PAD.decode(signature)?)?;
        let verify =
            ["dgst", "-sha256", "-verify", "public.pem", "-signature", "signature", "signed"];
        let verified =
            Command::new("openssl").args(verify).current_dir(&self.directory).output()?;
        ensure!(verified.status.success(), "{}", text(&verified.stdout));
        Ok(serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims)?)?)
    }
}

/// GitHub: gives out tokens, and accepts comments with the newest one.
struct FakeGithub {
    key: KeyPair,
    state: Mutex<GithubState>,
}

#[derive(Default)]
struct GithubState {
    /// Installations of all requests for a token, valid or not.
    asked: Vec<u64>,
    rejected: Vec<String>,
    /// The token that is valid.
    token: Option<String>,
    given_out: usize,
    /// Seconds until a token expires.
    lifetime: i64,
    /// Status of the answers to requests for a token, instead of one.
    refusal: Option<u16>,
    comments: Vec<(u64, String)>,
}

impl FakeGithub {
    async fn start() -> Result<(Arc<Self>, String)> {
        let state = Mutex::new(GithubState { lifetime: 3600, ..GithubState::default() });
        let github = Arc::new(Self { key: KeyPair::new()?, state });
        let routes = Router::new()
            .route("/app/installations/{id}/access_tokens", post(give_token))
            .route("/repositories/{repository}/issues/{issue}/comments", get(list).post(comment))
            .with_state(Arc::clone(&github));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Ok((github, url))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, GithubState> {
        self.state.lock().unwrap()
    }

    fn comments(&self) -> usize {
        self.state().comments.len()
    }
}

fn bearer(headers: &HeaderMap) -> String {
    let header = headers.get("authorization").and_then(|value| value.to_str().ok());
    header.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default().to_owned()
}

async fn give_token(
    State(github): State<Arc<FakeGithub>>,
    Path(installation): Path<u64>,
    headers: HeaderMap,
) -> (StatusCode, Json<Value>) {
    let claims = github.key.claims(&bearer(&headers));
    let mut state = github.state();
    state.asked.push(installation);
    if let Some(status) = state.refusal {
        return (StatusCode::from_u16(status).unwrap(), Json(json!({"message": "no"})));
    }
    let problem = match claims {
        Err(error) => Some(error.to_string()),
        Ok(claims) => {
            let at = |name: &str| claims[name].as_u64().unwrap_or_default();
            let lasts = at("exp") > now() && at("exp") <= now() + 600 && at("iat") <= now();
            (claims["iss"] != APP || !lasts).then(|| claims.to_string())
        }
    };
    if let Some(problem) = problem {
        state.rejected.push(problem);
        return (StatusCode::UNAUTHORIZED, Json(json!({"message": "bad credentials"})));
    }
    state.given_out += 1;
    let token = format!("ghs_{}", state.given_out);
    state.token = Some(token.clone());
    let lifetime = std::time::Duration::from_secs(state.lifetime.unsigned_abs());
    let expires_at = SystemClock.now().after(lifetime).to_rfc3339();
    (StatusCode::CREATED, Json(json!({"token": token, "expires_at": expires_at})))
}

async fn list(
    State(github): State<Arc<FakeGithub>>,
    headers: HeaderMap,
) -> (StatusCode, Json<Value>) {
    let known = github.state().token.as_deref() == Some(&bearer(&headers));
    let status = if known { StatusCode::OK } else { StatusCode::UNAUTHORIZED };
    (status, Json(json!([])))
}

async fn comment(
    State(github): State<Arc<FakeGithub>>,
    Path((_, issue)): Path<(u64, u64)>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> (StatusCode, Json<Value>) {
    let mut state = github.state();
    if state.token.as_deref() != Some(&bearer(&headers)) {
        return (StatusCode::UNAUTHORIZED, Json(json!({"message": "bad credentials"})));
    }
    state.comments.push((issue, body["body"].to_string()));
    (StatusCode::CREATED, Json(json!({"id": 1})))
}

fn place(url: &str, key: &str, more: &str) -> Result<ServerDir> {
    let settings = format!(
        "[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\nbase_url = \"{url}\"\n\
         app_id = {APP}\napp_key_env = \"APP_KEY\"\n{more}\n"
    );
    Ok(ServerDir::new()?.settings(&settings)?.variable("APP_KEY", key))
}

fn serve(place: &ServerDir) -> Result<Server> {
    place.serve(&["--issue-quiet", "10ms", "--analytics-path", ""])
}

/// Sends an issue whose webhook comes from this installation.
async fn ask(server: &Server, number: u64, installation: Option<u64>) -> Result<()> {
    ask_about(server, number, "Where is it?", installation).await
}

async fn ask_about(
    server: &Server,
    number: u64,
    about: &str,
    installation: Option<u64>,
) -> Result<()> {
    let mut body = github_issues("opened", number, about);
    if let Some(id) = installation {
        body["installation"] = json!({ "id": id });
    }
    let delivery = format!("d-{number}");
    let body = body.to_string();
    let (status, body) = send(github(server, "issues", &delivery, body.as_bytes())).await?;
    ensure!(status == 200 && body["status"] == "ok", "{status} {body}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_are_posted_with_a_token_that_is_asked_for_once() -> Result<()> {
    let (fake, url) = FakeGithub::start().await?;
    let place = place(&url, &fake.key.pem()?, "")?;
    let server = serve(&place)?;
    for number in 1..=10 {
        ask(&server, number, Some(INSTALLATION)).await?;
    }
    eventually("all comments", || fake.comments() == 10).await.with_context(|| server.log())?;
    assert_eq!(fake.state().asked, [INSTALLATION], "one request for all deliveries");
    assert_eq!(fake.state().rejected, Vec::<String>::new());

    // A token that was revoked is replaced at once, by one request.
    fake.state().token = Some("another".to_owned());
    ask(&server, 11, Some(INSTALLATION)).await?;
    eventually("the comment", || fake.comments() == 11).await.with_context(|| server.log())?;
    assert_eq!(fake.state().asked.len(), 2);
    assert!(!server.log().contains("ghs_") && !server.log().contains("PRIVATE KEY"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_replaced_shortly_before_it_expires() -> Result<()> {
    let (fake, url) = FakeGithub::start().await?;
    // Shorter than the time before the end in which a token is not used any more.
    fake.state().lifetime = 60;
    let place = place(&url, &fake.key.pem()?, &format!("installation_id = {INSTALLATION}"))?;
    let server = serve(&place)?;
    for number in 1..=3 {
        // The webhook of the repository names no installation: the setting counts.
        ask(&server, number, None).await?;
        let count = usize::try_from(number)?;
        eventually("the comment", || fake.comments() == count).await?;
    }
    assert_eq!(fake.state().asked, [INSTALLATION; 3]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_are_held_until_github_gives_a_token() -> Result<()> {
    let (fake, url) = FakeGithub::start().await?;
    fake.state().refusal = Some(401);
    let place = place(&url, &fake.key.pem()?, "")?;
    let mut server = serve(&place)?;
    ask(&server, 1, Some(INSTALLATION)).await?;
    server.wait_for_log("replies are held")?;
    let (_, dead) = server.get("/api/v1/outbox/dead").await?;
    assert_eq!(dead["rows"], json!([]), "no reply is given up");
    assert_eq!(fake.comments(), 0);
    fake.state().refusal = None;
    // Without the wait for the end of the hold.
    server.kill9()?;
    let server = serve(&place)?;
    eventually("the comment", || fake.comments() == 1).await.with_context(|| server.log())?;

    // An installation that is gone, or unknown, concerns only its own replies.
    ask(&server, 2, None).await?;
    ask(&server, 3, Some(INSTALLATION)).await?;
    eventually("the comment", || fake.comments() == 2).await.with_context(|| server.log())?;
    let (_, dead) = server.get("/api/v1/outbox/dead").await?;
    assert_eq!(dead["rows"], json!([]));
    let why = "/api/v1/issues/2/why";
    let waits = |_: u16, why: &Value| why.to_string().contains("installation_id");
    server.until(why, waits).await?;
    Ok(())
}

const APPROVALS: &[CallPlan] = &[
    ("order-1", &[("refund", r#"{"order": "order-1"}"#)]),
    ("order-2", &[("refund", r#"{"order": "order-2"}"#)]),
];

/// The newest event is the decision, which names no installation.
#[tokio::test(flavor = "multi_thread")]
async fn the_answer_after_a_decision_about_tool_calls_is_posted() -> Result<()> {
    let (fake, url) = FakeGithub::start().await?;
    let (_, model_url) = ToolModel::start(APPROVALS).await?;
    let (service, service_url) = ToolService::start().await?;
    let tool = format!(
        "[[tool]]\nname = \"refund\"\ndescription = \"Refunds an order.\"\nmethod = \"POST\"\napproval = true\n\
         url = \"{service_url}/refunds\"\n\
         parameters = {{ type = \"object\", properties = {{ order = {{ type = \"string\" }} }} }}\n"
    );
    let place = place(&url, &fake.key.pem()?, &tool)?;
    let place = place.variable("HEADWATER_MODEL_URL", &model_url);
    let place = place.variable("HEADWATER_MODEL_NAME", "m");
    let server = serve(&place)?;
    for (issue, verb) in [(1, "approve"), (2, "reject")] {
        ask_about(&server, issue, &format!("Refund order-{issue}"), Some(INSTALLATION)).await?;
        let draft = planned(&server, i64::try_from(issue)?).await?;
        assert_eq!(decide(&server, &draft, verb, json!({})).await?.0, 200);
        let count = usize::try_from(issue)?;
        let posted = eventually("the comment", || fake.comments() == count).await;
        posted.with_context(|| server.log())?;
    }
    let comments = fake.state().comments.clone();
    assert!(comments[0].1.contains("refunded"), "{comments:?}");
    assert!(comments[1].1.contains("a person rejected this call"), "{comments:?}");
    let calls = [service.requests("order-1").len(), service.requests("order-2").len()];
    assert_eq!((calls, fake.state().asked.as_slice()), ([1, 0], &[INSTALLATION][..]));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_apps_are_rejected() -> Result<()> {
    let key = KeyPair::new()?.pem()?;
    for (more, key, expected) in [
        ("reply_token_env = \"APP_KEY\"", key.as_str(), "has both `reply_token_env` and `app_id`"),
        ("", "", "empty `app_key`"),
    ] {
        let output = place("http://localhost", key, more)?.run(&["serve"])?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    let output = place("http://localhost", "no key", "")?.run(&["serve"])?;
    let error = text(&output.stderr);
    assert!(error.contains("is not an RSA key in PEM format"), "{error}");
    assert!(!error.contains("no key\""), "{error}");
    let only_id =
        "[[integration]]\nid = \"a\"\nprovider = \"github\"\nsecret = \"s\"\napp_id = 1\n";
    let output = ServerDir::new()?.settings(only_id)?.run(&["config"])?;
    assert!(text(&output.stderr).contains("set `app_id` and `app_key_env`"));
    Ok(())
}
