//! Comments on issues of GitHub.
//!
//! Upstream: `replies`. Downstream: `comment`, which posts once. Here: the addresses, the headers, and that only comments
//! since the reply was committed are searched, oldest first: GitHub knows no other order.

use headwater_issue::{DeliverError, OutboxRow};
use reqwest::RequestBuilder;
use secrecy::{ExposeSecret, SecretString};

use crate::outbound::comment::{self, Order, Thread};

/// The comments of an issue.
pub(super) fn thread(
    base_url: &str,
    token: &SecretString,
    secret: &SecretString,
    row: &OutboxRow,
) -> Result<Thread<impl Fn(RequestBuilder) -> RequestBuilder>, DeliverError> {
    let authorize = |request: RequestBuilder| {
        request
            .bearer_auth(token.expose_secret())
            .header("accept", "application/vnd.github+json")
            .header("x-github-api-version", "2022-11-28")
    };
    let base = base_url.trim_end_matches('/');
    Ok(Thread {
        url: address(base, row)?,
        account_url: format!("{base}/user"),
        query: format!("since={}", comment::searched_since(row).to_rfc3339()),
        order: Order::OldestFirst,
        mark: comment::Mark::new(row, secret),
        authorize,
    })
}

fn address(base: &str, row: &OutboxRow) -> Result<String, DeliverError> {
    let project = &row.external_project_id;
    let parts: Option<Vec<String>> = project.split('/').map(comment::path_segment).collect();
    let (Some(parts), Ok(number)) = (parts, row.external_issue_id.parse::<u64>()) else {
        let problem = format!("`{project}` and `{}` are no issue of GitHub", row.external_issue_id);
        return Err(DeliverError::Dead(problem));
    };
    if parts.len() != 2 {
        return Err(DeliverError::Dead(format!("`{project}` is no repository: OWNER/NAME")));
    }
    Ok(format!("{base}/repos/{}/issues/{number}/comments", parts.join("/")))
}
