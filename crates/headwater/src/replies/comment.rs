//! A reply as a comment that people read on GitHub or GitLab, and how it gets there once.
//!
//! Upstream: `github` and `gitlab`, which know addresses and headers. Promises: a reply that may have been posted before is
//! looked for first, by its mark. Nothing of the model's text is markup of ours: no HTML, no command of GitLab, no mark, and it
//! mentions nobody. The mark at the end is hidden and tells which reply it is.

use headwater_issue::{DeliverError, OutboxRow};
use reqwest::{Client, RequestBuilder};
use serde::Deserialize;
use serde_json::json;

use super::{answer, markdown};
use crate::client;
use crate::limits::{
    COMMENT_BYTES_MAX, COMMENT_PAGE_BYTES_MAX, COMMENT_PAGES_MAX, REPLY_BYTES_MAX,
};
use crate::marker;
use crate::text;

/// Comments on one page.
const PAGE: usize = 100;

/// Where the comments of an issue are, in the words of a provider.
pub(super) struct Place<Authorize> {
    /// Comments are posted and listed here.
    pub(super) url: String,
    /// Which of them to list, as parameters of the address.
    pub(super) listed: String,
    /// Adds what a request needs to be let in.
    pub(super) authorize: Authorize,
}

#[derive(Deserialize)]
struct Comment {
    body: Option<String>,
}

impl<Authorize: Fn(RequestBuilder) -> RequestBuilder> Place<Authorize> {
    /// Posts a reply, unless it is there.
    pub(super) async fn post(
        &self,
        client: &Client,
        row: &OutboxRow,
        content: &str,
    ) -> Result<(), DeliverError> {
        // A try before this one may have arrived though its answer did not.
        if row.deliveries > 1 && self.has(client, row).await? {
            return Ok(());
        }
        let body = body(content, &row.idempotency_key);
        let post = (self.authorize)(client.post(&self.url))
            .header("idempotency-key", &row.idempotency_key)
            .json(&json!({"body": body}));
        answer::send(post).await.map(drop)
    }

    /// Whether the comment of a reply is there.
    async fn has(&self, client: &Client, row: &OutboxRow) -> Result<bool, DeliverError> {
        let mark = marker::of(&row.idempotency_key);
        let is_it = |comment: &Comment| comment.body.as_ref().is_some_and(|it| it.contains(&mark));
        for page in 1..=COMMENT_PAGES_MAX {
            let url = format!("{}?{}&per_page={PAGE}&page={page}", self.url, self.listed);
            let response = answer::send((self.authorize)(client.get(url))).await?;
            let body = client::read_limited(response, COMMENT_PAGE_BYTES_MAX).await;
            let body = body.map_err(DeliverError::Retry)?;
            let comments: Vec<Comment> = serde_json::from_slice(&body).map_err(|error| {
                DeliverError::Retry(format!("the list of comments is odd: {error}"))
            })?;
            if comments.iter().any(is_it) {
                return Ok(true);
            }
            if comments.len() < PAGE {
                break;
            }
        }
        Ok(false)
    }
}

/// The body of a comment.
pub(super) fn body(content: &str, idempotency_key: &str) -> String {
    let mark = marker::of(idempotency_key);
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
            "k-1",
        );
        assert!(!body.contains("<script>") && !body.contains("@everyone"));
        assert!(body.lines().all(|line| !line.trim_start().starts_with('/')), "{body}");
        assert_eq!(body.matches("<!--").count(), 1);
        assert!(body.ends_with("\n\n<!-- headwater:reply k-1 -->"));
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
