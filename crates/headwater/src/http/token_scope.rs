//! Tokens that are limited to integrations: which routes they can use, and which objects they can see.
//!
//! Upstream: `auth.rs`, after the role was checked. Downstream: the store, to find out to which integration an object belongs.
//! Guarantees: a route that is not in [`ROUTES`] is refused with 403, so that a new route is closed until a developer has decided about
//! it. An object of another integration is 404, like one that does not exist. Lists are filtered by their routes, which get the
//! [`Principal`]. A token without a limit passes without a look.

use axum::extract::{MatchedPath, Request};
use axum::http::{Method, StatusCode};
use headwater_issue::{EventLogId, IssueFilter, IssueId, OutboxId};
use percent_encoding::percent_decode_str;

use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::server::app_state::App;
use crate::tickets::INTEGRATION;

/// What a path is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouteScope {
    /// The same for everybody, without data of integrations.
    Public,
    /// Its route filters by the integrations of the token.
    Filtered,
    /// Tickets, which belong to the integration `desk`.
    Tickets,
    /// The integration with this name.
    Integration,
    /// The issue with this number.
    Issue,
    /// The draft with this number.
    Draft,
    /// The event log with this number.
    EventLog,
    /// The outbox row with this number.
    OutboxRow,
    /// The session of a run with this name.
    Session,
}

use RouteScope::{
    Draft, EventLog, Filtered, Integration, Issue, OutboxRow, Public, Session, Tickets,
};

/// The routes for limited tokens. The first parameter of a path names the object.
const ROUTES: &[(&str, &str, RouteScope)] = &[
    ("GET", "/openapi.json", Public),
    ("GET", "/api/v1/me", Public),
    ("GET", "/api/v1/search", Filtered),
    ("GET", "/api/v1/failures", Filtered),
    ("GET", "/api/v1/failures/{id}", Filtered),
    ("GET", "/api/v1/webhooks", Filtered),
    ("GET", "/api/v1/drafts", Filtered),
    ("GET", "/api/v1/drafts/{id}", Draft),
    ("GET", "/api/v1/drafts/{id}/link", Draft),
    ("POST", "/api/v1/drafts/{id}/approve", Draft),
    ("POST", "/api/v1/drafts/{id}/edit", Draft),
    ("POST", "/api/v1/drafts/{id}/reject", Draft),
    ("GET", "/api/v1/prompts", Filtered),
    ("GET", "/api/v1/prompts/{integration}", Integration),
    ("POST", "/api/v1/prompts/{integration}", Integration),
    ("GET", "/api/v1/prompts/{integration}/versions", Integration),
    ("GET", "/api/v1/prompts/{integration}/diff", Integration),
    ("POST", "/api/v1/prompts/{integration}/rollback", Integration),
    ("GET", "/api/v1/event-logs/{id}", EventLog),
    ("GET", "/api/v1/event-logs/{id}/original", EventLog),
    ("GET", "/api/v1/issues", Filtered),
    ("GET", "/api/v1/issues/{id}", Issue),
    ("GET", "/api/v1/issues/{id}/events", Issue),
    ("GET", "/api/v1/issues/{id}/events/{event}/original", Issue),
    ("GET", "/api/v1/issues/{id}/why", Issue),
    ("POST", "/api/v1/issues/{id}/retry", Issue),
    ("POST", "/api/v1/issues/{id}/release", Issue),
    ("POST", "/api/v1/issues/retry", Filtered),
    ("POST", "/api/v1/issues/release", Filtered),
    ("GET", "/api/v1/outbox", Filtered),
    ("GET", "/api/v1/outbox/dead", Filtered),
    ("GET", "/api/v1/outbox/{id}", OutboxRow),
    ("GET", "/api/v1/outbox/{id}/why", OutboxRow),
    ("POST", "/api/v1/outbox/{id}/retry", OutboxRow),
    ("POST", "/api/v1/outbox/retry", Filtered),
    ("GET", "/api/v1/sessions", Filtered),
    ("GET", "/api/v1/sessions/{session}", Session),
    ("GET", "/api/v1/sessions/{session}/events", Session),
    ("GET", "/api/v1/sessions/{session}/export", Session),
    ("GET", "/api/v1/sessions/{session}/replay", Session),
    ("GET", "/api/v1/tickets", Tickets),
    ("POST", "/api/v1/tickets", Tickets),
    ("GET", "/api/v1/tickets/{id}", Tickets),
    ("GET", "/api/v1/tickets/{id}/events", Tickets),
    ("GET", "/api/v1/tickets/{id}/messages", Tickets),
    ("POST", "/api/v1/tickets/{id}/messages", Tickets),
    ("POST", "/api/v1/tickets/{id}/close", Tickets),
    ("POST", "/api/v1/tickets/{id}/reopen", Tickets),
    ("POST", "/api/v1/tickets/{id}/take", Tickets),
    ("POST", "/api/v1/tickets/{id}/assign", Tickets),
    ("POST", "/api/v1/tickets/{id}/unassign", Tickets),
    ("GET", "/api/v1/tickets/{id}/why", Tickets),
];

/// What a limited token wants to reach. Taken from a request, so that no request is held while the database is asked.
pub(super) struct ScopedRequest {
    scope: Option<RouteScope>,
    /// The first parameter of the path.
    object: String,
}

impl ScopedRequest {
    pub(super) fn of(request: &Request) -> Self {
        let route = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
        let method = match *request.method() {
            Method::HEAD => "GET",
            ref method => method.as_str(),
        };
        let found = ROUTES.iter().find(|(of, path, _)| (*of, *path) == (method, route));
        let parts = route.split('/').zip(request.uri().path().split('/'));
        let object = parts.into_iter().find(|(name, _)| name.starts_with('{'));
        let object = object.map_or("", |(_, object)| object);
        Self {
            scope: found.map(|(_, _, scope)| *scope),
            object: percent_decode_str(object).decode_utf8_lossy().into_owned(),
        }
    }

    /// Fails with 403 if a limited token cannot use the route, and with 404 if the object is of another integration.
    pub(super) async fn check(&self, principal: &Principal, app: &App) -> Result<(), ApiError> {
        let Some(integrations) = &principal.integrations else { return Ok(()) };
        let Some(scope) = self.scope else {
            let names = integrations.join("`, `");
            let message = format!(
                "this token is limited to the integrations `{names}`; this needs a token without a limit"
            );
            return Err(ApiError::new(StatusCode::FORBIDDEN, "limited_token", message));
        };
        let allowed = match scope {
            Public | Filtered => true,
            Integration => principal.allows(&self.object),
            Tickets if principal.allows(INTEGRATION) => true,
            // Not about one ticket: nothing depends on whether there is one.
            Tickets => {
                let message = format!(
                    "this token is limited to other integrations than `{INTEGRATION}`, to which tickets belong"
                );
                return Err(ApiError::new(StatusCode::FORBIDDEN, "limited_token", message));
            }
            Issue => self.allows_issue(principal, app, self.object.parse().ok()).await?,
            Session => self.allows_issue(principal, app, issue_of_session(&self.object)).await?,
            Draft => match self.object.parse() {
                Ok(number) => {
                    let draft = app.tickets.draft(number).await?;
                    draft.is_some_and(|draft| principal.allows(&draft.integration))
                }
                Err(_) => false,
            },
            EventLog => match self.object.parse() {
                Ok(number) => {
                    let found = app.store.event_log(EventLogId(number)).await?;
                    let issue = found.map(|event| event.issue_id.0);
                    self.allows_issue(principal, app, issue).await?
                }
                Err(_) => false,
            },
            OutboxRow => match self.object.parse() {
                Ok(number) => {
                    let found = app.store.outbox_facts(OutboxId(number)).await?;
                    found.is_some_and(|row| principal.allows(&row.integration))
                }
                Err(_) => false,
            },
        };
        if allowed {
            return Ok(());
        }
        let shown = crate::text::one_line(&self.object, 100);
        Err(ApiError::not_found(format!(
            "`{shown}` does not exist, or belongs to an integration that this token cannot see"
        )))
    }

    async fn allows_issue(
        &self,
        principal: &Principal,
        app: &App,
        number: Option<i64>,
    ) -> Result<bool, ApiError> {
        let Some(number) = number else { return Ok(false) };
        let issue = app.store.issue(IssueId(number)).await?;
        Ok(issue.is_some_and(|issue| principal.allows(&issue.integration)))
    }
}

/// The issue of the session of a run, `issue-7-run-1`. Sessions with other names belong to no integration.
pub(crate) fn issue_of_session(session: &str) -> Option<i64> {
    session.strip_prefix("issue-")?.split_once("-run-")?.0.parse().ok()
}

impl Principal {
    /// Whether it can see the objects of this integration.
    pub(crate) fn allows(&self, integration: &str) -> bool {
        self.integrations.as_ref().is_none_or(|all| all.iter().any(|one| one == integration))
    }

    /// The filters that together find the issues that it can see and that match this filter; none if there cannot be any.
    pub(crate) fn issue_filters(&self, filter: &IssueFilter) -> Vec<IssueFilter> {
        match (&self.integrations, &filter.integration) {
            (None, _) => vec![filter.clone()],
            (Some(_), Some(integration)) if self.allows(integration) => vec![filter.clone()],
            (Some(_), Some(_)) => Vec::new(),
            (Some(all), None) => {
                let of =
                    |one: &String| IssueFilter { integration: Some(one.clone()), ..filter.clone() };
                all.iter().map(of).collect()
            }
        }
    }
}
