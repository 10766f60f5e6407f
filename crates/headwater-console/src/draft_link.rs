//! Pages of links that approve or reject a draft. They need no login and no scripts; the link itself is the permission.
//!
//! Upstream: `http/draft_pages.rs` of the server, which has verified the link. Guarantee: opening a page changes nothing; only its
//! form does.

use axum::http::StatusCode;
use axum::response::Response;
use maud::html;
use uuid::Uuid;

use crate::assets;
use crate::components::{Tone, banner, excerpt, facts, id};
use crate::screen::{document, respond};
use crate::text::visible;

/// A draft and the decision that a link makes about it.
#[derive(Clone, Copy, Debug)]
pub struct DraftLinkView<'a> {
    /// Number of the draft.
    pub number: i64,
    /// Its integration.
    pub integration: &'a str,
    /// Project at the provider; may be empty.
    pub project: &'a str,
    /// Issue at the provider.
    pub issue: &'a str,
    /// The text that is posted.
    pub content: &'a str,
    /// Whether the link approves; otherwise it rejects.
    pub approves: bool,
    /// Where the form is sent.
    pub address: &'a str,
    /// The link, as a field of the form.
    pub link: &'a str,
}

/// The page that asks whether to approve or reject a draft.
pub fn draft_link_page(view: &DraftLinkView<'_>) -> Response {
    let (title, button) = match view.approves {
        true => ("Approve this answer?", "Approve and post"),
        false => ("Reject this answer?", "Reject"),
    };
    let main = html! {
        div.narrow {
            p.brand { img src=(assets::address("icon.svg")) alt="" width="32" height="32"; "Headwater" }
            h1 { (title) }
            (facts(&[
                ("Draft", id(&view.number.to_string())),
                ("Integration", excerpt(view.integration)),
                ("Project", excerpt(view.project)),
                ("Issue", excerpt(view.issue)),
            ]))
            // Not cut: an agent must be able to read all of what they approve.
            pre tabindex="0" { bdi { (visible(view.content)) } }
            form.stacked method="post" action=(view.address) {
                input type="hidden" name="link" value=(view.link);
                @if !view.approves {
                    label for="reason" { "Reason, for the model" }
                    input #reason name="reason" maxlength="500";
                }
                button.button.primary type="submit" { (button) }
            }
            p.quiet { "Nothing is changed until you press the button. The draft can be decided about once." }
        }
    };
    respond(StatusCode::OK, &document(title, None, &main), &Uuid::now_v7().to_string())
}

/// The page after a decision, or instead of it.
pub fn draft_link_result_page(status: StatusCode, title: &str, message: &str) -> Response {
    let tone = if status.is_success() { Tone::Good } else { Tone::Bad };
    let main = html! {
        div.narrow {
            p.brand { img src=(assets::address("icon.svg")) alt="" width="32" height="32"; "Headwater" }
            h1 { (title) }
            (banner(tone, &html! { p { (visible(message)) } }))
        }
    };
    respond(status, &document(title, None, &main), &Uuid::now_v7().to_string())
}
