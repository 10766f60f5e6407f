//! Tools that are HTTP endpoints, as declared in the `[[tool]]` sections of the settings.
//!
//! Upstream: `config::tools` builds them, `tool_calls` calls them. Downstream: the endpoints, through `http_client`.
//! Guarantees: requests go only to allowed hosts, secrets only to the host of the tool; a redirect is followed only by a call that
//! changes nothing. Whatever an endpoint sends, at most `response_bytes_max` bytes are kept. Errors contain no URL and no secret.
//! Not here: the timeout and the idempotency of calls (see `tool_calls`).

use std::sync::OnceLock;

use async_trait::async_trait;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION};
use reqwest::{Client, Method, Response, StatusCode, Url};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value as Json, json};

use crate::desk::tool::{Tool, ToolDefinition, ToolError, ToolRecovery, ToolRequest};
use crate::desk::tool_template::{BodyTemplate, KEY_VARIABLE, UrlTemplate};
use crate::desk::toolbox::InvalidTool;
use crate::http_client::{self, describe};
use crate::limits::{TOOL_REDIRECTS_MAX, TOOL_RESPONSE_BYTES_DEFAULT, TOOL_RESPONSE_BYTES_MAX};
use crate::text;

/// Bytes of an error response that the model is told.
const ERROR_BYTES_MAX: usize = 300;

/// Bytes of an error response that is read as a whole, because it may be JSON.
const ERROR_JSON_BYTES_MAX: u64 = 16 * 1024;

/// Settings of an HTTP tool.
#[derive(Clone, Debug)]
pub struct HttpToolConfig {
    /// What the tool is. Its `recovery` is derived from the fields below.
    pub definition: ToolDefinition,
    /// `GET`, `POST`, `PUT`, `PATCH` or `DELETE`.
    pub method: String,
    /// URL with variables in its path and query.
    pub url: String,
    /// What is sent.
    pub body: HttpToolBody,
    /// Headers of each request.
    pub headers: Vec<HttpToolHeader>,
    /// Header with the idempotency key, if the endpoint respects one.
    pub idempotency_header: Option<String>,
    /// URL that tells what a call with an idempotency key has done: 404 if nothing.
    pub lookup_url: Option<String>,
    /// Hosts to which requests may go. Empty: that of `url`.
    pub allowed_hosts: Vec<String>,
    /// Maximum bytes of a response. Default: 16 KiB.
    pub response_bytes_max: usize,
}

impl HttpToolConfig {
    /// A tool without headers that sends the arguments of a call as JSON, or nothing with `GET` and `DELETE`.
    pub fn new(definition: ToolDefinition, method: &str, url: &str) -> Self {
        Self {
            definition,
            method: method.to_owned(),
            url: url.to_owned(),
            body: match method {
                "GET" | "DELETE" => HttpToolBody::None,
                _ => HttpToolBody::Arguments,
            },
            headers: Vec::new(),
            idempotency_header: None,
            lookup_url: None,
            allowed_hosts: Vec::new(),
            response_bytes_max: TOOL_RESPONSE_BYTES_DEFAULT,
        }
    }
}

/// The body of the requests of an HTTP tool.
#[derive(Clone, Debug, PartialEq)]
pub enum HttpToolBody {
    /// None.
    None,
    /// The arguments of the call, as JSON.
    Arguments,
    /// JSON with variables in its strings.
    Template(Json),
}

/// A header of the requests of an HTTP tool.
#[derive(Clone, Debug)]
pub struct HttpToolHeader {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: SecretString,
}

/// A tool that is an HTTP endpoint.
#[derive(Debug)]
pub struct HttpTool {
    definition: ToolDefinition,
    method: Method,
    url: UrlTemplate,
    lookup_url: Option<UrlTemplate>,
    body: Option<BodyTemplate>,
    sends_arguments: bool,
    /// Values are marked as sensitive, so that they are not shown.
    headers: HeaderMap,
    idempotency_header: Option<HeaderName>,
    allowed_hosts: Vec<String>,
    response_bytes_max: usize,
    /// Built with the first call, because commands that only read the settings need none.
    client: OnceLock<Result<Client, String>>,
}

impl HttpTool {
    /// Checks the settings.
    pub fn new(config: HttpToolConfig) -> Result<Self, InvalidTool> {
        let HttpToolConfig { mut definition, body, response_bytes_max, .. } = config;
        let name = definition.name.clone();
        let invalid = |field, problem: String| InvalidTool::field(&name, field, problem);
        let method = match config.method.as_str() {
            method @ ("GET" | "POST" | "PUT" | "PATCH" | "DELETE") => {
                Method::from_bytes(method.as_bytes()).expect("a method of HTTP")
            }
            _ => {
                let problem = "allowed: `GET`, `POST`, `PUT`, `PATCH`, `DELETE`";
                return Err(invalid("method", problem.to_owned()));
            }
        };
        let parameters = &definition.parameters;
        if parameters.pointer(&format!("/properties/{KEY_VARIABLE}")).is_some() {
            let problem = format!("`{KEY_VARIABLE}` is reserved");
            return Err(invalid("parameters", problem));
        }
        let url = UrlTemplate::parse(&config.url, parameters);
        let url = url.map_err(|problem| invalid("url", problem))?;
        let lookup_url = config.lookup_url.as_deref();
        let lookup_url = lookup_url.map(|url| UrlTemplate::parse(url, parameters)).transpose();
        let lookup_url = lookup_url.map_err(|problem| invalid("lookup_url", problem))?;
        let mut allowed_hosts: Vec<String> =
            config.allowed_hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        if allowed_hosts.is_empty() {
            allowed_hosts.push(url.host().to_owned());
        }
        for (field, template) in [("url", Some(&url)), ("lookup_url", lookup_url.as_ref())] {
            if let Some(template) =
                template.filter(|one| !allowed_hosts.contains(&one.host().to_owned()))
            {
                let problem = format!("its host `{}` is not in `allowed_hosts`", template.host());
                return Err(invalid(field, problem));
            }
        }
        let (sends_arguments, body) = match body {
            HttpToolBody::None => (false, None),
            HttpToolBody::Arguments => (true, None),
            HttpToolBody::Template(body) => {
                let body = BodyTemplate::parse(&body, parameters);
                (false, Some(body.map_err(|problem| invalid("body", problem))?))
            }
        };
        let header_name = |field, text: &str| {
            let shown = text::one_line(text, 60);
            let problem = format!("`{shown}` is not the name of a header");
            HeaderName::from_bytes(text.as_bytes()).map_err(|_| invalid(field, problem))
        };
        let mut headers = HeaderMap::new();
        for header in &config.headers {
            let key = header_name("header", &header.name)?;
            let value = HeaderValue::from_str(header.value.expose_secret());
            let mut value = value.map_err(|_| {
                let problem =
                    format!("the value of `{key}` has characters that a header cannot have");
                invalid("header", problem)
            })?;
            value.set_sensitive(true);
            headers.insert(key, value);
        }
        let idempotency_header = config.idempotency_header.as_deref();
        let idempotency_header =
            idempotency_header.map(|text| header_name("idempotency_header", text)).transpose()?;
        if !(1..=TOOL_RESPONSE_BYTES_MAX).contains(&response_bytes_max) {
            let problem = format!("allowed: 1 to {TOOL_RESPONSE_BYTES_MAX}");
            return Err(invalid("response_bytes_max", problem));
        }
        definition.recovery = match (&idempotency_header, &lookup_url) {
            (Some(_), _) => ToolRecovery::Repeat,
            (None, Some(_)) => ToolRecovery::LookUp,
            (None, None) => ToolRecovery::Person,
        };
        Ok(Self {
            definition,
            method,
            url,
            lookup_url,
            body,
            sends_arguments,
            headers,
            idempotency_header,
            allowed_hosts,
            response_bytes_max,
            client: OnceLock::new(),
        })
    }

    fn client(&self) -> Result<&Client, ToolError> {
        let client = self.client.get_or_init(http_client::build).as_ref();
        client.map_err(|problem| ToolError::NotCarriedOut(problem.clone()))
    }

    /// Sends one request. A lost connection leaves its effect unknown.
    async fn send(
        &self,
        method: Method,
        url: Url,
        body: Option<Json>,
        request: &ToolRequest,
    ) -> Result<Response, ToolError> {
        let mut builder = self.client()?.request(method, url.clone());
        // An allowed host that a redirect names gets no secrets of the tool.
        if self.url.is_origin_of(&url)
            || self.lookup_url.as_ref().is_some_and(|one| one.is_origin_of(&url))
        {
            builder = builder.headers(self.headers.clone());
        }
        if let Some(name) = &self.idempotency_header {
            builder = builder.header(name, &request.idempotency_key);
        }
        if let Some(body) = body {
            builder = builder.header(CONTENT_TYPE, "application/json").body(body.to_string());
        }
        builder.send().await.map_err(|error| match error.is_connect() || error.is_builder() {
            true => ToolError::NotCarriedOut(describe(&error)),
            false => ToolError::Unknown(describe(&error)),
        })
    }

    /// The target of a redirect, if it may be followed.
    fn redirect(&self, from: &Url, response: &Response) -> Result<Url, String> {
        let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
        let location = location.ok_or("the endpoint redirects to nowhere")?;
        let to = from.join(location).map_err(|_| "the endpoint redirects to an invalid URL")?;
        let host = to.host_str().unwrap_or_default();
        if !self.allowed_hosts.iter().any(|one| one == host) {
            let host = text::one_line(host, 100);
            return Err(format!(
                "the endpoint redirects to the host `{host}`, which is not allowed"
            ));
        }
        if to.scheme() != from.scheme() && to.scheme() != "https" {
            return Err("the endpoint redirects to an unencrypted connection".to_owned());
        }
        Ok(to)
    }

    /// Sends a `GET` and follows allowed redirects.
    async fn get(&self, mut url: Url, request: &ToolRequest) -> Result<Response, ToolError> {
        for _ in 0..=TOOL_REDIRECTS_MAX {
            let response = self.send(Method::GET, url.clone(), None, request).await?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            url = self.redirect(&url, &response).map_err(ToolError::Rejected)?;
        }
        Err(ToolError::Rejected(format!("more than {TOOL_REDIRECTS_MAX} redirects")))
    }

    /// The body of a successful response as JSON; a text becomes a string.
    async fn read(&self, response: Response) -> Result<Json, String> {
        let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let kind = kind.unwrap_or_default().to_ascii_lowercase();
        let body = http_client::read_limited(response, self.response_bytes_max).await?;
        if body.is_empty() {
            return Ok(Json::Null);
        }
        if let Ok(json) = serde_json::from_slice(&body) {
            return Ok(json);
        }
        match String::from_utf8(body) {
            Ok(text) if kind.starts_with("text/plain") => Ok(text::cleaned(&text).into()),
            _ if kind.contains("html") => Err("the response is HTML, not JSON".to_owned()),
            _ => Err("the response is not JSON".to_owned()),
        }
    }

    async fn error_text(response: Response) -> String {
        let status = response.status();
        let length = response.content_length().filter(|length| *length <= ERROR_JSON_BYTES_MAX);
        let length = length.and_then(|length| usize::try_from(length).ok());
        let body =
            http_client::read_prefix(response, length.unwrap_or_default().max(ERROR_BYTES_MAX))
                .await;
        // Redaction finds no value behind an escape of JSON for certain, so the texts of JSON are shown without its syntax.
        let body = match serde_json::from_slice(&body) {
            Ok(json @ (Json::Object(_) | Json::Array(_))) => plain_text(&json),
            _ => String::from_utf8_lossy(&body).into_owned(),
        };
        let body = text::one_line(&body, ERROR_BYTES_MAX);
        format!("status {status}: {body}").trim_end_matches(": ").to_owned()
    }
}

/// The values of JSON with their names, as a text. The parser limits the depth.
fn plain_text(json: &Json) -> String {
    match json {
        Json::String(text) => text.clone(),
        Json::Array(items) => items.iter().map(plain_text).collect::<Vec<_>>().join(", "),
        Json::Object(fields) => {
            let fields =
                fields.iter().map(|(name, value)| format!("{name}: {}", plain_text(value)));
            fields.collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}

#[async_trait]
impl Tool for HttpTool {
    fn definition(&self) -> &ToolDefinition {
        &self.definition
    }

    async fn call(&self, request: &ToolRequest) -> Result<Json, ToolError> {
        let url = self.url.render(request).map_err(ToolError::Rejected)?;
        let body = match &self.body {
            Some(body) => Some(body.render(request).map_err(ToolError::Rejected)?),
            None => self.sends_arguments.then(|| request.arguments.clone()),
        };
        let changes = self.definition.changes;
        let response = match self.method == Method::GET && !changes && body.is_none() {
            true => self.get(url, request).await?,
            false => self.send(self.method.clone(), url, body, request).await?,
        };
        let status = response.status();
        if status.is_success() {
            return match self.read(response).await {
                Ok(result) => Ok(result),
                // The endpoint has said that it did it.
                Err(problem) if changes => Ok(json!({"status": status.as_u16(), "note": problem})),
                Err(problem) => Err(ToolError::Rejected(problem)),
            };
        }
        let error = Self::error_text(response).await;
        Err(match status {
            // An endpoint may redirect after it has done what was asked.
            StatusCode::FOUND | StatusCode::SEE_OTHER => ToolError::Unknown(error),
            status if status.is_redirection() => ToolError::Rejected(error),
            // Not about this call: another attempt with the same key may get another response.
            StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::CONFLICT
            | StatusCode::TOO_EARLY
            | StatusCode::TOO_MANY_REQUESTS => ToolError::NotCarriedOut(error),
            StatusCode::REQUEST_TIMEOUT => ToolError::Unknown(error),
            status if status.is_client_error() => ToolError::Rejected(error),
            _ => ToolError::Unknown(error),
        })
    }

    async fn look_up(&self, request: &ToolRequest) -> Result<Option<Json>, ToolError> {
        let Some(template) = &self.lookup_url else {
            return Err(ToolError::Unknown("the tool has no `lookup_url`".to_owned()));
        };
        let url = template.render(request).map_err(ToolError::Rejected)?;
        let response = self.get(url, request).await?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(None),
            status if status.is_success() => {
                let result = self.read(response).await;
                let unread = |note: String| json!({"status": status.as_u16(), "note": note});
                Ok(Some(result.unwrap_or_else(unread)))
            }
            _ => Err(ToolError::Unknown(Self::error_text(response).await)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_an_error_in_json_are_shown_without_its_syntax() {
        let error = json!({"error": {"code": 7, "note": "card:\n4111 1111 1111 1111"}, "more": ["a", null]});
        let shown = text::one_line(&plain_text(&error), ERROR_BYTES_MAX);
        assert_eq!(shown, "error: code: 7, note: card: 4111 1111 1111 1111, more: a, null");
    }
}
