//! Notes on issues of GitLab.
//!
//! Upstream: `replies`. Downstream: `comment`, which posts once. Here: the address, the header, and that the newest notes are
//! looked through first.

use headwater_issue::{DeliverError, OutboxRow};
use reqwest::{Client, RequestBuilder};
use secrecy::{ExposeSecret, SecretString};

use super::comment;

/// Posts a note.
pub(super) async fn post(
    client: &Client,
    base_url: &str,
    token: &SecretString,
    row: &OutboxRow,
    content: &str,
) -> Result<(), DeliverError> {
    let authorize =
        |request: RequestBuilder| request.header("private-token", token.expose_secret());
    let listed = "order_by=created_at&sort=desc".to_owned();
    let place = comment::Place { url: address(base_url, row)?, listed, authorize };
    place.post(client, row, content).await
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
