//! `GET /console/live?of=PATH`: sends the live parts of a page that changed, as server-sent events.
//!
//! Upstream: `console.js`, one connection for each open page. Downstream: the screens, rendered again for the same
//! caller. Guarantees: the first event carries all parts, so nothing is missed; all connections render when a second of
//! [`ConsoleSeconds`] begins, and those of the same page and caller share one rendering; a page without live parts is rendered once; at most [`VIEWERS_MAX`] connections, others
//! are refused and poll; a connection ends after [`LIFETIME`], so that an ended login is noticed, with an event `end` on which the page
//! opens the next one; shutdown ends all, without it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::stream;
use serde_json::json;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::api_client::ConsoleSeconds;
use crate::form::FormFields;
use crate::user::{ConsoleRole, ConsoleUser};

/// Maximum open connections of this process.
pub(crate) const VIEWERS_MAX: usize = 200;

/// Time after which a connection ends; the browser opens another.
const LIFETIME: Duration = Duration::from_secs(300);

/// Maximum bytes of a page.
const PAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

#[derive(Clone)]
struct LiveState {
    screens: Router,
    seconds: ConsoleSeconds,
    viewers: Arc<Semaphore>,
    stopping: CancellationToken,
    shared: Arc<Mutex<SharedRenderings>>,
}

/// The route, on these screens.
pub(crate) fn routes(
    screens: Router,
    seconds: ConsoleSeconds,
    stopping: CancellationToken,
) -> Router {
    let (viewers, shared) = (Arc::new(Semaphore::new(VIEWERS_MAX)), Arc::default());
    let live = LiveState { screens, seconds, viewers, stopping, shared };
    Router::new().route("/console/live", get(open)).with_state(live)
}

/// A page and what of its caller it depends on.
type PageKey = (String, String, ConsoleRole, String, bool);

/// The live parts of a page; `None` if it cannot be shown any more.
type Rendering = Option<Arc<[LivePart]>>;

/// The renderings of one second: at most one for each viewer.
#[derive(Default)]
struct SharedRenderings {
    second: u64,
    pages: HashMap<PageKey, Arc<OnceCell<Rendering>>>,
}

/// An extension of a request: the page is rendered again for those who have it open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LiveRendering;

/// A part of a page.
struct LivePart {
    name: String,
    hash: u64,
    /// Name and HTML as JSON.
    json: String,
}

/// One open connection.
struct Viewer {
    live: LiveState,
    user: ConsoleUser,
    page: String,
    until: Instant,
    is_new: bool,
    /// Hash of each part as the browser has it.
    sent: HashMap<String, u64>,
    /// `None`: the last event was sent: the time is over, or the page has no live parts. The place is free then.
    permit: Option<OwnedSemaphorePermit>,
}

async fn open(State(live): State<LiveState>, request: Request) -> Response {
    let query = FormFields::from_query(request.uri().query().unwrap_or_default());
    let page = query.get("of").to_owned();
    let path = page.split('?').next().unwrap_or_default();
    let is_screen = path == "/console" || path.starts_with("/console/");
    let is_itself = path.starts_with("/console/live");
    let Some(user) = request.extensions().get::<ConsoleUser>().cloned() else {
        return (StatusCode::UNAUTHORIZED, "authentication required").into_response();
    };
    if !is_screen || is_itself {
        return (StatusCode::BAD_REQUEST, "`of` must be the path of a screen").into_response();
    }
    let Ok(permit) = Arc::clone(&live.viewers).try_acquire_owned() else {
        let retry = [(header::RETRY_AFTER, HeaderValue::from_static("10"))];
        return (StatusCode::SERVICE_UNAVAILABLE, retry, "too many live pages").into_response();
    };
    let until = Instant::now() + LIFETIME;
    let sent = HashMap::new();
    let viewer = Viewer { live, user, page, until, is_new: true, sent, permit: Some(permit) };
    let events = stream::unfold(viewer, |mut viewer| async move {
        let event = viewer.next_event().await?;
        Some((Ok::<_, Infallible>(event), viewer))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

impl Viewer {
    /// Waits until a part has changed. `None`: the connection ends.
    async fn next_event(&mut self) -> Option<Event> {
        self.permit.as_ref()?;
        // Rendered for this connection alone: a shared rendering may be older than the page that the browser has.
        if std::mem::take(&mut self.is_new) {
            let parts = self.render().await?;
            if parts.is_empty() {
                // Nothing of it can change, so it is not read again.
                self.permit = None;
            }
            return Some(self.changes(&parts).unwrap_or_else(|| parts_event("[]")));
        }
        loop {
            tokio::select! {
                () = self.live.stopping.cancelled() => return None,
                () = sleep_until(self.live.seconds.next()) => {}
            }
            if Instant::now() >= self.until {
                self.permit = None;
                // Without data, browsers would ignore it.
                return Some(Event::default().event("end").data("reconnect"));
            }
            let parts = self.shared().get_or_init(|| self.render()).await.clone()?;
            if let Some(event) = self.changes(&parts) {
                return Some(event);
            }
        }
    }

    /// The parts that the browser does not have yet.
    fn changes(&mut self, parts: &[LivePart]) -> Option<Event> {
        let mut changed = Vec::new();
        for part in parts {
            if self.sent.insert(part.name.clone(), part.hash) != Some(part.hash) {
                changed.push(part.json.as_str());
            }
        }
        (!changed.is_empty()).then(|| parts_event(&format!("[{}]", changed.join(","))))
    }

    /// The rendering of the current second for this page and caller.
    fn shared(&self) -> Arc<OnceCell<Rendering>> {
        let second = self.live.seconds.current();
        let ConsoleUser { name, role, view, has_session, .. } = &self.user;
        let key = (self.page.clone(), name.clone(), *role, view.clone(), *has_session);
        let mut shared = self.live.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.second != second {
            *shared = SharedRenderings { second, pages: HashMap::new() };
        }
        Arc::clone(shared.pages.entry(key).or_default())
    }

    /// The parts of the page as it is now.
    async fn render(&self) -> Rendering {
        let mut request = Request::builder().uri(&self.page).body(Body::empty()).ok()?;
        request.extensions_mut().insert(self.user.clone());
        request.extensions_mut().insert(LiveRendering);
        let screens = self.live.screens.clone();
        let response = screens.oneshot(request).await.unwrap_or_else(|no| match no {});
        let bytes = to_bytes(response.into_body(), PAGE_BYTES_MAX).await.ok()?;
        let page = str::from_utf8(&bytes).ok()?;
        let parts = parts(page).map(|(name, html)| {
            let mut hasher = DefaultHasher::new();
            html.hash(&mut hasher);
            let json = json!({"name": name, "html": html}).to_string();
            LivePart { name: name.to_owned(), hash: hasher.finish(), json }
        });
        Some(parts.collect())
    }
}

fn parts_event(json: &str) -> Event {
    Event::default().event("parts").data(json)
}

/// Names and contents of the live parts of a page. The marks cannot be in text of users, which is escaped.
fn parts(page: &str) -> impl Iterator<Item = (&str, &str)> {
    page.split("<!--live:").skip(1).filter_map(|rest| {
        let (name, rest) = rest.split_once("-->")?;
        let (html, _) = rest.split_once("<!--/live:")?;
        Some((name, html))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::http::Extensions;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_last_event_of_a_connection_tells_the_page_to_open_another() {
        let page = get(|| async { "<!--live:one-->1<!--/live:one-->" });
        let screens = Router::new().route("/console", page);
        let live = routes(screens, ConsoleSeconds::start(), CancellationToken::new());
        let (name, view, forwarded) = ("ann".to_owned(), String::new(), Extensions::new());
        let role = ConsoleRole::Read;
        let user = ConsoleUser { name, role, view, has_session: false, forwarded };
        let request = Request::builder().uri("/console/live?of=%2Fconsole").extension(user);
        let request = request.body(Body::empty()).unwrap();
        let began = Instant::now();
        let response = live.oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);

        let bytes = to_bytes(response.into_body(), PAGE_BYTES_MAX).await.unwrap();
        assert!(began.elapsed() >= LIFETIME, "{:?}", began.elapsed());
        let events = str::from_utf8(&bytes).unwrap();
        let names: Vec<_> =
            events.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
        assert_eq!(names, ["parts", "end"], "{events}");
        assert!(events.contains("event: end\ndata: reconnect\n\n"), "{events}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_page_without_live_parts_is_read_once_and_its_connection_ends() {
        let reads = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&reads);
        let page = get(move || async move {
            counted.fetch_add(1, Ordering::SeqCst);
            "<p>a large report</p>"
        });
        let screens = Router::new().route("/console/sql", page);
        let live = routes(screens, ConsoleSeconds::start(), CancellationToken::new());
        let (name, view, forwarded) = ("ann".to_owned(), String::new(), Extensions::new());
        let role = ConsoleRole::Read;
        let user = ConsoleUser { name, role, view, has_session: false, forwarded };
        let request = Request::builder().uri("/console/live?of=%2Fconsole%2Fsql").extension(user);
        let began = Instant::now();
        let response = live.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        let bytes = to_bytes(response.into_body(), PAGE_BYTES_MAX).await.unwrap();
        assert_eq!(str::from_utf8(&bytes).unwrap(), "event: parts\ndata: []\n\n");
        assert!(began.elapsed() < LIFETIME, "{:?}", began.elapsed());
        assert_eq!(reads.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn live_parts_are_found_by_their_marks() {
        let page = "<p>a</p><!--live:one--><div data-live=\"one\">1</div><!--/live:one--> <!--live:two-->2<!--/live:two-->";
        let found: Vec<_> = parts(page).collect();
        assert_eq!(found, [("one", "<div data-live=\"one\">1</div>"), ("two", "2")]);
        assert_eq!(parts("no parts <!--live:open-->").count(), 0);
    }
}
