//! Comments on issues of GitHub.
//!
//! Upstream: `replies`. Promises: a reply is posted once: one that may have been posted before is looked for first, by its
//! mark, among the comments since the reply was committed.

use headwater_issue::{DeliverError, OutboxRow};
use headwater_stream::clock::Timestamp;
use reqwest::Client;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::json;
use std::time::Duration;

use super::{answer, comment};
use crate::client;
use crate::limits::{COMMENT_PAGE_BYTES_MAX, COMMENT_PAGES_MAX};
use crate::marker;

/// Clocks of other servers are not ours: look a little further back.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(10 * 60);

const PAGE: usize = 100;

#[derive(Deserialize)]
struct Comment {
    body: Option<String>,
}

/// Posts a comment.
pub(super) async fn post(
    client: &Client,
    base_url: &str,
    token: &SecretString,
    row: &OutboxRow,
    content: &str,
) -> Result<(), DeliverError> {
    let url = address(base_url, row)?;
    let request = |request: reqwest::RequestBuilder| {
        request
            .bearer_auth(token.expose_secret())
            .header("accept", "application/vnd.github+json")
            .header("x-github-api-version", "2022-11-28")
    };
    if row.deliveries > 1 && is_there(&url, row, |url| request(client.get(url))).await? {
        return Ok(());
    }
    let body = comment::body(content, &row.idempotency_key);
    let post = request(client.post(&url))
        .header("idempotency-key", &row.idempotency_key)
        .json(&json!({"body": body}));
    answer::send(post).await.map(drop)
}

/// Whether the comment is there: a try before this one may have arrived though its answer did not.
async fn is_there(
    url: &str,
    row: &OutboxRow,
    get: impl Fn(String) -> reqwest::RequestBuilder,
) -> Result<bool, DeliverError> {
    let mark = marker::of(&row.idempotency_key);
    let since: Timestamp = row.created_at.before(CLOCK_DIFFERENCE_MAX);
    let since = since.to_rfc3339();
    for page in 1..=COMMENT_PAGES_MAX {
        let url = format!("{url}?per_page={PAGE}&page={page}&since={since}");
        let response = answer::send(get(url)).await?;
        let body = client::read_limited(response, COMMENT_PAGE_BYTES_MAX).await;
        let body = body.map_err(DeliverError::Retry)?;
        let comments: Vec<Comment> = serde_json::from_slice(&body).map_err(|error| {
            DeliverError::Retry(format!("the list of comments is odd: {error}"))
        })?;
        let is_mine = |comment: &Comment| comment.body.as_ref().is_some_and(|b| b.contains(&mark));
        if comments.iter().any(is_mine) {
            return Ok(true);
        }
        if comments.len() < PAGE {
            return Ok(false);
        }
    }
    Ok(false)
}

fn address(base_url: &str, row: &OutboxRow) -> Result<String, DeliverError> {
    let project = &row.external_project_id;
    let parts: Option<Vec<String>> = project.split('/').map(comment::path_segment).collect();
    let (Some(parts), Ok(number)) = (parts, row.external_issue_id.parse::<u64>()) else {
        let problem = format!("`{project}` and `{}` are no issue of GitHub", row.external_issue_id);
        return Err(DeliverError::Dead(problem));
    };
    if parts.len() != 2 {
        return Err(DeliverError::Dead(format!("`{project}` is no repository: OWNER/NAME")));
    }
    let base = base_url.trim_end_matches('/');
    Ok(format!("{base}/repos/{}/issues/{number}/comments", parts.join("/")))
}
