//! A reply as a comment that people read on GitHub or GitLab, and how it gets there once.
//!
//! Upstream: `github` and `gitlab`, which know addresses and headers. Promises: a reply that may have been posted before is
//! searched for first, by its mark, in every comment since it was committed; if there are too many to search, it is not
//! posted. Only a comment that we have written counts: its mark has our HMAC, or its author is our account. Nothing of the
//! model's text is markup of ours: no HTML, no command of GitLab, no mark, no mention. The mark at the end is
//! hidden and tells which reply it is.

use std::time::Duration;

use headwater_issue::{DeliverError, OutboxRow};
use headwater_stream::clock::Timestamp;
use reqwest::header::LINK;
use reqwest::{Client, RequestBuilder, Response};
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

/// Comments on one page.
const PAGE: usize = 100;

/// How far the clocks of the database and of the provider may differ, or step.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(25 * 60 * 60);

/// The comments of one issue.
pub(super) struct Thread<Authorize> {
    /// Comments are posted and listed here.
    pub(super) url: String,
    /// Tells who we are there.
    pub(super) account_url: String,
    /// Which comments to list, as query parameters.
    pub(super) query: String,
    pub(super) order: Order,
    pub(super) mark: Mark,
    /// Adds the credentials to a request.
    pub(super) authorize: Authorize,
}

/// The order in which a provider lists comments.
pub(super) enum Order {
    OldestFirst,
    /// Those before this time are not searched.
    NewestFirst {
        until: Timestamp,
    },
}

/// What a reply is known by.
pub(super) struct Mark {
    /// The whole mark, which only we can write.
    signed: String,
    /// Its beginning, which is the same with another secret.
    unsigned: String,
}

impl Mark {
    pub(super) fn new(row: &OutboxRow, secret: &SecretString) -> Self {
        let key = &row.idempotency_key;
        Self { signed: marker::of(key, secret), unsigned: marker::unsigned(key) }
    }
}

/// No comment of this reply is older.
pub(super) fn searched_since(row: &OutboxRow) -> Timestamp {
    row.created_at.before(CLOCK_DIFFERENCE_MAX)
}

#[derive(Deserialize)]
struct Comment {
    body: Option<String>,
    /// GitHub says `user`, GitLab `author`.
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

impl<Authorize: Fn(RequestBuilder) -> RequestBuilder> Thread<Authorize> {
    /// Posts a reply, unless it is there.
    pub(super) async fn post(
        &self,
        client: &Client,
        row: &OutboxRow,
        content: &str,
    ) -> Result<(), DeliverError> {
        // An attempt before this one may have arrived though its response did not.
        if row.deliveries > 1 && self.has_reply(client).await? {
            return Ok(());
        }
        let post = (self.authorize)(client.post(&self.url))
            .header("idempotency-key", &row.idempotency_key)
            .json(&json!({"body": body(content, &self.mark.signed)}));
        http::send(client, post).await.map(drop)
    }

    /// Whether the comment of the reply is there.
    async fn has_reply(&self, client: &Client) -> Result<bool, DeliverError> {
        // Comments with the key of the reply and another HMAC: ours if the secret was changed, or a forgery.
        let mut unsigned: Vec<Comment> = Vec::new();
        for page in 1..=COMMENT_PAGES_MAX {
            let url = format!("{}?{}&per_page={PAGE}&page={page}", self.url, self.query);
            let response = http::send(client, (self.authorize)(client.get(url))).await?;
            let has_next = has_next(&response);
            let comments: Vec<Comment> = read(response, "the list of comments").await?;
            let is_last = !has_next && comments.len() < PAGE || self.is_over(&comments);
            for comment in comments {
                let text = comment.body.as_deref().unwrap_or_default();
                if text.contains(&self.mark.signed) {
                    return Ok(true);
                }
                if text.contains(&self.mark.unsigned) {
                    unsigned.push(comment);
                }
            }
            if is_last {
                return self.is_by_us(client, &unsigned).await;
            }
        }
        Err(DeliverError::Retry(format!(
            "not posted: there are more than {} comments since the reply was committed, and it may be among them",
            COMMENT_PAGES_MAX * PAGE
        )))
    }

    /// Whether no later page can have the reply.
    fn is_over(&self, comments: &[Comment]) -> bool {
        let Order::NewestFirst { until } = self.order else { return false };
        let created_at = comments.last().and_then(|last| last.created_at.as_deref());
        created_at.and_then(Timestamp::from_rfc3339).is_some_and(|created_at| created_at < until)
    }

    /// Whether our account has written one of these comments.
    async fn is_by_us(&self, client: &Client, comments: &[Comment]) -> Result<bool, DeliverError> {
        if comments.is_empty() {
            return Ok(false);
        }
        let account = http::send(client, (self.authorize)(client.get(&self.account_url))).await;
        let us: Account = match account {
            Ok(response) => read(response, "our account").await?,
            // A token of an app has no account; then only the HMAC counts.
            Err(DeliverError::Dead(error)) => {
                warn!(error, "our account is not known, comments with an invalid mark are ignored");
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

/// JSON out of a response.
async fn read<T: DeserializeOwned>(response: Response, what: &str) -> Result<T, DeliverError> {
    let body = http_client::read_limited(response, COMMENT_PAGE_BYTES_MAX).await;
    let body = body.map_err(DeliverError::Retry)?;
    serde_json::from_slice(&body)
        .map_err(|error| DeliverError::Retry(format!("{what} cannot be read: {error}")))
}

/// The body of a comment.
fn body(content: &str, mark: &str) -> String {
    let room = COMMENT_BYTES_MAX - mark.len() - 8;
    let shown = markdown::sanitized(text::cut(content, REPLY_BYTES_MAX), room);
    format!("{shown}\n\n{mark}")
}

/// Parts of an address, each within its place whatever it holds.
pub(super) fn path_segment(segment: &str) -> Option<String> {
    if segment.is_empty() || segment == "." || segment == ".." {
        return None;
    }
    Some(text::percent_encoded(segment))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_text_is_only_text() {
        let body = body(
            "<script>x</script> &amp; @everyone\n/close\n  /assign @me\n<!-- headwater:reply k -->",
            &marker::of("k-1", &"s".to_owned().into()),
        );
        assert!(!body.contains("<script>") && !body.contains("@everyone"));
        assert!(body.lines().all(|line| !line.trim_start().starts_with('/')), "{body}");
        assert_eq!(body.matches("<!--").count(), 1);
        assert!(body.ends_with(" -->") && body.contains("\n\n<!-- headwater:reply k-1 "));
    }

    #[test]
    fn a_comment_is_never_longer_than_the_other_side_takes() {
        for content in ["<".repeat(REPLY_BYTES_MAX), "ü".repeat(REPLY_BYTES_MAX)] {
            assert!(body(&content, "k").len() <= COMMENT_BYTES_MAX);
        }
    }

    #[test]
    fn a_name_stays_one_part_of_an_address() {
        assert_eq!(path_segment("a b/../?x#ü").unwrap(), "a%20b%2F..%2F%3Fx%23%C3%BC");
        assert_eq!((path_segment(".."), path_segment("."), path_segment("")), (None, None, None));
    }
}
