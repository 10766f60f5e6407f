//! Checks that the model endpoints can be reached and accept the key.
//!
//! Upstream: the routes and the command of `doctor`. Downstream: `GET {url}/models` of each endpoint, which costs no tokens.
//! Guarantees: an endpoint is asked once, with a timeout; at most [`BODY_BYTES_MAX`] of its answer are read; the key appears in no
//! finding. A failing endpoint is a warning while another one works, and an error if none does.

use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Client;
use secrecy::ExposeSecret;
use serde_json::Value;
use tokio::time::timeout;

use crate::api::doctor::{Finding, Severity, check_timeout};
use crate::config::{ModelEndpointSettings, Settings, shown_url};
use crate::http_client;

/// Maximum bytes of a list of models.
const BODY_BYTES_MAX: usize = 1024 * 1024;

/// What is wrong with an endpoint, and what to change.
struct EndpointProblem {
    found: String,
    advice: &'static str,
}

/// Checks all endpoints.
pub(crate) async fn models(settings: &Settings) -> Vec<Finding> {
    let client = match http_client::build() {
        Ok(client) => client,
        Err(problem) => return vec![Finding::warning("model", problem, "")],
    };
    let limit = check_timeout(settings);
    let checks = settings.models.iter().map(|endpoint| check(&client, endpoint, limit));
    let results = join_all(checks).await;
    let is_any_well = results.iter().any(Result::is_ok);
    let severity = if is_any_well { Severity::Warning } else { Severity::Error };
    let finding =
        |(endpoint, result): (&ModelEndpointSettings, Result<String, EndpointProblem>)| {
            let subject = format!("model {}", endpoint.id);
            match result {
                Ok(found) => Finding::ok(&subject, found),
                Err(problem) => Finding::new(severity, &subject, problem.found, problem.advice),
            }
        };
    settings.models.iter().zip(results).map(finding).collect()
}

async fn check(
    client: &Client,
    endpoint: &ModelEndpointSettings,
    limit: Duration,
) -> Result<String, EndpointProblem> {
    let model = &endpoint.model;
    if model.scripted.is_some() {
        return Ok("scripted: answers without a language model".to_owned());
    }
    let url = model.url.expose_secret().trim_end_matches('/');
    let shown = shown_url(url);
    let mut request = client.get(format!("{url}/models"));
    if let Some(key) = &model.key {
        request = request.bearer_auth(key.expose_secret());
    }
    let problem = |found: String, advice| Err(EndpointProblem { found, advice });
    let reachable = "check its address and the network";
    let response = match timeout(limit, request.send()).await {
        Err(_) => return problem(format!("{shown} did not answer within {limit:?}"), reachable),
        Ok(Err(error)) => {
            let cause = http_client::describe(&error);
            return problem(format!("{shown} is unreachable: {cause}"), reachable);
        }
        Ok(Ok(response)) => response,
    };
    let status = response.status();
    match status.as_u16() {
        401 | 403 => {
            let advice = "set a valid key; calls continue by themselves then";
            return problem(format!("{shown} denies access: {status}"), advice);
        }
        200..=299 => {}
        // Not every service lists its models.
        400..=499 => return Ok(format!("{shown} answers; it does not list its models: {status}")),
        _ => {
            return problem(
                format!("{shown} answers with {status}"),
                "see the status page of the service",
            );
        }
    }
    let body = timeout(limit, http_client::read_limited(response, BODY_BYTES_MAX)).await;
    let list = body.ok().and_then(Result::ok);
    let list: Option<Value> = list.and_then(|body| serde_json::from_slice(&body).ok());
    let models = list.as_ref().and_then(|list| list["data"].as_array());
    match models {
        Some(models) if !models.iter().any(|one| one["id"] == *model.name) => problem(
            format!("{shown} answers, but does not list the model `{}`", model.name),
            "check the name of the model",
        ),
        _ => Ok(format!("{shown} answers, model `{}`", model.name)),
    }
}
