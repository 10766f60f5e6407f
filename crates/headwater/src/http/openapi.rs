//! What stands around the routes in `/openapi.json`: the title, who may ask, and the shape of every refusal.
//!
//! Upstream: `router`, with what the handlers say of themselves. Downstream: programs that read the description.
//! Promises: every operation says how it refuses; every path parameter is declared.

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    Components, ContentBuilder, Info, License, OpenApi, Ref, RefOr, Response, ResponseBuilder,
};
use utoipa::{PartialSchema, ToSchema};

use crate::http::Refusal;

/// The name of the scheme.
const TOKEN: &str = "token";

/// The whole description, as JSON.
pub(crate) fn complete(mut described: OpenApi) -> String {
    let mut info = Info::new("Headwater", env!("CARGO_PKG_VERSION"));
    info.description = Some(env!("CARGO_PKG_DESCRIPTION").to_owned());
    let mut license = License::new("MIT OR Apache-2.0");
    license.identifier = Some("MIT OR Apache-2.0".to_owned());
    info.license = Some(license);
    described.info = info;
    let components = described.components.get_or_insert_with(Components::new);
    let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
        "A [[token]] of the settings; without any, only this machine is served.",
    ));
    components.add_security_scheme(TOKEN, SecurityScheme::Http(scheme.build()));
    components.schemas.insert(Refusal::name().into_owned(), Refusal::schema());
    let mut schemas = Vec::new();
    Refusal::schemas(&mut schemas);
    components.schemas.extend(schemas);
    described.security = Some(vec![SecurityRequirement::new(TOKEN, Vec::<String>::new())]);
    for item in described.paths.paths.values_mut() {
        let operations = [&mut item.get, &mut item.post, &mut item.put, &mut item.delete];
        for operation in operations.into_iter().flatten() {
            let responses = &mut operation.responses.responses;
            for (status, response) in responses.iter_mut() {
                let RefOr::T(response) = response else { continue };
                let is_refusal = !status.starts_with('2') && response.content.is_empty();
                if is_refusal {
                    let words = std::mem::take(&mut response.description);
                    *response = refusal(&words);
                } else if response.description.is_empty() {
                    response.description = "What was asked for.".to_owned();
                }
            }
            responses.insert("default".to_owned(), RefOr::T(refusal("")));
        }
    }
    described.to_json().unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
}

fn refusal(words: &str) -> Response {
    let words = if words.is_empty() { "Why it was refused." } else { words };
    let schema = Ref::from_schema_name(Refusal::name());
    let content = ContentBuilder::new().schema(Some(schema)).build();
    ResponseBuilder::new().description(words).content("application/json", content).build()
}
