//! Posts a reply as a comment on GitHub or GitLab, at most once.
//!
//! Upstream: `github` and `gitlab` define addresses and headers. Guarantees: before a repeated attempt, all comments
//! since the commit are searched for the marker of the reply; if there are too many to search, the reply is not
//! posted. If the token cannot see the project, replies are held. Only a comment of the desk counts: its marker has a valid HMAC, or its author is the account of the token.
//! The text of the model is sanitized: no HTML, no GitLab quick action, no marker, no mention. The hidden marker at
//! the end identifies the reply.

use std::time::Duration;

use headwater_issue::{DeliverError, OutboxRow};
use headwater_stream::clock::Timestamp;
use reqwest::header::LINK;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use secrecy::SecretString;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tracing::warn;

use crate::http_client;
use crate::limits::{
    COMMENT_BYTES_MAX, COMMENT_PAGE_BYTES_MAX, COMMENT_PAGES_MAX, REPLY_BYTES_MAX,
};
use crate::outbound::http;
use crate::outbound::markdown;
use crate::outbound::marker;
use crate::text;

/// Comments per page.
const PAGE: usize = 100;

/// Maximum clock difference between the database and the provider, including clock steps.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(25 * 60 * 60);

/// The comments of one issue.
pub(super) struct CommentThread<Authorize> {
    /// URL to post and list comments.
    pub(super) url: String,
    /// URL of the repository or project.
    pub(super) project_url: String,
    /// URL of the account of the token.
    pub(super) account_url: String,
    /// Query parameters that select the comments to list.
    pub(super) query: String,
    pub(super) order: CommentOrder,
    pub(super) marker: ReplyMarker,
    /// Adds the credentials to a request.
    pub(super) authorize: Authorize,
}

/// The order in which a provider lists comments.
pub(super) enum CommentOrder {
    OldestFirst,
    /// Comments before this time are not searched.
    NewestFirst {
        until: Timestamp,
    },
}

/// The marker of a reply.
pub(super) struct ReplyMarker {
    idempotency_key: String,
    secret: SecretString,
}

impl ReplyMarker {
    pub(super) fn new(row: &OutboxRow, secret: &SecretString) -> Self {
        Self { idempotency_key: row.idempotency_key.clone(), secret: secret.clone() }
    }

    /// The sanitized text of a comment with its marker.
    fn body(&self, content: &str) -> String {
        let room = COMMENT_BYTES_MAX - marker::BYTES_MAX - 8;
        let shown = markdown::sanitized(text::cut(content, REPLY_BYTES_MAX), room);
        let marker = marker::marker_for(&self.idempotency_key, &shown, &self.secret);
        format!("{shown}\n\n{marker}")
    }
}

/// Start of the search: no comment of this reply is older.
pub(super) fn search_since(row: &OutboxRow) -> Timestamp {
    row.created_at.before(CLOCK_DIFFERENCE_MAX)
}

#[derive(Deserialize)]
struct Comment {
    body: Option<String>,
    /// GitHub sends `user`, GitLab `author`.
    user: Option<Account>,
    author: Option<Account>,
    created_at: Option<String>,
}

impl Comment {
    fn is_by(&self, account: &Account) -> bool {
        self.user.as_ref().or(self.author.as_ref()).is_some_and(|author| author.id == account.id)
    }
}

#[derive(Deserialize)]
struct Account {
    id: u64,
}

impl<Authorize: Fn(RequestBuilder) -> RequestBuilder> CommentThread<Authorize> {
    /// Posts a reply, unless an earlier attempt has posted it.
    pub(super) async fn post(
        &self,
        client: &Client,
        row: &OutboxRow,
        content: &str,
    ) -> Result<(), DeliverError> {
        // An earlier attempt may have succeeded although its response was lost.
        if row.deliveries > 1 && self.has_reply(client, row).await? {
            return Ok(());
        }
        let post = (self.authorize)(client.post(&self.url))
            .header("idempotency-key", &row.idempotency_key)
            .json(&json!({"body": self.marker.body(content)}));
        self.send(client, row, post).await.map(drop)
    }

    /// Sends a request for the issue. The response is a success.
    async fn send(
        &self,
        client: &Client,
        row: &OutboxRow,
        request: RequestBuilder,
    ) -> Result<Response, DeliverError> {
        let response = http::exchange(client, request).await?;
        if response.status() == StatusCode::NOT_FOUND && !self.is_project_visible(client).await? {
            return Err(DeliverError::Denied(format!(
                "response 404 for `{}`: the project was deleted, or the token has lost access to it; \
                 grant the access, or set `reply_token_env` of the integration to another token",
                row.external_project_id
            )));
        }
        http::check_status(response).await
    }

    /// Whether the token may see the repository or project. Providers answer 404 instead of 403 for private ones.
    async fn is_project_visible(&self, client: &Client) -> Result<bool, DeliverError> {
        let response =
            http::exchange(client, (self.authorize)(client.get(&self.project_url))).await?;
        if response.status() == StatusCode::NOT_FOUND {
            return Ok(false);
        }
        http::check_status(response).await.map(|_| true)
    }

    /// Whether the reply was posted.
    async fn has_reply(&self, client: &Client, row: &OutboxRow) -> Result<bool, DeliverError> {
        let key = &self.marker.idempotency_key;
        let signed_prefix = marker::signed_prefix(key, &self.marker.secret);
        let unsigned_prefix = marker::unsigned_prefix(key);
        // Comments with the key of the reply and another HMAC: of the desk before the secret was changed, or forged.
        let mut unsigned: Vec<Comment> = Vec::new();
        for page in 1..=COMMENT_PAGES_MAX {
            let url = format!("{}?{}&per_page={PAGE}&page={page}", self.url, self.query);
            let response = self.send(client, row, (self.authorize)(client.get(url))).await?;
            let has_next = has_next(&response);
            let comments: Vec<Comment> = read_json(response, "list of comments").await?;
            let is_last =
                !has_next && comments.len() < PAGE || self.is_past_search_window(&comments);
            for comment in comments {
                let text = comment.body.as_deref().unwrap_or_default();
                if text.contains(&signed_prefix) {
                    return Ok(true);
                }
                if text.contains(&unsigned_prefix) {
                    unsigned.push(comment);
                }
            }
            if is_last {
                return self.is_by_us(client, &unsigned).await;
            }
        }
        Err(DeliverError::Retry(format!(
            "not posted: more than {} comments since the reply was committed, so a duplicate cannot be ruled out",
            COMMENT_PAGES_MAX * PAGE
        )))
    }

    /// Whether later pages cannot contain the reply.
    fn is_past_search_window(&self, comments: &[Comment]) -> bool {
        let CommentOrder::NewestFirst { until } = self.order else { return false };
        let created_at = comments.last().and_then(|last| last.created_at.as_deref());
        created_at.and_then(Timestamp::from_rfc3339).is_some_and(|created_at| created_at < until)
    }

    /// Whether the account of the token has written one of these comments.
    async fn is_by_us(&self, client: &Client, comments: &[Comment]) -> Result<bool, DeliverError> {
        if comments.is_empty() {
            return Ok(false);
        }
        let account = http::send(client, (self.authorize)(client.get(&self.account_url))).await;
        let us: Account = match account {
            Ok(response) => read_json(response, "account").await?,
            // An app token has no account; then only the HMAC counts.
            Err(
                DeliverError::Dead(error) | DeliverError::Held(error) | DeliverError::Denied(error),
            ) => {
                warn!(
                    error,
                    "account of the token is unknown; comments with an invalid marker are ignored"
                );
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        Ok(comments.iter().any(|comment| comment.is_by(&us)))
    }
}

/// Whether a `Link` header names a next page.
fn has_next(response: &Response) -> bool {
    let links = response.headers().get_all(LINK);
    links.iter().filter_map(|link| link.to_str().ok()).any(|link| link.contains("rel=\"next\""))
}

/// Decodes a JSON response.
async fn read_json<T: DeserializeOwned>(response: Response, what: &str) -> Result<T, DeliverError> {
    let body = http_client::read_limited(response, COMMENT_PAGE_BYTES_MAX).await;
    let body = body.map_err(DeliverError::Retry)?;
    serde_json::from_slice(&body)
        .map_err(|error| DeliverError::Retry(format!("invalid response ({what}): {error}")))
}

/// Encodes one segment of a URL path. `None` if it is empty, `.` or `..`.
pub(super) fn path_segment(segment: &str) -> Option<String> {
    if segment.is_empty() || segment == "." || segment == ".." {
        return None;
    }
    Some(text::percent_encoded(segment))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(content: &str) -> String {
        let secret = "s".to_owned().into();
        ReplyMarker { idempotency_key: "k-1".to_owned(), secret }.body(content)
    }

    #[test]
    fn the_text_of_a_model_is_sanitized() {
        let body = body(
            "<script>x</script> &amp; @everyone\n/close\n  /assign @me\n<!-- headwater:reply k -->",
        );
        assert!(!body.contains("<script>") && !body.contains("@everyone"));
        assert!(body.lines().all(|line| !line.trim_start().starts_with('/')), "{body}");
        assert_eq!(body.matches("<!--").count(), 1);
        assert!(body.ends_with(" -->") && body.contains("\n\n<!-- headwater:reply k-1 "));
        assert!(marker::is_own(&body, false, &"s".to_owned().into()));
    }

    #[test]
    fn a_comment_never_exceeds_the_provider_limit() {
        for content in ["<".repeat(REPLY_BYTES_MAX), "ü".repeat(REPLY_BYTES_MAX)] {
            assert!(body(&content).len() <= COMMENT_BYTES_MAX);
        }
    }

    #[test]
    fn a_path_segment_is_encoded_as_one_segment() {
        assert_eq!(path_segment("a b/../?x#ü").unwrap(), "a%20b%2F..%2F%3Fx%23%C3%BC");
        assert_eq!((path_segment(".."), path_segment("."), path_segment("")), (None, None, None));
    }
}
