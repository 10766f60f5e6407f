//! Completes the OpenAPI document: title, security scheme and the error response of every operation.
//!
//! Upstream: `router.rs`, with the descriptions of the handlers. Guarantees: every operation declares its error
//! response.

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    Components, ContentBuilder, Info, License, OpenApi, Ref, RefOr, Response, ResponseBuilder,
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
    for item in described.paths.paths.values_mut() {
        let operations = [&mut item.get, &mut item.post, &mut item.put, &mut item.delete];
        for operation in operations.into_iter().flatten() {
            let responses = &mut operation.responses.responses;
            for (status, response) in responses.iter_mut() {
                let RefOr::T(response) = response else { continue };
                let is_refusal = !status.starts_with('2') && response.content.is_empty();
                if is_refusal {
                    let text = std::mem::take(&mut response.description);
                    *response = error_response(&text);
                } else if response.description.is_empty() {
                    response.description = "Success.".to_owned();
                }
            }
            responses.insert("default".to_owned(), RefOr::T(error_response("")));
        }
    }
    described.to_json().unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
}

fn error_response(text: &str) -> Response {
    let text = if text.is_empty() { "Error." } else { text };
    let schema = Ref::from_schema_name(ErrorResponse::name());
    let content = ContentBuilder::new().schema(Some(schema)).build();
    ResponseBuilder::new().description(text).content("application/json", content).build()
}
