//! Comments on issues of GitHub.
//!
//! Upstream: `replies`. Downstream: `comment`, which posts once. Here: the address, the headers, and that only comments since
//! the reply was committed are looked through.

use std::time::Duration;

use headwater_issue::{DeliverError, OutboxRow};
use reqwest::{Client, RequestBuilder};
use secrecy::{ExposeSecret, SecretString};

use super::comment;

/// Clocks of other servers are not ours: look a little further back.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(10 * 60);

/// Posts a comment.
pub(super) async fn post(
    client: &Client,
    base_url: &str,
    token: &SecretString,
    row: &OutboxRow,
    content: &str,
) -> Result<(), DeliverError> {
    let authorize = |request: RequestBuilder| {
        request
            .bearer_auth(token.expose_secret())
            .header("accept", "application/vnd.github+json")
            .header("x-github-api-version", "2022-11-28")
    };
    let listed = format!("since={}", row.created_at.before(CLOCK_DIFFERENCE_MAX).to_rfc3339());
    let place = comment::Place { url: address(base_url, row)?, listed, authorize };
    place.post(client, row, content).await
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
