//! Completes the OpenAPI document: title, security scheme, operation ids and the error response of every operation.
//!
//! Upstream: `router.rs`, with the descriptions of the handlers. Guarantees: every operation declares its error
//! response and has an id of its own; every response has a description.

use std::collections::BTreeMap;

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    Components, ContentBuilder, Info, License, OpenApi, Ref, RefOr, Response, ResponseBuilder,
    Schema,
};
use utoipa::{PartialSchema, ToSchema};

use crate::http::ErrorResponse;

/// Name of the security scheme.
const SECURITY_SCHEME: &str = "token";

/// The complete document as JSON.
pub(crate) fn build_document(mut described: OpenApi) -> String {
    let mut info = Info::new("Headwater", env!("CARGO_PKG_VERSION"));
    info.description = Some(env!("CARGO_PKG_DESCRIPTION").to_owned());
    let mut license = License::new("MIT OR Apache-2.0");
    license.identifier = Some("MIT OR Apache-2.0".to_owned());
    info.license = Some(license);
    described.info = info;
    let components = described.components.get_or_insert_with(Components::new);
    let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
        "A `[[token]]` of the settings. Without configured tokens only loopback requests are served.",
    ));
    components.add_security_scheme(SECURITY_SCHEME, SecurityScheme::Http(scheme.build()));
    components.schemas.insert(ErrorResponse::name().into_owned(), ErrorResponse::schema());
    let mut schemas = Vec::new();
    ErrorResponse::schemas(&mut schemas);
    components.schemas.extend(schemas);
    described.security =
        Some(vec![SecurityRequirement::new(SECURITY_SCHEME, Vec::<String>::new())]);
    let descriptions = schema_descriptions(components);
    for (path, item) in &mut described.paths.paths {
        let operations = [&mut item.get, &mut item.post, &mut item.put, &mut item.delete];
        for operation in operations.into_iter().flatten() {
            // The name of a handler is unique in its tag only.
            let tag = operation.tags.as_ref().and_then(|tags| tags.first());
            if let (Some(tag), Some(handler)) = (tag, &operation.operation_id) {
                operation.operation_id = Some(format!("{}_{handler}", tag.replace(' ', "_")));
            }
            let summary = operation.summary.clone().unwrap_or_default();
            let responses = &mut operation.responses.responses;
            for (status, response) in responses.iter_mut() {
                let RefOr::T(response) = response else { continue };
                let is_refusal = !status.starts_with('2') && response.content.is_empty();
                if response.description.is_empty() {
                    response.description = match status.starts_with('2') {
                        true => success(response, &descriptions).unwrap_or(summary.clone()),
                        false => refusal(status, path),
                    };
                }
                if is_refusal {
                    *response = error_response(&response.description);
                }
            }
            responses.insert("default".to_owned(), RefOr::T(error_response(ANY_ERROR)));
        }
    }
    described.to_json().unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
}

/// Description of a response that an operation does not list.
const ANY_ERROR: &str =
    "Any other error. `code` is stable and meant for programs; `message` says what to do next.";

/// The descriptions of all schemas, by name.
fn schema_descriptions(components: &Components) -> BTreeMap<String, String> {
    let description = |schema: &RefOr<Schema>| match schema {
        RefOr::T(Schema::Object(object)) => object.description.clone(),
        RefOr::T(Schema::AllOf(all)) => all.description.clone(),
        RefOr::T(Schema::OneOf(one)) => one.description.clone(),
        _ => None,
    };
    let described = components.schemas.iter();
    described.filter_map(|(name, schema)| Some((name.clone(), description(schema)?))).collect()
}

/// The description of the body of a success response.
fn success(response: &Response, descriptions: &BTreeMap<String, String>) -> Option<String> {
    let schema = response.content.values().find_map(|content| match content {
        RefOr::T(content) => content.schema.as_ref(),
        RefOr::Ref(_) => None,
    })?;
    let RefOr::Ref(reference) = schema else { return None };
    let name = reference.ref_location.rsplit('/').next()?;
    descriptions.get(name).cloned()
}

/// Why an operation on this path answers with this status.
fn refusal(status: &str, path: &str) -> String {
    match status {
        "400" => {
            "The request is invalid; the message names the field and what is allowed.".to_owned()
        }
        "401" => "The token or signature is missing or wrong.".to_owned(),
        "403" => "The role of the token does not allow it.".to_owned(),
        "404" => format!("{} does not exist.", object(path)),
        "409" => "The current state does not allow it; the message says why.".to_owned(),
        "413" => "The body exceeds `http.body_bytes_max`.".to_owned(),
        "429" => "Too many requests; `Retry-After` says when to try again.".to_owned(),
        "503" => "A server that this needs is unavailable; `Retry-After` says when to try again."
            .to_owned(),
        _ => ANY_ERROR.to_owned(),
    }
}

/// The object that a path names.
fn object(path: &str) -> &'static str {
    let objects = [
        ("/dead-letters/{id}", "The topic or the dead letter"),
        ("/groups/{group}", "The topic or the group"),
        ("/topics/{topic}", "The topic"),
        ("/events/{event}", "The issue or the event"),
        ("/issues/{id}", "The issue"),
        ("/tickets/{id}", "The ticket"),
        ("/outbox/{id}", "The dead outbox row"),
        ("/sessions/{session}", "The session"),
        ("/reports/{name}", "The report"),
        ("/users/{user}", "The user"),
        ("/webhooks/", "The integration"),
    ];
    let found = objects.iter().find(|(part, _)| path.contains(part));
    found.map_or("What the path names", |(_, object)| object)
}

fn error_response(text: &str) -> Response {
    let schema = Ref::from_schema_name(ErrorResponse::name());
    let content = ContentBuilder::new().schema(Some(schema)).build();
    ResponseBuilder::new().description(text).content("application/json", content).build()
}
