//! The pages of links that approve or reject a draft (`desk/draft_links.rs`).
//!
//! Upstream: `router.rs`, without authentication: the signature of the link is the permission. Downstream: `tickets::drafts`.
//! Guarantees: opening a link changes nothing, so that programs that look at links in messages decide nothing; the form of its page
//! does. A link that is forged, expired, of another server, or about another version of the draft changes nothing and says so.
//! Each decision is in the audit log once, before it is made, with the caller `link`; the log has no link in it.

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use axum::{Form, Router};
use headwater_console::{DraftLinkView, draft_link_page, draft_link_result_page};
use headwater_stream::clock::{Clock, SystemClock};
use serde::Deserialize;

use crate::config::Role;
use crate::desk::draft_links::{DRAFT_LINK_PATH, LinkAction, LinkError, VerifiedLink};
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::client_address::ClientAddress;
use crate::server::app_state::HttpServer;
use crate::tickets::drafts::{Draft, DraftDecision, DraftStatus};

/// Name of the caller in the audit log, and of who decided in the draft.
const CALLER: &str = "link";

/// Maximum bytes of a form.
const FORM_BYTES_MAX: usize = 8 * 1024;

/// Routes of the pages.
pub(super) fn routes() -> Router<HttpServer> {
    let path = format!("{DRAFT_LINK_PATH}{{id}}");
    let pages = get(show).post(decide).layer(DefaultBodyLimit::max(FORM_BYTES_MAX));
    Router::new().route(&path, pages)
}

/// The form of a page.
#[derive(Deserialize)]
struct DecisionForm {
    link: String,
    #[serde(default)]
    reason: String,
}

async fn show(State(server): State<HttpServer>, request: Request) -> Response {
    let query = request.uri().query().unwrap_or_default();
    let link = query.split('&').find_map(|pair| pair.strip_prefix("link=")).unwrap_or_default();
    match find(&server, request.uri().path(), link).await {
        Err(refusal) => refused(&refusal),
        Ok((verified, draft)) => draft_link_page(&DraftLinkView {
            number: draft.number,
            integration: &draft.integration,
            project: &draft.external_project_id,
            issue: &draft.external_issue_id,
            content: draft.edited.as_ref().unwrap_or(&draft.content),
            approves: verified.action == LinkAction::Approve,
            address: request.uri().path(),
            link,
        }),
    }
}

async fn decide(State(server): State<HttpServer>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let client = request.extensions().get::<ClientAddress>().copied();
    let form =
        <Form<DecisionForm> as axum::extract::FromRequest<()>>::from_request(request, &()).await;
    let Ok(Form(form)) = form else { return refused(&invalid_link()) };
    let found = find(&server, &path, &form.link).await;
    let (VerifiedLink { draft, action }, _) = match found {
        Ok(found) => found,
        Err(refusal) => return refused(&refusal),
    };
    let decision = match action {
        LinkAction::Approve => DraftDecision::Approve { content: None },
        LinkAction::Reject => DraftDecision::Reject { reason: Some(form.reason) },
    };
    // On its own task: a browser that disconnects does not interrupt a change and its audit entry.
    let changing = tokio::spawn(async move {
        let app = &server.app;
        let caller = Principal::unlimited(CALLER, Role::Write);
        let audited = app.audit.begin_change(&caller, client, "POST", &path).await?;
        let decided = app.tickets.decide_draft(draft.number, decision, Some(draft.version), CALLER);
        let decided = match decided.await {
            Ok(decided) if decided.changed => Ok(()),
            // Two requests at the same time.
            Ok(decided) => Err(decided_before(&decided.draft)),
            Err(problem) => Err(problem.into()),
        };
        let status = decided.as_ref().err().map_or(StatusCode::OK, ApiError::status);
        app.audit.end_change(audited, status.as_u16()).await;
        decided
    });
    match changing.await.unwrap_or_else(|_| Err(ApiError::internal())) {
        Err(refusal) => refused(&refusal),
        Ok(()) => {
            let (title, message) = match action {
                LinkAction::Approve => ("Approved", "The draft is approved and is posted."),
                LinkAction::Reject => ("Rejected", "The draft is rejected and is never posted."),
            };
            draft_link_result_page(StatusCode::OK, title, message)
        }
    }
}

/// The decision of a link and the draft, if the draft waits in the version of the link.
async fn find(
    server: &HttpServer,
    path: &str,
    link: &str,
) -> Result<(VerifiedLink, Draft), ApiError> {
    let Some(links) = &server.app.draft_links else {
        let message = "links to drafts are disabled on this server (`desk.link_secret` is not set)";
        return Err(ApiError::not_found(message));
    };
    let verified = links.verify(link, SystemClock.now()).map_err(|problem| match problem {
        LinkError::Invalid => invalid_link(),
        LinkError::Expired => {
            let message =
                "the time of this link is over; get a new one with `headwater draft link`";
            ApiError::new(StatusCode::GONE, "expired", message)
        }
    })?;
    let number = verified.draft.number;
    if path.strip_prefix(DRAFT_LINK_PATH) != Some(&*number.to_string()) {
        return Err(invalid_link());
    }
    let draft = server.app.tickets.draft(number).await?;
    let draft = draft.ok_or_else(|| ApiError::not_found(format!("there is no draft {number}")))?;
    // The draft of another database with the same secret.
    if draft.draft_id != verified.draft.draft_id {
        return Err(invalid_link());
    }
    let conflict = |message: String| ApiError::new(StatusCode::CONFLICT, "conflict", message);
    match draft.status {
        DraftStatus::Pending if draft.version == verified.draft.version => Ok((verified, draft)),
        DraftStatus::Pending => {
            let message =
                format!("draft {number} was edited after this link was made; get a new link");
            Err(conflict(message))
        }
        DraftStatus::Outdated => {
            let message = format!(
                "draft {number} is outdated: its issue has newer messages, which it does not answer"
            );
            Err(conflict(message))
        }
        DraftStatus::Approved | DraftStatus::Rejected => Err(decided_before(&draft)),
        DraftStatus::Note => {
            Err(conflict(format!("draft {number} is an internal note, which is never posted")))
        }
    }
}

fn decided_before(draft: &Draft) -> ApiError {
    let by = draft.decided_by.as_deref().unwrap_or("unknown");
    let at = draft.decided_at.map(|at| at.to_rfc3339()).unwrap_or_default();
    let message = format!(
        "draft {} was {} by {by} at {at}; nothing was changed now",
        draft.number,
        draft.status.as_str()
    );
    ApiError::new(StatusCode::CONFLICT, "conflict", message)
}

fn invalid_link() -> ApiError {
    let message =
        "this link is not valid: it was changed or cut off, or it belongs to another server";
    ApiError::new(StatusCode::FORBIDDEN, "invalid_link", message)
}

fn refused(refusal: &ApiError) -> Response {
    draft_link_result_page(refusal.status(), "This did not work", refusal.message())
}
