//! Invalid input for every route. The OpenAPI document is the list of routes; a route without a case fails here.

mod cases;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::cases::CASES;
use crate::cases::RequiredAccess::{self, Admin, Nothing, Read, Signature, Write};
use crate::support::hostile_text::{encoded, hostile_texts, with_text};
use crate::support::sender::integrations;
use crate::support::{LIMIT, Server, ServerDir};

const TOKENS: [(&str, &str, RequiredAccess); 3] = [
    ("read", "read-read-read-read", Read),
    ("write", "write-write-write-write", Write),
    ("admin", "admin-admin-admin-admin", Admin),
];
const ADMIN_TOKEN: Option<&str> = Some(TOKENS[2].1);

struct Routes {
    server: Server,
    description: Value,
    _dir: ServerDir,
}

impl Routes {
    async fn start() -> Result<Self> {
        let mut settings = integrations();
        for (role, token, _) in TOKENS {
            settings +=
                &format!("[[token]]\nname = \"{role}\"\nrole = \"{role}\"\ntoken = \"{token}\"\n");
        }
        let dir = ServerDir::new()?.settings(&settings)?;
        let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
        let server = dir.serve(&many)?;
        let asked = server.client.get(server.url("/openapi.json")).bearer_auth(TOKENS[2].1);
        let description = asked.send().await?.json().await?;
        Ok(Self { server, description, _dir: dir })
    }

    /// Sends a request. Returns the status and, for an error, its body. A streamed success is not read.
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
        let refusal: Value = serde_json::from_str(&refusal)
            .with_context(|| format!("{}: {status} {refusal:?} is not JSON", what()))?;
        // 503 means an unavailable dependency or a full limit, 501 a feature that is not built in; 500 is a bug.
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

/// The path of an operation with its parameters filled in.
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

/// A path with valid but unknown ids.
fn unknown(operation: &str) -> String {
    let is_ticket = operation.contains("/tickets/");
    path_of(operation, |name| match name {
        "id" if is_ticket => "0190b6d7-0000-7000-8000-00000000ffff".to_owned(),
        "id" if operation.contains("dead-letters") => "1-0".to_owned(),
        "id" => "999999".to_owned(),
        "provider" => "github".to_owned(),
        "integration" if operation.contains("/webhooks/") => "shop".to_owned(),
        name => format!("no-such-{name}"),
    })
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
    assert!(without.is_empty(), "missing cases: {without:?}");
    let gone: Vec<_> = cases.difference(&described).collect();
    assert!(gone.is_empty(), "cases without a route: {gone:?}");
    for (operation, _, body) in CASES {
        let takes = routes.described(operation).get("requestBody").is_some();
        assert_eq!(takes, body.is_some(), "{operation}: body in case and document differ");
    }
    Ok(())
}

#[tokio::test]
async fn a_token_grants_only_what_its_role_allows() -> Result<()> {
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
        let rank = |needs: RequiredAccess| needs as usize;
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
async fn unknown_and_hostile_ids_are_rejected() -> Result<()> {
    let routes = Routes::start().await?;
    // Some objects are created when they are named; all others are not found.
    let makes = ["/messages", "/import", "/tail", "/webhooks/"];
    for (operation, needs, body) in CASES.iter().filter(|case| case.0.contains('{')) {
        let body = || body.and_then(|body| json_body(&body()));
        let (status, refusal) =
            routes.call(operation, &unknown(operation), ADMIN_TOKEN, body()).await?;
        let is_made = operation.contains("/topics/")
            || makes.iter().any(|it| operation.contains(it))
            // A service exists when a stream is added to it.
            || operation.ends_with("/assignments/{service}")
            || operation.ends_with("/assignments/{service}/streams");
        if !is_made {
            assert_eq!(status, 404, "{operation} {needs:?}: {refusal}");
        }
        for text in hostile_texts() {
            let path = path_of(operation, |_| encoded(&text));
            let (status, refusal) = routes.call(operation, &path, ADMIN_TOKEN, body()).await?;
            if !is_made {
                assert!(status.is_client_error(), "{operation} {text:?}: {status} {refusal}");
            }
        }
    }
    whole(&routes).await
}

#[tokio::test]
async fn truncated_large_deep_and_mistyped_bodies_are_rejected() -> Result<()> {
    let routes = Routes::start().await?;
    let deep = [b"[".repeat(100_000), b"]".repeat(100_000)].concat();
    let deep_field = [br#"{"a":"#.repeat(20_000), b"1".to_vec(), b"}".repeat(20_000)].concat();
    for (operation, needs, body) in CASES {
        let Some(good) = body.map(|body| body().to_string()) else { continue };
        let path = unknown(operation);
        let call = async |kind: &str, bytes: Vec<u8>| {
            let (status, refusal) =
                routes.call(operation, &path, ADMIN_TOKEN, Some((kind, bytes))).await?;
            anyhow::Ok((status.as_u16(), refusal))
        };
        let json = "application/json";
        // JSON lines and unsigned webhooks are rejected with other statuses.
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
        // A typo in a field name is reported.
        let mut slip: Value = serde_json::from_str(&good)?;
        slip["no_such_field"] = 1.into();
        let (status, refusal) = call(json, slip.to_string().into_bytes()).await?;
        assert!((400..500).contains(&status), "{operation}, unknown field: {status} {refusal}");
    }
    whole(&routes).await
}

#[tokio::test]
async fn sql_and_html_in_every_text_are_treated_as_text() -> Result<()> {
    let routes = Routes::start().await?;
    for (operation, _, body) in CASES {
        let path = unknown(operation);
        for text in hostile_texts() {
            for body in body.iter().flat_map(|body| with_text(&body(), &text)) {
                routes.call(operation, &path, ADMIN_TOKEN, json_body(&body)).await?;
            }
            for name in parameters(&routes, operation, "query") {
                let path = format!("{path}?{name}={}", encoded(&text));
                let body = body.and_then(|body| json_body(&body()));
                routes.call(operation, &path, ADMIN_TOKEN, body).await?;
            }
        }
        let slip = format!("{path}?no_such_parameter=1");
        routes
            .call(operation, &slip, ADMIN_TOKEN, body.and_then(|body| json_body(&body())))
            .await?;
    }
    // Every text field of every body was covered, nested ones included.
    for (operation, ..) in CASES {
        let content = &routes.described(operation)["requestBody"]["content"]["application/json"];
        let examples = CASES.iter().filter(|case| case.0 == *operation);
        let examples: Vec<Value> = examples.filter_map(|case| Some(case.2?())).collect();
        for location in texts(&routes.description, &content["schema"], &[]) {
            let is_tried = examples.iter().any(|example| has_text(example, &location));
            assert!(is_tried, "{operation}: `{}` has no text in its case", location.join("."));
        }
    }
    whole(&routes).await
}

/// Locations of texts in a schema. `*` is any list item or any field with a free name.
fn texts(description: &Value, schema: &Value, location: &[&str]) -> Vec<Vec<String>> {
    assert!(location.len() < 20, "the schema is recursive");
    let below =
        |schema: &Value, name: &str| texts(description, schema, &[location, &[name]].concat());
    if let Some(reference) = schema["$ref"].as_str() {
        let schema = description.pointer(reference.trim_start_matches('#'));
        return texts(description, schema.unwrap_or(&Value::Null), location);
    }
    let mut found = Vec::new();
    if schema["type"] == "string" || schema["type"] == json!(["string", "null"]) {
        found.push(location.iter().map(|name| (*name).to_owned()).collect());
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        found.extend(below(field, name));
    }
    for many in ["items", "additionalProperties"] {
        if schema[many].is_object() {
            found.extend(below(&schema[many], "*"));
        }
    }
    for ways in ["oneOf", "anyOf", "allOf"] {
        let ways = schema[ways].as_array().into_iter().flatten();
        found.extend(ways.flat_map(|way| texts(description, way, location)));
    }
    found
}

fn has_text(value: &Value, location: &[String]) -> bool {
    match (location.split_first(), value) {
        (None, value) => value.is_string(),
        (Some((_, rest)), Value::Array(items)) => items.iter().any(|item| has_text(item, rest)),
        (Some((name, rest)), Value::Object(fields)) if name == "*" => {
            fields.values().any(|field| has_text(field, rest))
        }
        (Some((name, rest)), value) => has_text(&value[name], rest),
    }
}

#[tokio::test]
async fn invalid_utf8_in_paths_and_queries_is_rejected() -> Result<()> {
    let routes = Routes::start().await?;
    let odd = ["%FF%FE", "%C3%28", "%00", "%ED%A0%80", "%", "%zz"];
    for (operation, _, body) in CASES {
        let body = || body.and_then(|body| json_body(&body()));
        for odd in odd {
            if operation.contains('{') {
                let path = path_of(operation, |_| odd.to_owned());
                let (status, refusal) = routes.call(operation, &path, ADMIN_TOKEN, body()).await?;
                // An invalid percent-encoding is taken literally, which may be the name of a new object.
                let is_name = ["%", "%zz"].contains(&odd) && status.is_success();
                let is_refused = status.is_client_error() || status == 501;
                assert!(is_refused || is_name, "{operation} {odd}: {status} {refusal}");
            }
            for parameter in parameters(&routes, operation, "query") {
                let path = format!("{}?{parameter}={odd}", unknown(operation));
                routes.call(operation, &path, ADMIN_TOKEN, body()).await?;
            }
        }
    }
    whole(&routes).await
}

/// Of so many routes in a row, one gets a value of a header that all have.
const ROUTES_PER_VALUE: usize = 4;

#[tokio::test]
async fn hostile_header_values_are_handled() -> Result<()> {
    let routes = Routes::start().await?;
    let texts = hostile_texts().into_iter().map(String::into_bytes);
    let odd = [b"\xff\xfe".to_vec(), "键".into(), b"1-0-0".to_vec()];
    let values: Vec<_> =
        texts.chain(odd).filter(|it| HeaderValue::from_bytes(it).is_ok()).collect();
    assert!(values.len() > 5);
    let always = ["content-type", "accept", "host", "origin", "traceparent", "x-forwarded-for"];
    for (index, (operation, _, body)) in CASES.iter().enumerate() {
        let described = parameters(&routes, operation, "header").into_iter().map(|name| (name, 1));
        // These mean the same on every route: each route gets a part of the values.
        let always = always.iter().map(|name| ((*name).to_owned(), ROUTES_PER_VALUE));
        for (name, step) in always.chain(described) {
            for value in values.iter().skip(index % step).step_by(step) {
                let method = operation.split(' ').next().unwrap_or_default().to_uppercase();
                let url = routes.server.url(&unknown(operation));
                let mut request = routes.server.client.request(method.parse()?, url);
                if let Some(body) = body {
                    request = request.json(&body());
                }
                // `insert` replaces the client's own header.
                let mut headers = HeaderMap::new();
                headers.insert(HeaderName::try_from(&name)?, HeaderValue::from_bytes(value)?);
                let request = request.headers(headers).bearer_auth(TOKENS[2].1);
                let status = request.send().await.context(*operation)?.status();
                assert_ne!(status, 500, "{operation} {name}: {value:?}");
            }
        }
    }
    whole(&routes).await
}

#[tokio::test]
async fn every_change_by_any_route_is_in_the_audit_log() -> Result<()> {
    let routes = Routes::start().await?;
    // Webhooks are recorded as events; messages of topics are only moved.
    let is_written = |operation: &str| {
        !operation.starts_with("get ")
            && !operation.contains("/webhooks/")
            && !operation.ends_with("/topics/{topic}/messages")
            && !operation.ends_with("/pull")
            && !operation.ends_with("/settle")
            && !operation.ends_with("/extend")
    };
    let mut expected = BTreeSet::new();
    for (operation, _, body) in CASES.iter().filter(|case| is_written(case.0)) {
        let path = unknown(operation);
        let body = body.and_then(|body| json_body(&body()));
        routes.call(operation, &path, ADMIN_TOKEN, body).await?;
        let method = operation.split(' ').next().unwrap_or_default().to_uppercase();
        expected.insert((method, path));
    }
    assert!(expected.len() > 15, "{expected:?}");
    let request = routes.server.client.get(routes.server.url("/api/v1/audit?limit=500"));
    let log: Value = request.bearer_auth(TOKENS[2].1).send().await?.json().await?;
    let entries = log["entries"].as_array().context("entries")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let found: BTreeSet<_> =
        entries.iter().map(|entry| (text(&entry["method"]), text(&entry["path"]))).collect();
    assert_eq!(found, expected);
    Ok(())
}

fn parameters(routes: &Routes, operation: &str, kind: &str) -> Vec<String> {
    let all = routes.described(operation)["parameters"].as_array().into_iter().flatten();
    let of_kind = all.filter(|parameter| parameter["in"] == kind);
    of_kind.filter_map(|parameter| Some(parameter["name"].as_str()?.to_owned())).collect()
}

/// Sends a request whose body is shorter than announced. Returns everything received until the connection ends.
async fn cut_off(routes: &Routes, operation: &str, body: &str) -> Result<String> {
    let (method, _) = operation.split_once(' ').context("a method")?;
    let head = format!(
        "{} {} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        method.to_uppercase(),
        unknown(operation),
        TOKENS[2].1,
        body.len() + 10,
    );
    let mut stream = tokio::net::TcpStream::connect(routes.server.address).await?;
    stream.write_all(head.as_bytes()).await?;
    stream.shutdown().await?;
    let mut answer = Vec::new();
    // A closed connection may end with an error after its response.
    let _ = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer)).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[tokio::test]
async fn a_truncated_body_changes_nothing() -> Result<()> {
    let routes = Routes::start().await?;
    let made = ["/api/v1/tickets", "/api/v1/sessions", "/api/v1/issues"];
    let look = async |path: &str| {
        let request = routes.server.client.get(routes.server.url(path)).bearer_auth(TOKENS[2].1);
        anyhow::Ok(request.send().await?.text().await?)
    };
    let mut before = Vec::new();
    for path in made {
        before.push(look(path).await?);
    }
    for (operation, _, body) in CASES {
        let Some(body) = body else { continue };
        // Valid JSON, but shorter than announced.
        for text in [body().to_string(), String::new(), "{\"".to_owned()] {
            let answer = cut_off(&routes, operation, &text).await?;
            let is_refused = ["400 ", "401 ", "404 "]
                .iter()
                .any(|status| answer.starts_with(&format!("HTTP/1.1 {status}")));
            assert!(answer.is_empty() || is_refused, "{operation} {text}: {answer}");
        }
    }
    for (path, before) in made.into_iter().zip(before) {
        assert_eq!(look(path).await?, before, "{path}");
    }
    // System topics may have been created in the meantime.
    let topics = look("/api/v1/topics").await?;
    assert!(!topics.contains("no-such-topic") && !topics.contains("\"a\""), "{topics}");
    whole(&routes).await
}

#[tokio::test]
async fn an_unexpected_body_is_ignored() -> Result<()> {
    let routes = Routes::start().await?;
    for (operation, ..) in CASES.iter().filter(|case| case.2.is_none()) {
        for bytes in [b"{".to_vec(), vec![0xff; 64], b"[".repeat(2000), vec![b' '; 20_000]] {
            let body = Some(("application/json", bytes));
            routes.call(operation, &unknown(operation), ADMIN_TOKEN, body).await?;
        }
    }
    whole(&routes).await
}

/// All data is intact, nothing was executed, and nothing panicked.
async fn whole(routes: &Routes) -> Result<()> {
    for path in ["/api/v1/tickets", "/api/v1/issues", "/api/v1/audit", "/api/v1/topics"] {
        let (status, _) = routes.call("get", path, ADMIN_TOKEN, None).await?;
        assert_eq!(status, 200, "{path}");
    }
    let page =
        routes.server.client.get(routes.server.url("/console/issues")).bearer_auth(TOKENS[2].1);
    let page = page.send().await?.text().await?;
    assert!(!page.contains("<script>alert") && !page.contains("<img src=x"), "{page}");
    routes.server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    let log = routes.server.log();
    assert!(!log.contains("panicked"), "{log}");
    Ok(())
}
