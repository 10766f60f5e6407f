//! The OpenAPI document is valid and describes exactly the routes that exist.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use reqwest::Method;
use serde_json::Value;
use support::{Server, ServerDir, answer};

const METHODS: [&str; 4] = ["get", "post", "put", "delete"];

async fn described() -> (ServerDir, Server, Value) {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&[]).unwrap();
    let (status, description) = server.get("/openapi.json").await.unwrap();
    assert_eq!(status, 200);
    (dir, server, description)
}

/// Every operation with its method and path.
fn operations(description: &Value) -> Vec<(String, String, &Value)> {
    let paths = description["paths"].as_object().unwrap();
    let mut found = Vec::new();
    for (path, item) in paths {
        for method in METHODS {
            if let Some(operation) = item.get(method) {
                found.push((method.to_owned(), path.clone(), operation));
            }
        }
    }
    found
}

/// The parameters in a path.
fn names_in(path: &str) -> BTreeSet<String> {
    path.split('{').skip(1).map(|rest| rest.split('}').next().unwrap().to_owned()).collect()
}

fn references(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get("$ref") {
                found.insert(reference.clone());
            }
            fields.values().for_each(|value| references(value, found));
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        _ => {}
    }
}

#[tokio::test]
async fn the_document_is_valid_openapi() {
    let (_dir, _server, description) = described().await;
    let spec = oas3::from_json(description.to_string()).unwrap();
    spec.validate_version().unwrap();
    assert!(spec.openapi.starts_with("3.1."), "{}", spec.openapi);
    let parsed: BTreeSet<_> = spec
        .operations()
        .map(|(path, method, _)| (method.to_string().to_lowercase(), path))
        .collect();
    let written: BTreeSet<_> =
        operations(&description).into_iter().map(|(method, path, _)| (method, path)).collect();
    assert_eq!(parsed, written);

    // Every reference resolves.
    let mut wanted = BTreeSet::new();
    references(&description, &mut wanted);
    assert!(wanted.len() > 20, "{wanted:?}");
    for reference in wanted {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(description.pointer(pointer).is_some(), "{reference} does not resolve");
    }
}

/// The official JSON schema of OpenAPI 3.1 (2025-11-23), checked by a validator that shares no code with ours.
#[tokio::test]
async fn the_document_matches_the_official_schema_of_openapi_3_1() {
    let (_dir, _server, description) = described().await;
    let schema = headwater_testkit::NpmFile::OpenApiSchema.read().unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let (mut schemas, mut compiler) = (boon::Schemas::new(), boon::Compiler::new());
    compiler.add_resource("openapi-3.1.json", schema).unwrap();
    let compiled = compiler.compile("openapi-3.1.json", &mut schemas).unwrap();
    if let Err(problem) = schemas.validate(&description, compiled) {
        panic!("{problem:#}");
    }
    // The check can fail.
    let mut wrong = description;
    wrong["paths"]["/metrics"]["get"]["responses"]["200"] = serde_json::json!({});
    assert!(schemas.validate(&wrong, compiled).is_err());
}

#[tokio::test]
async fn every_operation_describes_parameters_responses_and_errors() {
    let (_dir, _server, description) = described().await;
    let mut ids = BTreeMap::new();
    for (method, path, operation) in operations(&description) {
        let name = format!("{method} {path}");
        let summary = operation["summary"].as_str().or(operation["description"].as_str());
        assert!(summary.is_some_and(|text| text.len() > 5), "{name} has no description");
        assert!(operation["tags"][0].is_string(), "{name} has no tag");

        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        let in_path: BTreeSet<String> = parameters
            .iter()
            .filter(|parameter| parameter["in"] == "path")
            .map(|parameter| parameter["name"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(in_path, names_in(&path), "{name}");
        assert!(
            parameters.iter().all(|one| one["in"] != "path" || one["required"] == true),
            "{name}"
        );

        let responses = operation["responses"].as_object().unwrap();
        assert!(
            responses.keys().any(|status| status.starts_with('2')),
            "{name} has no success response"
        );
        let refusal = &responses["default"]["content"]["application/json"]["schema"]["$ref"];
        assert_eq!(refusal, "#/components/schemas/ErrorResponse", "{name}");
        for (status, response) in responses {
            let description = response["description"].as_str().unwrap();
            let is_real = description.len() > 5 && !["Success.", "Error."].contains(&description);
            assert!(is_real, "{name} {status}: {description:?}");
            let content = response["content"].as_object();
            assert!(
                content.is_some_and(|content| !content.is_empty()),
                "{name} {status} has no content type"
            );
        }
        *ids.entry(operation["operationId"].to_string()).or_insert(0) += 1;
    }
    assert!(ids.values().all(|count| *count == 1), "{ids:?}");
    assert_eq!(description["security"][0]["token"], serde_json::json!([]));
}

#[tokio::test]
async fn every_described_route_exists() {
    let (_dir, server, description) = described().await;
    let all = operations(&description);
    assert!(all.len() > 40, "{}", all.len());
    for (method, path, _) in all {
        // Unknown ids of the right type.
        let address = path
            .replace("/tickets/{id}", "/tickets/6f1c1a35-5a0e-4f6f-8f43-3d1f7a1affff")
            .replace("{id}", "1")
            .replace("{event}", "1")
            .replace("{session}", "nothing");
        let address = names_in(&address)
            .iter()
            .fold(address, |address, name| address.replace(&format!("{{{name}}}"), "nothing"));
        let asked = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
        let request = server.client.request(asked, server.url(&address));
        let request = if method == "post" { request.json(&serde_json::json!({})) } else { request };
        let response = request.send().await.unwrap();
        // An event stream has no end to wait for.
        let kind = response.headers().get("content-type").cloned();
        if kind.is_some_and(|kind| kind == "text/event-stream") {
            continue;
        }
        let (status, body) = answer(response).await.unwrap();
        assert_ne!(status, 405, "{method} {path}: {body}");
        assert_ne!(body["error"]["message"], "no such path", "{method} {path}");
    }
}

/// Routes added with `routes!` are described; those added with `route` would not be.
#[test]
fn no_route_is_added_without_a_description() {
    fn look(folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                look(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                // The demo also runs a callback server; pages for people are not operations of the API.
                && !path.ends_with("src/server/demo.rs")
                && !path.ends_with("src/http/console.rs")
                && !path.ends_with("src/http/draft_pages.rs")
            {
                let text = std::fs::read_to_string(&path).unwrap();
                for way in [".route(", ".route_service(", ".nest_service(", "MethodRouter"] {
                    found
                        .extend(text.contains(way).then(|| format!("{way} in {}", path.display())));
                }
            }
        }
    }
    let mut found = Vec::new();
    look(&headwater_testkit::package_folder().join("src"), &mut found);
    assert!(found.is_empty(), "{found:?}");
}
