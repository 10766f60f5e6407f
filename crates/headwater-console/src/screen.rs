//! The frame of every page: navigation, search, the command line for the same thing, and the security headers.
//!
//! Upstream: `screens/` and `actions/`. Guarantees: no page loads or links anything from another server; no page can be
//! framed; nothing is stored by the browser; every page can be read and used without scripts.

use std::sync::Arc;

use axum::extract::{FromRequestParts, MatchedPath};
use axum::http::request::Parts;
use axum::http::{HeaderName, StatusCode, Uri, header};
use axum::response::{Html, IntoResponse, Response};
use maud::{DOCTYPE, Markup, html};
use uuid::Uuid;

use crate::actions::failed;
use crate::api_client::{ConsoleApi, ConsoleState, Problem};
use crate::assets;
use crate::components::{self, Tone, banner};
use crate::form::FormFields;
use crate::live::LiveRendering;
use crate::text;
use crate::user::ConsoleUser;

/// What a page may load: only our own scripts, styles and images.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
    form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// Headers of every page. The referrer stays on this site, because with `no-referrer` browsers send `Origin: null` with
/// forms, which cannot be told from a foreign page.
const HEADERS: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::REFERRER_POLICY, "same-origin"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

/// A screen in the navigation: name, address, key after `g`.
type NavigationItem = (&'static str, &'static str, &'static str);

/// Length of a command above which it is shown on demand.
const COMMAND_BYTES_SHOWN: usize = 2000;

/// Areas of the console with their screens.
const NAVIGATION: [(&str, &[NavigationItem]); 6] = [
    ("", &[("Overview", "/console", "o")]),
    (
        "Desk",
        &[
            ("Tickets", "/console/tickets", "t"),
            ("Issues", "/console/issues", "i"),
            ("Drafts", "/console/drafts", "v"),
            ("Sessions", "/console/sessions", "n"),
        ],
    ),
    (
        "Streams",
        &[
            ("Topics", "/console/topics", "s"),
            ("Assignment", "/console/assignment", "m"),
            ("Tail", "/console/tail", "l"),
        ],
    ),
    (
        "Trouble",
        &[
            ("Failures", "/console/failures", "f"),
            ("Replay plans", "/console/plans", "y"),
            ("Outbox", "/console/outbox", "b"),
        ],
    ),
    (
        "Insight",
        &[
            ("Reports", "/console/reports", "r"),
            ("SQL", "/console/sql", "q"),
            ("Consistency", "/console/consistency", "c"),
        ],
    ),
    (
        "System",
        &[
            ("Processes", "/console/processes", "p"),
            ("Webhooks", "/console/webhooks", "w"),
            ("Doctor", "/console/doctor", "d"),
            ("Settings", "/console/settings", "e"),
            ("Audit", "/console/audit", "a"),
        ],
    ),
];

/// What was done, by the code in `?done=`. Codes, not texts: an address must not put words into the page.
const NOTICES: [(&str, &str); 28] = [
    ("closed", "The ticket is closed."),
    ("reopened", "The ticket is open again."),
    ("taken", "You have taken the ticket."),
    ("assigned", "The ticket has a new assignee."),
    ("unassigned", "The ticket is assigned to nobody."),
    ("replied", "The reply is stored."),
    ("approved", "The draft is approved: it is posted, or its tool calls are made."),
    ("rejected", "The draft is rejected and is never posted."),
    ("retried", "The issue can be claimed now."),
    ("retried_all", "do not wait any longer."),
    ("released", "The quarantine has ended."),
    ("processing", "A worker has already claimed the issue."),
    ("idle", "The issue has no pending events."),
    ("not_quarantined", "The issue was not quarantined."),
    ("replayed", "sent again."),
    ("handled", "sent again or left out."),
    ("purged", "deleted permanently."),
    ("queued", "queued for delivery."),
    ("grown", "partitions were added."),
    ("trimmed", "messages were removed."),
    ("reset", "The group was moved."),
    ("deleted", "Deleted."),
    ("forked", "The session was forked."),
    ("planned", "The replay plan is made and runs."),
    ("paused", "The replay plan is paused."),
    ("resumed", "The replay plan runs again."),
    ("cancelled", "The replay plan is cancelled."),
    ("edited", "The edited copy was sent."),
];

/// A request for a page.
pub(crate) struct Screen {
    pub(crate) api: ConsoleApi,
    pub(crate) user: ConsoleUser,
    pub(crate) uri: Uri,
    pub(crate) query: FormFields,
    /// What was submitted to an action.
    pub(crate) form: FormFields,
    /// The route, with names of parameters.
    pub(crate) route: String,
    /// Appears in error messages and in the log.
    pub(crate) request_id: String,
    /// Whether the page is rendered again for those who have it open. Then it must be the same as long as nothing has changed.
    pub(crate) is_live: bool,
}

/// The content of a page.
pub(crate) struct ScreenContent {
    pub(crate) title: String,
    /// Pages above this one: name and address.
    pub(crate) path: Vec<(String, String)>,
    /// The command that does the same.
    pub(crate) command: String,
    pub(crate) content: Markup,
}

impl FromRequestParts<Arc<ConsoleState>> for Screen {
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &Arc<ConsoleState>,
    ) -> Result<Self, Response> {
        let Some(user) = parts.extensions.get::<ConsoleUser>().cloned() else {
            let message = "authentication required";
            return Err(error_page(StatusCode::UNAUTHORIZED, "unauthorized", message));
        };
        let api = ConsoleApi::new(Arc::clone(state), user.clone());
        let query = FormFields::from_query(parts.uri.query().unwrap_or_default());
        let request_id = Uuid::now_v7().to_string();
        let form = parts.extensions.get::<FormFields>().cloned().unwrap_or_default();
        let route = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str);
        let (uri, route) = (parts.uri.clone(), route.to_owned());
        let is_live = parts.extensions.get::<LiveRendering>().is_some();
        Ok(Self { api, user, uri, query, form, route, request_id, is_live })
    }
}

impl Screen {
    /// Path and query of this page.
    pub(crate) fn address(&self) -> &str {
        self.uri.path_and_query().map_or("/console", |address| address.as_str())
    }

    /// A page with its frame.
    pub(crate) fn page(&self, page: ScreenContent) -> Response {
        self.page_with_status(StatusCode::OK, page)
    }

    pub(crate) fn page_with_status(&self, status: StatusCode, page: ScreenContent) -> Response {
        let heading = html! {
            @if !page.path.is_empty() {
                nav aria-label="Path" { ol.path {
                    @for (name, address) in &page.path { li { a href=(address) { bdi { (text::visible(text::cut(name, 60).0)) } } } }
                } }
            }
            h1 { bdi { (text::visible(text::cut(&page.title, 200).0)) } }
        };
        let content = html! {
            (self.notice())
            (page.content)
            @if page.command.len() > COMMAND_BYTES_SHOWN {
                details.command { summary { "Command line" } code #command { (page.command) } }
            } @else if !page.command.is_empty() {
                p.command { span { "Command line: " } code #command { (page.command) } }
            }
            @if let Some(path) = self.api.first_path().filter(|_| !failed::is_action(self)) {
                p.quiet.curl {
                    span { "HTTP: " }
                    code { "curl -s -H \"Authorization: Bearer $HEADWATER_TOKEN\" \"$HEADWATER_URL/api/v1" (path.trim_end_matches(['&', '?'])) "\"" }
                }
            }
        };
        let markup = document(&page.title, Some(self), &html! { (heading) (content) });
        respond(status, &markup, &self.request_id)
    }

    /// The page for something that cannot be shown at all, or for an action that failed.
    pub(crate) fn failed(&self, what: &str, problem: &Problem) -> Response {
        if failed::is_action(self) {
            return failed::page(self, problem);
        }
        if problem.is_unavailable() {
            return self.page(ScreenContent {
                title: what.to_owned(),
                path: Vec::new(),
                command: String::new(),
                content: components::problem(what, problem, self),
            });
        }
        self.log_failed(what, problem);
        let content = html! {
            (banner(Tone::Bad, &html! {
                p { strong { (problem.message) } "." }
                p.quiet { "Code " code { (problem.code) } ", request " code { (self.request_id) } "." }
            }))
            p { a href="/console" { "Back to the overview" } " · " a href=(self.address()) { "Try again" } }
        };
        let title =
            if problem.is_not_found() { format!("{what} not found") } else { what.to_owned() };
        let page = ScreenContent { title, path: Vec::new(), command: String::new(), content };
        self.page_with_status(problem.status, page)
    }

    /// Whether a failure is written to the log. An open page is rendered each second, so its failure is written once.
    pub(crate) fn is_logged(&self, problem: &Problem) -> bool {
        !self.is_live || problem.status.is_server_error() && problem.lasting.is_none()
    }

    /// Writes to the log that a page or a part of it cannot be shown, with the request id that is on the page.
    pub(crate) fn log_failed(&self, what: &str, problem: &Problem) {
        if !self.is_logged(problem) {
            return;
        }
        tracing::warn!(
            request_id = self.request_id,
            path = self.uri.path(),
            status = problem.status.as_u16(),
            code = problem.code,
            error = problem.message,
            what,
            "a console page or a part of it could not be read"
        );
    }

    /// An answer of the API as a file to save. `what` names it if it cannot be read.
    pub(crate) async fn download(
        &self,
        what: &str,
        path: &str,
        (content_type, file): (&'static str, &'static str),
    ) -> Response {
        match self.api.get_text(path).await {
            Err(error) => self.failed(what, &error),
            Ok(text) => {
                let headers = [
                    (header::CONTENT_TYPE, content_type.to_owned()),
                    (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{file}\"")),
                    (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
                    (header::CACHE_CONTROL, "no-store".to_owned()),
                ];
                (headers, text).into_response()
            }
        }
    }

    /// What the last action did.
    fn notice(&self) -> Markup {
        let code = self.query.get("done");
        let Some((_, sentence)) = NOTICES.iter().find(|(known, _)| *known == code) else {
            return html! {};
        };
        let count: Option<u64> = self.query.get("count").parse().ok();
        // What is left of long work.
        let left = match (self.query.get("left"), self.query.get("left").parse()) {
            ("" | "0", _) => None,
            (_, Ok(left)) => Some(text::counted(left, "is left", "are left")),
            _ => Some("More are left".to_owned()),
        };
        let tone = if left.is_some() { Tone::Warning } else { Tone::Good };
        let content = html! {
            p { @if let Some(count) = count { strong { (text::number(count)) } " " } (sentence) }
            @if let Some(left) = left { p { strong { (left) } ": the time of one request was over. Do the same again to continue." } }
        };
        banner(tone, &content)
    }
}

pub(crate) fn respond(status: StatusCode, markup: &Markup, request_id: &str) -> Response {
    let request_id = [(HeaderName::from_static("x-request-id"), request_id.to_owned())];
    (status, HEADERS, request_id, Html(markup.0.clone())).into_response()
}

pub(crate) fn document(title: &str, screen: Option<&Screen>, main: &Markup) -> Markup {
    let title = text::visible(text::cut(title, 100).0);
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · Headwater" }
                link rel="icon" href=(assets::address("icon.svg"));
                link rel="stylesheet" href=(assets::address("console.css"));
                script type="module" src=(assets::address("console.js")) {}
            }
            body {
                a.skip href="#main" { "Skip to the content" }
                @if let Some(screen) = screen { (header_bar(screen)) (navigation(screen)) }
                main #main tabindex="-1" { (main) }
            }
        }
    }
}

fn header_bar(screen: &Screen) -> Markup {
    let user = &screen.user;
    html! {
        header.bar {
            a.brand href="/console" { img src=(assets::address("icon.svg")) alt="" width="24" height="24"; "Headwater" }
            form.search role="search" action="/console/search" {
                label.visually-hidden for="search" { "Search" }
                input #search type="search" name="q" placeholder="Search: number, id, word" value=(search_text(screen)) maxlength="200" autocomplete="off";
            }
            div.live {
                span #live-state.quiet role="status" {}
                // Shown by the script that makes it work.
                button #pause.button type="button" aria-label="Pause updates" hidden { "Pause" }
            }
            div #new-rows role="status" {}
            div.user {
                span { (user.name) " " (components::badge(Tone::Neutral, user.role.as_str())) }
                @if user.has_session {
                    form.action method="post" action="/console/logout" { button.button type="submit" { "Log out" } }
                }
            }
        }
    }
}

fn search_text(screen: &Screen) -> &str {
    if screen.uri.path() == "/console/search" { screen.query.get("q") } else { "" }
}

fn navigation(screen: &Screen) -> Markup {
    let path = screen.uri.path();
    let is_here = |address: &str| match address {
        "/console" => path == address,
        _ => {
            path == address || path.strip_prefix(address).is_some_and(|rest| rest.starts_with('/'))
        }
    };
    html! {
        nav.areas aria-label="Areas" {
            @for (area, screens) in NAVIGATION {
                div {
                    @if !area.is_empty() { p { (area) } }
                    ul {
                        @for (name, address, key) in screens {
                            li { a href=(address) data-key=(key) aria-current=[is_here(address).then_some("page")] { (name) } }
                        }
                    }
                }
            }
            div { ul { li { a href="/console/help" aria-current=[is_here("/console/help").then_some("page")] { "Help" } } } }
        }
    }
}

/// A page for a request without an identity, or one that was refused before it reached a screen.
pub fn error_page(status: StatusCode, code: &str, message: &str) -> Response {
    let request_id = Uuid::now_v7().to_string();
    let main = html! {
        div.narrow {
            h1 { "This did not work" }
            (banner(Tone::Bad, &html! {
                p { strong { (message) } }
                p.quiet { "Code " code { (code) } ", request " code { (request_id) } "." }
            }))
            p { a href="/console" { "Back to the overview" } }
        }
    };
    tracing::warn!(
        request_id,
        code,
        status = status.as_u16(),
        error = message,
        "console request refused"
    );
    respond(status, &document("Error", None, &main), &request_id)
}

/// The login page. `next` is the path to go to afterwards; `problem` says why the last attempt failed.
pub fn login_page(status: StatusCode, next: &str, problem: Option<&str>) -> Response {
    let main = html! {
        div.narrow {
            p.brand { img src=(assets::address("icon.svg")) alt="" width="32" height="32"; "Headwater" }
            h1 { "Log in" }
            @if let Some(problem) = problem { (banner(Tone::Bad, &html! { p { (problem) } })) }
            form.stacked method="post" action="/console/login" {
                input type="hidden" name="next" value=(next);
                label for="token" { "Token" }
                input #token type="password" name="token" required autofocus autocomplete="current-password" maxlength="500";
                p.quiet { "A " code { "[[token]]" } " of the settings. It is not stored in the browser." }
                button.button.primary type="submit" { "Log in" }
            }
        }
    };
    respond(status, &document("Log in", None, &main), &Uuid::now_v7().to_string())
}

#[cfg(test)]
impl Screen {
    /// The request of a caller with the role `write` for this address, on an API.
    pub(crate) fn for_test(api: axum::Router, address: &'static str) -> Self {
        let (name, view, forwarded) = ("ann".to_owned(), String::new(), Default::default());
        let role = crate::user::ConsoleRole::Write;
        let user = ConsoleUser { name, role, view, has_session: false, forwarded };
        let seconds = crate::api_client::ConsoleSeconds::start();
        let api = ConsoleApi::new(Arc::new(ConsoleState::new(api, seconds)), user.clone());
        let uri = Uri::from_static(address);
        let query = FormFields::from_query(uri.query().unwrap_or_default());
        let (form, route, request_id) = (FormFields::default(), String::new(), "r-1".to_owned());
        Self { api, user, uri, query, form, route, request_id, is_live: false }
    }
}
