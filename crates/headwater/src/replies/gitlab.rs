//! Notes on issues of GitLab.
//!
//! Upstream: `replies`. Promises: as for GitHub: a reply that may have been posted is looked for first, newest notes first.

use headwater_issue::{DeliverError, OutboxRow};
use reqwest::Client;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::json;

use super::{answer, comment};
use crate::client;
use crate::limits::{COMMENT_PAGE_BYTES_MAX, COMMENT_PAGES_MAX};
use crate::marker;

const PAGE: usize = 100;

#[derive(Deserialize)]
struct Note {
    body: Option<String>,
}

/// Posts a note.
pub(super) async fn post(
    client: &Client,
    base_url: &str,
    token: &SecretString,
    row: &OutboxRow,
    content: &str,
) -> Result<(), DeliverError> {
    let url = address(base_url, row)?;
    let request =
        |request: reqwest::RequestBuilder| request.header("private-token", token.expose_secret());
    if row.deliveries > 1 && is_there(&url, row, |url| request(client.get(url))).await? {
        return Ok(());
    }
    let body = comment::body(content, &row.idempotency_key);
    let post = request(client.post(&url))
        .header("idempotency-key", &row.idempotency_key)
        .json(&json!({"body": body}));
    answer::send(post).await.map(drop)
}

async fn is_there(
    url: &str,
    row: &OutboxRow,
    get: impl Fn(String) -> reqwest::RequestBuilder,
) -> Result<bool, DeliverError> {
    let mark = marker::of(&row.idempotency_key);
    for page in 1..=COMMENT_PAGES_MAX {
        let url = format!("{url}?order_by=created_at&sort=desc&per_page={PAGE}&page={page}");
        let response = answer::send(get(url)).await?;
        let body = client::read_limited(response, COMMENT_PAGE_BYTES_MAX).await;
        let body = body.map_err(DeliverError::Retry)?;
        let notes: Vec<Note> = serde_json::from_slice(&body)
            .map_err(|error| DeliverError::Retry(format!("the list of notes is odd: {error}")))?;
        if notes.iter().any(|note| note.body.as_ref().is_some_and(|body| body.contains(&mark))) {
            return Ok(true);
        }
        if notes.len() < PAGE {
            return Ok(false);
        }
    }
    Ok(false)
}

/// The project is its number, or its path as one part of the address.
fn address(base_url: &str, row: &OutboxRow) -> Result<String, DeliverError> {
    let project = comment::path_segment(&row.external_project_id);
    let (Some(project), Ok(number)) = (project, row.external_issue_id.parse::<u64>()) else {
        let (project, issue) = (&row.external_project_id, &row.external_issue_id);
        let problem = format!("`{project}` and `{issue}` are no issue of GitLab");
        return Err(DeliverError::Dead(problem));
    };
    let base = base_url.trim_end_matches('/');
    Ok(format!("{base}/api/v4/projects/{project}/issues/{number}/notes"))
}
