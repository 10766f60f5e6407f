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
    let project_url = repository_url(base, row)?;
    Ok(CommentThread {
        url: format!("{project_url}/issues/{}/comments", row.external_issue_id),
        project_url,
        account_url: format!("{base}/user"),
        query: format!("since={}", comment::search_since(row).to_rfc3339()),
        order: CommentOrder::OldestFirst,
        marker: comment::ReplyMarker::new(row, secret),
        authorize,
    })
}

/// The repository is its numeric id, which survives a rename, or OWNER/NAME. Checks the number of the issue, too.
fn repository_url(base: &str, row: &OutboxRow) -> Result<String, DeliverError> {
    let project = &row.external_project_id;
    let parts: Option<Vec<String>> = project.split('/').map(comment::path_segment).collect();
    let (Some(parts), Ok(_)) = (parts, row.external_issue_id.parse::<u64>()) else {
        let problem = format!(
            "project `{project}` and issue `{}` do not identify a GitHub issue",
            row.external_issue_id
        );
        return Err(DeliverError::Dead(problem));
    };
    let repository = match parts.as_slice() {
        [id] if id.bytes().all(|byte| byte.is_ascii_digit()) => format!("repositories/{id}"),
        [owner, name] => format!("repos/{owner}/{name}"),
        _ => {
            let problem = format!("project `{project}` is not a repository id or OWNER/NAME");
            return Err(DeliverError::Dead(problem));
        }
    };
    Ok(format!("{base}/{repository}"))
}
