//! Notes on GitLab issues: addresses and headers.
//!
//! Upstream: `outbound`. Downstream: `comment`, which posts once. Notes are searched newest first, back to the commit
//! of the reply.

use headwater_issue::{DeliverError, OutboxRow};
use reqwest::RequestBuilder;
use secrecy::{ExposeSecret, SecretString};

use crate::outbound::comment::{self, CommentOrder, CommentThread};

/// The notes of an issue.
pub(super) fn comments(
    base_url: &str,
    token: &SecretString,
    secret: &SecretString,
    row: &OutboxRow,
) -> Result<CommentThread<impl Fn(RequestBuilder) -> RequestBuilder>, DeliverError> {
    let authorize =
        |request: RequestBuilder| request.header("private-token", token.expose_secret());
    let base = base_url.trim_end_matches('/');
    let project_url = project_url(base, row)?;
    Ok(CommentThread {
        url: format!("{project_url}/issues/{}/notes", row.external_issue_id),
        project_url,
        account_url: format!("{base}/api/v4/user"),
        query: "order_by=created_at&sort=desc".to_owned(),
        order: CommentOrder::NewestFirst { until: comment::search_since(row) },
        marker: comment::ReplyMarker::new(row, secret),
        authorize,
    })
}

/// The project is its numeric id, or its path as one encoded segment. Checks the number of the issue, too.
fn project_url(base: &str, row: &OutboxRow) -> Result<String, DeliverError> {
    let project = comment::path_segment(&row.external_project_id);
    let (Some(project), Ok(_)) = (project, row.external_issue_id.parse::<u64>()) else {
        let (project, issue) = (&row.external_project_id, &row.external_issue_id);
        let problem =
            format!("project `{project}` and issue `{issue}` do not identify a GitLab issue");
        return Err(DeliverError::Dead(problem));
    };
    Ok(format!("{base}/api/v4/projects/{project}"))
}
