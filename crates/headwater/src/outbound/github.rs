//! Comments on GitHub issues: addresses and headers.
//!
//! Upstream: `outbound`. Downstream: `comment`, which posts once. Comments since the commit of the reply are searched
//! oldest first, the only order GitHub supports.

use headwater_issue::{DeliverError, OutboxRow};
use reqwest::RequestBuilder;
use secrecy::{ExposeSecret, SecretString};

use crate::outbound::comment::{self, CommentOrder, CommentThread};

/// The comments of an issue.
pub(super) fn comments(
    base_url: &str,
    token: &SecretString,
    secret: &SecretString,
    row: &OutboxRow,
) -> Result<CommentThread<impl Fn(RequestBuilder) -> RequestBuilder>, DeliverError> {
    let authorize = |request: RequestBuilder| {
        request
            .bearer_auth(token.expose_secret())
            .header("accept", "application/vnd.github+json")
            .header("x-github-api-version", "2022-11-28")
    };
    let base = base_url.trim_end_matches('/');
    Ok(CommentThread {
        url: address(base, row)?,
        account_url: format!("{base}/user"),
        query: format!("since={}", comment::search_since(row).to_rfc3339()),
        order: CommentOrder::OldestFirst,
        marker: comment::ReplyMarker::new(row, secret),
        authorize,
    })
}

fn address(base: &str, row: &OutboxRow) -> Result<String, DeliverError> {
    let project = &row.external_project_id;
    let parts: Option<Vec<String>> = project.split('/').map(comment::path_segment).collect();
    let (Some(parts), Ok(number)) = (parts, row.external_issue_id.parse::<u64>()) else {
        let problem = format!(
            "project `{project}` and issue `{}` do not identify a GitHub issue",
            row.external_issue_id
        );
        return Err(DeliverError::Dead(problem));
    };
    if parts.len() != 2 {
        return Err(DeliverError::Dead(format!(
            "project `{project}` is not a repository OWNER/NAME"
        )));
    }
    Ok(format!("{base}/repos/{}/issues/{number}/comments", parts.join("/")))
}
