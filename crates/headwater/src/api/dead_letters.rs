//! Dead letters: browse, show, replay, purge.
//!
//! Upstream: `router`, and the verb `dlq`. Promises: whoever asks for it is told how far a replay or a purge is, line by line; then
//! it takes as long as it takes, and ends when its caller goes away. Both can be repeated.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use headwater_queue::{
    DeadLetter, DeadLetterFilter, DeadLetterQuery, Headers, Letters, PurgeConfig, PurgeReport,
    ReplayConfig, ReplayReport,
};
use headwater_stream::Direction;
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::sleep;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::dto::{Payload, all, entry_id, id, time};
use crate::api::ndjson::{error_line, lines};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Caller;
use crate::http::body::{Answer, JsonBody};
use crate::http::extract::{PathOf, QueryOf};

/// How often somebody is told how far it is.
const TOLD_EVERY: Duration = Duration::from_millis(200);

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(browse))
        .routes(routes!(show))
        .routes(routes!(replay))
        .routes(routes!(purge))
}

/// A message that ran out of attempts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LetterView {
    /// The id of the dead letter.
    id: String,
    topic: Option<String>,
    partition: Option<u16>,
    original_id: Option<String>,
    key: Option<String>,
    #[serde(flatten)]
    payload: Payload,
    headers: Headers,
    failures: u32,
    sent_at: Option<String>,
    failed_at: Option<String>,
    reason: String,
    replayed_from: Option<String>,
    /// How often it was replayed before.
    replays: u32,
    /// All fields as they are.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fields: BTreeMap<String, String>,
}

fn view(letter: DeadLetter, with_fields: bool) -> LetterView {
    LetterView {
        id: letter.id.to_string(),
        topic: letter.original_topic,
        partition: letter.partition,
        original_id: id(letter.original_id),
        key: letter.key,
        payload: Payload::of(&letter.payload),
        headers: letter.headers,
        failures: letter.failures,
        sent_at: letter.sent_at.map(time),
        failed_at: letter.failed_at.map(time),
        reason: letter.reason,
        replayed_from: id(letter.replayed_from),
        replays: letter.replays,
        fields: if with_fields { all(&letter.fields) } else { BTreeMap::new() },
    }
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LetterPage {
    dead_letters: Vec<LetterView>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<String>,
}

/// Which dead letters.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct BrowseQuery {
    /// Only those whose reason holds this text.
    reason: Option<String>,
    /// Only those with this key.
    key: Option<String>,
    partition: Option<u16>,
    /// Given up at this time or later.
    from: Option<String>,
    /// Given up at this time or earlier.
    to: Option<String>,
    /// The newest first.
    #[serde(default)]
    newest_first: bool,
    /// At most this many; 100 by default, 1000 at most.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// Which dead letters to do something with: those named, or all that match.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LettersWish {
    /// These, at most 100.
    ids: Option<Vec<String>>,
    /// Or all whose reason holds this text,
    reason: Option<String>,
    /// with this key,
    key: Option<String>,
    /// of this partition,
    partition: Option<u16>,
    /// given up at this time or later,
    from: Option<String>,
    /// given up at this time or earlier.
    to: Option<String>,
    /// Or all there are: to be said in so many words.
    #[serde(default)]
    all: bool,
    /// Only say what would happen.
    #[serde(default)]
    dry_run: bool,
    /// Replay: at most so many a second.
    #[schema(value_type = Option<u32>, minimum = 1)]
    per_second: Option<NonZeroU32>,
    /// Replay: letters that were replayed so often are left alone.
    max_replays: Option<u32>,
    /// Replay: at most so many.
    limit: Option<u64>,
    /// Answer with lines of JSON: `{"progress":{"done":N}}` a few times a second, and `{"end":...}` or `{"error":...}` at last.
    #[serde(default)]
    progress: bool,
}

impl LettersWish {
    fn letters(&self) -> Result<Letters, ApiError> {
        let filter = filter(
            self.reason.clone(),
            self.key.clone(),
            self.partition,
            self.from.as_deref(),
            self.to.as_deref(),
        )?;
        let has_filter = filter != DeadLetterFilter::default();
        match (&self.ids, has_filter, self.all) {
            (Some(ids), false, false) => {
                let ids = ids.iter().map(|id| entry_id("ids", id)).collect::<Result<_, _>>()?;
                Ok(Letters::Ids(ids))
            }
            (None, true, false) | (None, false, true) => Ok(Letters::Matching(filter)),
            _ => Err(ApiError::invalid(
                "say which: `ids`, or a filter, or `all: true`; one of the three",
            )),
        }
    }
}

fn filter(
    reason: Option<String>,
    key: Option<String>,
    partition: Option<u16>,
    from: Option<&str>,
    to: Option<&str>,
) -> Result<DeadLetterFilter, ApiError> {
    let at = |what: &str, text: Option<&str>| match text {
        None => Ok(None),
        Some(text) => Timestamp::from_rfc3339(text).map(Some).ok_or_else(|| {
            ApiError::invalid(format!("`{what}` is `{text}`; a time such as 2026-11-15T10:00:00Z"))
        }),
    };
    Ok(DeadLetterFilter { reason, key, partition, from: at("from", from)?, to: at("to", to)? })
}

/// The dead letters of a topic; copies are shown once.
#[utoipa::path(get, path = "/topics/{topic}/dead-letters", tag = "dead letters", params(("topic" = String, Path), BrowseQuery),
    responses((status = 200, body = LetterPage), (status = 404)))]
async fn browse(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
    QueryOf(query): QueryOf<BrowseQuery>,
) -> Answer<LetterPage> {
    let defaults = DeadLetterQuery::default();
    let asked = DeadLetterQuery {
        filter: filter(
            query.reason,
            query.key,
            query.partition,
            query.from.as_deref(),
            query.to.as_deref(),
        )?,
        direction: if query.newest_first { Direction::Backward } else { Direction::Forward },
        limit: query.limit.unwrap_or(defaults.limit),
        cursor: query.cursor,
    };
    let page = operations.queue.dead_letters(&topic).await?.browse(&asked).await?;
    let items = page.items.into_iter().map(|letter| view(letter, false)).collect();
    Ok(Json(LetterPage { dead_letters: items, next_cursor: page.next }))
}

/// One dead letter with all its fields.
#[utoipa::path(get, path = "/topics/{topic}/dead-letters/{id}", tag = "dead letters",
    params(("topic" = String, Path), ("id" = String, Path)), responses((status = 200, body = LetterView), (status = 404)))]
async fn show(
    State(operations): State<Operations>,
    PathOf((topic, id)): PathOf<(String, String)>,
) -> Answer<LetterView> {
    let id = entry_id("id", &id)?;
    let letter = operations.queue.dead_letters(&topic).await?.show(id).await?;
    Ok(Json(view(letter, true)))
}

/// What a replay did, or would do.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReplayAnswer {
    replayed: u64,
    already_replayed: u64,
    refused: u64,
    /// Some of those that were refused.
    refusals: Vec<RefusalLine>,
    /// `false` for a dry run, and where the limit left some.
    is_done: bool,
}

/// A dead letter that was left alone.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RefusalLine {
    id: String,
    problem: String,
}

/// Sends dead letters to their partitions again.
#[utoipa::path(post, path = "/topics/{topic}/dead-letters/replay", tag = "dead letters", params(("topic" = String, Path)),
    request_body = LettersWish, responses((status = 200, body = ReplayAnswer), (status = 404)))]
async fn replay(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
    JsonBody(wish): JsonBody<LettersWish>,
) -> Result<Response, ApiError> {
    let letters = wish.letters()?;
    let defaults = ReplayConfig::default();
    let config = ReplayConfig {
        dry_run: wish.dry_run,
        per_second: wish.per_second.or(defaults.per_second),
        max_replays: wish.max_replays.unwrap_or(defaults.max_replays),
        limit: wish.limit.or(defaults.limit),
    };
    let dead = operations.queue.dead_letters(&topic).await?;
    let (done, told) = (Arc::new(AtomicU64::new(0)), wish.progress);
    let count = Arc::clone(&done);
    let replaying = async move {
        let tell = |report: &ReplayReport| {
            let handled = report.replayed + report.already_replayed + report.refused;
            count.store(handled, Ordering::Relaxed);
        };
        Ok(ReplayAnswer::from(dead.replay_telling(letters, &config, &tell).await?))
    };
    answer(replaying, done, told, &operations).await
}

impl From<ReplayReport> for ReplayAnswer {
    fn from(report: ReplayReport) -> Self {
        let line = |refusal: headwater_queue::Refusal| RefusalLine {
            id: refusal.id.to_string(),
            problem: refusal.problem,
        };
        Self {
            replayed: report.replayed,
            already_replayed: report.already_replayed,
            refused: report.refused,
            refusals: report.refusals.into_iter().map(line).collect(),
            is_done: report.is_done,
        }
    }
}

/// What a purge did, or would do.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PurgeAnswer {
    purged: u64,
    is_done: bool,
}

/// Removes dead letters for good.
#[utoipa::path(post, path = "/topics/{topic}/dead-letters/purge", tag = "dead letters", params(("topic" = String, Path)),
    request_body = LettersWish, responses((status = 200, body = PurgeAnswer), (status = 404)))]
async fn purge(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
    caller: Caller,
    JsonBody(wish): JsonBody<LettersWish>,
) -> Result<Response, ApiError> {
    caller.must_be(Role::Admin)?;
    let letters = wish.letters()?;
    let config = PurgeConfig { dry_run: wish.dry_run };
    let dead = operations.queue.dead_letters(&topic).await?;
    let (done, told) = (Arc::new(AtomicU64::new(0)), wish.progress);
    let count = Arc::clone(&done);
    let purging = async move {
        let tell = |report: &PurgeReport| count.store(report.purged, Ordering::Relaxed);
        let PurgeReport { purged, is_done } = dead.purge_telling(letters, &config, &tell).await?;
        Ok(PurgeAnswer { purged, is_done })
    };
    answer(purging, done, told, &operations).await
}

/// What came of it; or, for those who want to be told, lines that say how far it is until then.
async fn answer<T: Serialize + Send + 'static>(
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    done: Arc<AtomicU64>,
    is_told: bool,
    operations: &Operations,
) -> Result<Response, ApiError> {
    if !is_told {
        return Ok(Json(work.await?).into_response());
    }
    let stopping = operations.stopping.clone();
    let state = Some((Box::pin(work), done, stopping));
    Ok(lines(stream::unfold(state, |state| async move {
        let (mut work, done, stopping) = state?;
        let ended = tokio::select! {
            ended = &mut work => ended,
            () = stopping.begun() => Err(ApiError::unavailable("the process stops; do it again")),
            () = sleep(TOLD_EVERY) => {
                let line = json!({"progress": {"done": done.load(Ordering::Relaxed)}});
                return Some((line.to_string(), Some((work, done, stopping))));
            }
        };
        let line = match ended {
            Ok(report) => json!({"end": report}).to_string(),
            Err(refusal) => error_line(&refusal),
        };
        Some((line, None))
    })))
}
