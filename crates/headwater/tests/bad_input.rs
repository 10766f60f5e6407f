//! Bad input for every route there is: the description of the routes is the list, and a route without a case fails here.

mod support;

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::sender::integrations;
use crate::support::{Place, Server};

/// Who may call a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    /// Everybody.
    Nothing,
    /// A signature of an integration, which `tests/webhooks.rs` is about.
    Signature,
    Read,
    Write,
    Admin,
}

/// A body that would be taken; every text in it is replaced by worse ones.
type Body = Option<fn() -> Value>;

use Needs::{Admin, Nothing, Read, Signature, Write};

/// A line for every route, or more where a route takes several kinds of bodies.
const CASES: &[(&str, Needs, Body)] = &[
    ("get /", Read, None),
    ("get /metrics", Read, None),
    ("get /openapi.json", Read, None),
    ("get /health/live", Nothing, None),
    ("get /health/ready", Nothing, None),
    ("post /webhooks/{provider}/{integration}", Signature, Some(|| json!({"zen": "x"}))),
    ("get /api/v1/analytics", Read, None),
    ("post /api/v1/analytics/rebuild", Admin, None),
    ("get /api/v1/reports", Read, None),
    ("get /api/v1/reports/{name}", Read, None),
    ("get /api/v1/sql", Read, None),
    ("get /api/v1/audit", Admin, None),
    ("get /api/v1/audit/books", Read, None),
    ("get /api/v1/doctor", Admin, None),
    ("get /api/v1/issues", Read, None),
    ("get /api/v1/issues/{id}", Read, None),
    ("get /api/v1/issues/{id}/events", Read, None),
    ("get /api/v1/issues/{id}/why", Read, None),
    ("post /api/v1/issues/{id}/retry", Write, None),
    ("post /api/v1/issues/{id}/release", Write, None),
    ("get /api/v1/outbox/dead", Read, None),
    ("post /api/v1/outbox/{id}/retry", Write, None),
    ("get /api/v1/sessions", Read, None),
    ("get /api/v1/sessions/{session}", Read, None),
    ("get /api/v1/sessions/{session}/export", Read, None),
    ("get /api/v1/sessions/{session}/replay", Read, None),
    (
        "post /api/v1/sessions/{session}/fork",
        Write,
        Some(|| json!({"session": "a", "until": "1-0"})),
    ),
    ("post /api/v1/sessions/{session}/import", Write, Some(|| json!({"session": "a"}))),
    ("get /api/v1/tickets", Read, None),
    ("post /api/v1/tickets", Write, Some(new_ticket)),
    ("get /api/v1/tickets/{id}", Read, None),
    ("get /api/v1/tickets/{id}/events", Read, None),
    ("get /api/v1/tickets/{id}/messages", Read, None),
    ("post /api/v1/tickets/{id}/messages", Write, Some(new_message)),
    ("post /api/v1/tickets/{id}/close", Write, None),
    ("post /api/v1/tickets/{id}/reopen", Write, None),
    ("get /api/v1/topics", Read, None),
    ("post /api/v1/topics", Admin, Some(|| json!({"name": "a", "partitions": 1}))),
    ("get /api/v1/topics/{topic}", Read, None),
    ("delete /api/v1/topics/{topic}", Admin, None),
    ("post /api/v1/topics/{topic}/grow", Admin, Some(|| json!({"partitions": 2}))),
    ("post /api/v1/topics/{topic}/trim", Admin, Some(|| json!({"count": 1}))),
    ("get /api/v1/topics/{topic}/messages", Read, None),
    ("post /api/v1/topics/{topic}/messages", Write, Some(produce)),
    ("get /api/v1/topics/{topic}/tail", Read, None),
    ("get /api/v1/topics/{topic}/dead-letters", Read, None),
    ("get /api/v1/topics/{topic}/dead-letters/{id}", Read, None),
    ("post /api/v1/topics/{topic}/dead-letters/replay", Write, Some(letters)),
    ("post /api/v1/topics/{topic}/dead-letters/purge", Admin, Some(letters)),
    ("post /api/v1/topics/{topic}/dead-letters/replay", Write, Some(letters_by_id)),
    ("post /api/v1/topics/{topic}/dead-letters/purge", Admin, Some(letters_by_id)),
    ("get /api/v1/topics/{topic}/groups", Read, None),
    ("get /api/v1/topics/{topic}/groups/{group}", Read, None),
    ("get /api/v1/topics/{topic}/groups/{group}/pending", Read, None),
    ("post /api/v1/topics/{topic}/groups/{group}/reset", Admin, Some(|| json!({"to": "end"}))),
    (
        "post /api/v1/topics/{topic}/groups/{group}/consume",
        Write,
        Some(|| json!({"mode": "shared"})),
    ),
    ("delete /api/v1/topics/{topic}/groups/{group}/consumers/{consumer}", Write, None),
    ("post /api/v1/topics/{topic}/groups/{group}/consumers/{consumer}/settle", Write, Some(settle)),
];

fn new_ticket() -> Value {
    json!({"title": "t", "content": "c", "user_id": "u", "message_id": "0190b6d7-0000-7000-8000-000000000001"})
}

fn new_message() -> Value {
    json!({"content": "c", "author": "user", "message_id": "0190b6d7-0000-7000-8000-000000000002"})
}

fn produce() -> Value {
    json!({"messages": [{"key": "k", "payload": "p", "headers": {"h": "v"}, "id": "i"}]})
}

fn letters() -> Value {
    json!({"from": "1-0", "to": "2-0", "key": "k", "reason": "r"})
}

fn letters_by_id() -> Value {
    json!({"ids": ["1-0"]})
}

fn settle() -> Value {
    json!({"settlements": [{"delivery": 1, "outcome": "retry", "reason": "r"}]})
}

const TOKENS: [(&str, &str, Needs); 3] = [
    ("read", "read-read-read-read", Read),
    ("write", "write-write-write-write", Write),
    ("admin", "admin-admin-admin-admin", Admin),
];
const BOSS: Option<&str> = Some(TOKENS[2].1);

/// SQL, HTML, other scripts, directions, nothing, and much.
fn nasty() -> Vec<String> {
    let texts = [
        "'; DROP TABLE tickets; --",
        "<script>alert(1)</script><img src=x onerror=alert(1)>",
        "\" OR 1=1 /*",
        "../../../etc/passwd",
        "{{7*7}}${7*7}%s%n",
        "a\u{202e}b\u{0}c\r\nset-cookie: x=y",
        "",
        "-1",
        "99999999999999999999999999",
        "键😀",
    ];
    let long = "x".repeat(2000);
    texts.into_iter().map(str::to_owned).chain([long]).collect()
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

struct Routes {
    server: Server,
    description: Value,
    _place: Place,
}

impl Routes {
    async fn start() -> Result<Self> {
        let mut settings = integrations();
        for (role, token, _) in TOKENS {
            settings +=
                &format!("[[token]]\nname = \"{role}\"\nrole = \"{role}\"\ntoken = \"{token}\"\n");
        }
        let place = Place::new()?.settings(&settings)?;
        let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
        let server = place.serve(&many)?;
        let asked = server.client.get(server.url("/openapi.json")).bearer_auth(TOKENS[2].1);
        let description = asked.send().await?.json().await?;
        Ok(Self { server, description, _place: place })
    }

    /// Sends a request, and returns the status and, of a refusal, its body. What goes on for ever is not read.
    async fn call(
        &self,
        operation: &str,
        path: &str,
        token: Option<&str>,
        body: Option<(&str, Vec<u8>)>,
    ) -> Result<(StatusCode, Value)> {
        let method: Method =
            operation.split(' ').next().unwrap_or_default().to_uppercase().parse()?;
        let mut request = self.server.client.request(method, self.server.url(path));
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        if let Some((kind, bytes)) = body {
            request = request.header("content-type", kind).body(bytes);
        }
        let what = || format!("{operation} at {}", path.chars().take(200).collect::<String>());
        let response = request.send().await.with_context(what)?;
        let status = response.status();
        if status.is_success() {
            return Ok((status, Value::Null));
        }
        let refusal = response.text().await.with_context(what)?;
        // The status page of a process that is not ready, which a busy machine may make of it at any time.
        if status == StatusCode::SERVICE_UNAVAILABLE && refusal.starts_with("<!DOCTYPE html>") {
            return Ok((status, Value::Null));
        }
        let refusal: Value = serde_json::from_str(&refusal)
            .with_context(|| format!("{}: {status} {refusal:?} is not JSON", what()))?;
        // 503 is an answer about a dependency or a place that is full, 501 about what is not built in; 500 is a mistake.
        ensure!(status != StatusCode::INTERNAL_SERVER_ERROR, "{}: {status} {refusal}", what());
        if refusal["checks"].is_null() {
            let words = [&refusal["error"]["code"], &refusal["error"]["message"]];
            ensure!(words.iter().all(|word| word.is_string()), "{}: {refusal}", what());
        }
        Ok((status, refusal))
    }

    fn described(&self, operation: &str) -> &Value {
        let (method, path) = operation.split_once(' ').unwrap_or_default();
        &self.description["paths"][path][method]
    }
}

fn json_body(value: &Value) -> Option<(&'static str, Vec<u8>)> {
    Some(("application/json", value.to_string().into_bytes()))
}

/// The path of an operation, with this in place of each name.
fn path_of(operation: &str, fill: impl Fn(&str) -> String) -> String {
    let (_, template) = operation.split_once(' ').unwrap_or_default();
    let mut path = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        let (name, after) = after.split_once('}').unwrap_or_default();
        path += before;
        path += &fill(name);
        rest = after;
    }
    path + rest
}

/// A path whose ids could be, but are not.
fn unknown(operation: &str) -> String {
    let is_ticket = operation.contains("/tickets/");
    path_of(operation, |name| match name {
        "id" if is_ticket => "0190b6d7-0000-7000-8000-00000000ffff".to_owned(),
        "id" if operation.contains("dead-letters") => "1-0".to_owned(),
        "id" => "999999".to_owned(),
        "provider" => "github".to_owned(),
        "integration" => "shop".to_owned(),
        "consumer" => "0190b6d7-0000-7000-8000-00000000fffe".to_owned(),
        name => format!("no-such-{name}"),
    })
}

/// Copies of a body, each with one text replaced.
fn with_text(value: &Value, text: &str) -> Vec<Value> {
    match value {
        Value::String(_) => vec![text.into()],
        Value::Array(items) => (0..items.len())
            .flat_map(|place| {
                with_text(&items[place], text).into_iter().map(move |new| (place, new))
            })
            .map(|(place, new)| {
                let mut items = items.clone();
                items[place] = new;
                items.into()
            })
            .collect(),
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, inner)| {
                with_text(inner, text).into_iter().map(move |new| (name.clone(), new))
            })
            .map(|(name, new)| {
                let mut fields = fields.clone();
                fields.insert(name, new);
                fields.into()
            })
            .collect(),
        _ => Vec::new(),
    }
}

#[tokio::test]
async fn every_route_has_a_case_and_every_case_a_route() -> Result<()> {
    let routes = Routes::start().await?;
    let mut described = BTreeSet::new();
    for (path, item) in routes.description["paths"].as_object().context("paths")? {
        for method in ["get", "post", "put", "patch", "delete"] {
            if item.get(method).is_some() {
                described.insert(format!("{method} {path}"));
            }
        }
    }
    let cases: BTreeSet<String> =
        CASES.iter().map(|(operation, ..)| (*operation).to_owned()).collect();
    let without: Vec<_> = described.difference(&cases).collect();
    assert!(without.is_empty(), "add a case for {without:?}");
    let gone: Vec<_> = cases.difference(&described).collect();
    assert!(gone.is_empty(), "there is no route {gone:?}");
    for (operation, _, body) in CASES {
        let takes = routes.described(operation).get("requestBody").is_some();
        assert_eq!(takes, body.is_some(), "{operation}: does it take a body?");
    }
    Ok(())
}

#[tokio::test]
async fn a_token_opens_what_its_role_allows_and_nothing_else() -> Result<()> {
    let routes = Routes::start().await?;
    for (operation, needs, body) in CASES {
        let (path, body) = (unknown(operation), body.map(|body| body()));
        let call = async |token| {
            let body = body.as_ref().and_then(json_body);
            anyhow::Ok(routes.call(operation, &path, token, body).await?.0.as_u16())
        };
        let strangers = [None, Some("guess-guess-guess-guess"), Some("")];
        for token in strangers {
            let status = call(token).await?;
            match needs {
                Nothing => assert!(status == 200 || status == 503, "{operation}: {status}"),
                _ => assert_eq!(status, 401, "{operation} with {token:?}"),
            }
        }
        let rank = |needs: Needs| needs as usize;
        for (role, token, has) in TOKENS {
            if matches!(needs, Nothing | Signature) {
                continue;
            }
            let (status, may) = (call(Some(token)).await?, rank(has) >= rank(*needs));
            assert_eq!(status != 403, may, "{operation} with the role {role}: {status}");
            assert_ne!(status, 401, "{operation} with the role {role}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn ids_that_are_unknown_or_odd_are_refused_and_break_nothing() -> Result<()> {
    let routes = Routes::start().await?;
    // What may be made by naming it is there afterwards; all else is not found.
    let makes = ["/messages", "/consume", "/import", "/tail", "/webhooks/"];
    for (operation, needs, body) in CASES.iter().filter(|case| case.0.contains('{')) {
        let body = || body.and_then(|body| json_body(&body()));
        let (status, refusal) = routes.call(operation, &unknown(operation), BOSS, body()).await?;
        let is_made =
            operation.contains("/topics/") || makes.iter().any(|it| operation.contains(it));
        if !is_made {
            assert_eq!(status, 404, "{operation} {needs:?}: {refusal}");
        }
        for text in nasty() {
            let path = path_of(operation, |_| encoded(&text));
            let (status, refusal) = routes.call(operation, &path, BOSS, body()).await?;
            if !is_made {
                assert!(status.is_client_error(), "{operation} {text:?}: {status} {refusal}");
            }
        }
    }
    whole(&routes).await
}

#[tokio::test]
async fn bodies_that_are_cut_large_deep_or_of_another_kind_are_refused() -> Result<()> {
    let routes = Routes::start().await?;
    let deep = [b"[".repeat(100_000), b"]".repeat(100_000)].concat();
    let deep_field = [br#"{"a":"#.repeat(20_000), b"1".to_vec(), b"}".repeat(20_000)].concat();
    for (operation, needs, body) in CASES {
        let Some(good) = body.map(|body| body().to_string()) else { continue };
        let path = unknown(operation);
        let call = async |kind: &str, bytes: Vec<u8>| {
            let (status, refusal) =
                routes.call(operation, &path, BOSS, Some((kind, bytes))).await?;
            anyhow::Ok((status.as_u16(), refusal))
        };
        let json = "application/json";
        // Lines, and whatever is not signed, are refused by other words.
        let is_plain = *needs != Signature && !operation.ends_with("/import");
        let expect = |status: u16| if is_plain { vec![status] } else { vec![status, 400, 401] };
        let cut = good.as_bytes()[..good.len() - 1].to_vec();
        let odd = [b"{\"a\":\"".to_vec(), vec![0xff, 0xfe], b"\"}".to_vec()].concat();
        for (what, bytes) in [
            ("empty", Vec::new()),
            ("cut", cut),
            ("not UTF-8", odd),
            ("deep", deep.clone()),
            ("deep fields", deep_field.clone()),
            ("a list", b"[]".to_vec()),
            ("null", b"null".to_vec()),
            ("text", b"\"text\"".to_vec()),
            ("two values", b"{}{}".to_vec()),
            ("not JSON", b"<xml/>".to_vec()),
        ] {
            let (status, refusal) = call(json, bytes).await?;
            assert!(expect(400).contains(&status), "{operation}, {what}: {status} {refusal}");
        }
        for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""] {
            let (status, refusal) = call(kind, good.clone().into_bytes()).await?;
            assert!(expect(415).contains(&status), "{operation}, {kind}: {status} {refusal}");
        }
        let (status, refusal) = call(json, vec![b' '; 10 * 1024 * 1024]).await?;
        assert!(expect(413).contains(&status), "{operation}, 10 MiB: {status} {refusal}");
        if operation.contains("/webhooks/") {
            continue;
        }
        // A slip of the pen in a name is told.
        let mut slip: Value = serde_json::from_str(&good)?;
        slip["no_such_field"] = 1.into();
        let (status, refusal) = call(json, slip.to_string().into_bytes()).await?;
        assert!((400..500).contains(&status), "{operation}, unknown field: {status} {refusal}");
    }
    whole(&routes).await
}

#[tokio::test]
async fn sql_and_html_in_every_text_are_text() -> Result<()> {
    let routes = Routes::start().await?;
    for (operation, _, body) in CASES {
        let path = unknown(operation);
        for text in nasty() {
            for body in body.iter().flat_map(|body| with_text(&body(), &text)) {
                routes.call(operation, &path, BOSS, json_body(&body)).await?;
            }
            let parameters = routes.described(operation)["parameters"].as_array();
            for parameter in parameters.into_iter().flatten().filter(|it| it["in"] == "query") {
                let name = parameter["name"].as_str().context("a name")?;
                let path = format!("{path}?{name}={}", encoded(&text));
                let body = body.and_then(|body| json_body(&body()));
                routes.call(operation, &path, BOSS, body).await?;
            }
        }
        let slip = format!("{path}?no_such_parameter=1");
        routes.call(operation, &slip, BOSS, body.and_then(|body| json_body(&body()))).await?;
    }
    // Every text field of every body was among them.
    for (operation, ..) in CASES {
        let content = &routes.described(operation)["requestBody"]["content"]["application/json"];
        let Some(reference) = content["schema"]["$ref"].as_str() else { continue };
        let schema = routes.description.pointer(reference.trim_start_matches('#'));
        let properties = schema.context("a schema")?["properties"].as_object();
        let examples = CASES.iter().filter(|case| case.0 == *operation);
        let examples: Vec<Value> = examples.filter_map(|case| Some(case.2?())).collect();
        for (name, field) in properties.into_iter().flatten() {
            let is_text = field["type"] == "string" || field["type"] == json!(["string", "null"]);
            let is_tried = examples.iter().any(|example| example[name].is_string());
            assert!(!is_text || is_tried, "{operation}: give `{name}` a text");
        }
    }
    whole(&routes).await
}

/// Everything is there, nothing was run, and nobody panicked.
async fn whole(routes: &Routes) -> Result<()> {
    for path in ["/api/v1/tickets", "/api/v1/issues", "/api/v1/audit", "/api/v1/topics"] {
        let (status, _) = routes.call("get", path, BOSS, None).await?;
        assert_eq!(status, 200, "{path}");
    }
    let page = routes.server.client.get(routes.server.url("/")).bearer_auth(TOKENS[2].1);
    let page = page.send().await?.text().await?;
    assert!(!page.contains("<script>alert") && !page.contains("<img src=x"), "{page}");
    routes.server.until("/health/ready", |status, _| status == 200).await?;
    let log = routes.server.log();
    assert!(!log.contains("panicked"), "{log}");
    Ok(())
}
