//! Notes on issues of GitLab.
//!
//! Upstream: `replies`. Downstream: `comment`, which posts once. Here: the addresses, the header, and that notes are searched
//! newest first, back to when the reply was committed.

use headwater_issue::{DeliverError, OutboxRow};
use reqwest::RequestBuilder;
use secrecy::{ExposeSecret, SecretString};

use crate::outbound::comment::{self, Order, Thread};

/// The notes of an issue.
pub(super) fn thread(
    base_url: &str,
    token: &SecretString,
    secret: &SecretString,
    row: &OutboxRow,
) -> Result<Thread<impl Fn(RequestBuilder) -> RequestBuilder>, DeliverError> {
    let authorize =
        |request: RequestBuilder| request.header("private-token", token.expose_secret());
    let base = base_url.trim_end_matches('/');
    Ok(Thread {
        url: address(base, row)?,
        account_url: format!("{base}/api/v4/user"),
        query: "order_by=created_at&sort=desc".to_owned(),
        order: Order::NewestFirst { until: comment::searched_since(row) },
        mark: comment::Mark::new(row, secret),
        authorize,
    })
}

/// The project is its number, or its path as one part of the address.
fn address(base: &str, row: &OutboxRow) -> Result<String, DeliverError> {
    let project = comment::path_segment(&row.external_project_id);
    let (Some(project), Ok(number)) = (project, row.external_issue_id.parse::<u64>()) else {
        let (project, issue) = (&row.external_project_id, &row.external_issue_id);
        let problem = format!("`{project}` and `{issue}` are no issue of GitLab");
        return Err(DeliverError::Dead(problem));
    };
    Ok(format!("{base}/api/v4/projects/{project}/issues/{number}/notes"))
}
