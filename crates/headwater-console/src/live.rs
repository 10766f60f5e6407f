//! `GET /console/live?of=PATH`: sends the live parts of a page that changed, as server-sent events.
//!
//! Upstream: `console.js`, one connection for each open page. Downstream: the screens, rendered again for the same
//! caller. Guarantees: the first event carries all parts, so nothing is missed; at most one rendering per second; at most
//! [`VIEWERS_MAX`] connections, others are refused and poll; a connection ends after [`LIFETIME`], so that an ended
//! login is noticed; shutdown ends all.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
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
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::form::FormFields;
use crate::user::ConsoleUser;

/// Maximum open connections of this process.
pub(crate) const VIEWERS_MAX: usize = 200;

/// Time between two renderings.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time after which a connection ends; the browser opens another.
const LIFETIME: Duration = Duration::from_secs(300);

/// Maximum bytes of a page.
const PAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

#[derive(Clone)]
struct LiveState {
    screens: Router,
    viewers: Arc<Semaphore>,
    stopping: CancellationToken,
}

/// The route, on these screens.
pub(crate) fn routes(screens: Router, stopping: CancellationToken) -> Router {
    let viewers = Arc::new(Semaphore::new(VIEWERS_MAX));
    Router::new().route("/console/live", get(open)).with_state(LiveState {
        screens,
        viewers,
        stopping,
    })
}

/// One open connection.
struct Viewer {
    screens: Router,
    user: ConsoleUser,
    page: String,
    ticks: Interval,
    until: Instant,
    stopping: CancellationToken,
    /// Hash of each part as the browser has it.
    sent: HashMap<String, u64>,
    _permit: OwnedSemaphorePermit,
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
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let viewer = Viewer {
        screens: live.screens,
        user,
        page,
        ticks,
        until: Instant::now() + LIFETIME,
        stopping: live.stopping,
        sent: HashMap::new(),
        _permit: permit,
    };
    let events = stream::unfold(viewer, |mut viewer| async move {
        let event = viewer.next_event().await?;
        Some((Ok::<_, Infallible>(event), viewer))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

impl Viewer {
    /// Waits until a part has changed. `None`: the connection ends.
    async fn next_event(&mut self) -> Option<Event> {
        loop {
            tokio::select! {
                () = self.stopping.cancelled() => return None,
                _ = self.ticks.tick() => {}
            }
            if Instant::now() >= self.until {
                return None;
            }
            let page = self.render().await?;
            let is_first = self.sent.is_empty();
            let changed: Vec<_> = parts(&page)
                .filter(|(name, html)| {
                    let mut hasher = DefaultHasher::new();
                    html.hash(&mut hasher);
                    let hash = hasher.finish();
                    self.sent.insert((*name).to_owned(), hash) != Some(hash)
                })
                .map(|(name, html)| json!({"name": name, "html": html}))
                .collect();
            if !changed.is_empty() || is_first {
                return Some(Event::default().event("parts").data(json!(changed).to_string()));
            }
        }
    }

    /// The page as it is now; `None` if it cannot be shown any more.
    async fn render(&self) -> Option<String> {
        let mut request = Request::builder().uri(&self.page).body(Body::empty()).ok()?;
        request.extensions_mut().insert(self.user.clone());
        let response = self.screens.clone().oneshot(request).await.unwrap_or_else(|no| match no {});
        let bytes = to_bytes(response.into_body(), PAGE_BYTES_MAX).await.ok()?;
        String::from_utf8(bytes.to_vec()).ok()
    }
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
    use super::*;

    #[test]
    fn live_parts_are_found_by_their_marks() {
        let page = "<p>a</p><!--live:one--><div data-live=\"one\">1</div><!--/live:one--> <!--live:two-->2<!--/live:two-->";
        let found: Vec<_> = parts(page).collect();
        assert_eq!(found, [("one", "<div data-live=\"one\">1</div>"), ("two", "2")]);
        assert_eq!(parts("no parts <!--live:open-->").count(), 0);
    }
}
