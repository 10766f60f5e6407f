//! Failures grouped by cause: dead letters, quarantined issues, and replies whose delivery was given up.
//!
//! Upstream: the console. Downstream: the queue and the store. Guarantees: bounded reads, newest first, each source with
//! a timeout of its own; the answer says how much of each was read and which could not be. A cause is the message without
//! what differs from case to case: numbers, ids, quoted text and times. The causes of the dead letters of a topic are kept until one
//! of its dead letters is added or removed, so that a page costs one small read per topic and is never older than that read.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use headwater_issue::{DeadOutboxRow, Issue, IssueFilter};
use headwater_queue::limits::PAGE_MAX;
use headwater_queue::{DeadLetterQuery, DeadLettersRevision, Page, Queue, QueueError, read_each};
use headwater_stream::Direction;
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout, timeout_at};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::issues::visible_issues;
use crate::api::outbox::visible_dead_rows;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::JsonResult;
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::server::app_state::App;
use crate::server::plans::cause::{cause_id, cause_of};
use crate::text;

/// Time for each source.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum topics read, and how many at a time. Of each the newest page of dead letters is read: 1000 of them, or 16 MiB.
const TOPICS_MAX: usize = 50;
const TOPICS_AT_ONCE: usize = 4;

/// Time for the topics together, shorter than that of the source.
const TOPICS_TIME: Duration = Duration::from_millis(1500);

/// Maximum bytes of the causes of dead letters that are kept; those of further topics are read each time.
const KEPT_BYTES_MAX: usize = 32 * 1024 * 1024;

/// Maximum quarantined issues and dead replies read.
const ROWS_MAX: usize = 500;

/// Maximum causes of an answer, samples of one of them, and samples of a cause that is shown alone.
const CLUSTERS_MAX: usize = 200;
const LISTED_SAMPLES_MAX: usize = 3;
const SAMPLES_MAX: usize = 20;

/// Parts of the curve of a cause.
const CURVE_STEPS: usize = 24;

/// Bytes of a message in a sample.
const MESSAGE_BYTES_MAX: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(show))
}

/// Failures by cause.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FailuresResponse {
    /// Most frequent first.
    clusters: Vec<FailureCluster>,
    sources: Vec<FailureSource>,
}

/// What was read.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct FailureSource {
    /// `Dead letters`, `Quarantined issues` or `Dead replies`.
    name: &'static str,
    /// How many failures were read.
    read: u64,
    /// Whether these are all.
    complete: bool,
    /// Topics whose server did not answer in time: of their dead letters those are counted that were read before.
    unread: Vec<String>,
    /// Why nothing of it could be read.
    problem: Option<String>,
}

/// Failures with the same cause at the same place.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FailureCluster {
    /// Derived from kind, place and cause: the same for the same cause.
    id: String,
    /// `dead_letter`, `issue` or `reply`.
    kind: &'static str,
    /// Topic, or integration.
    place: String,
    /// The message without what differs from case to case.
    cause: String,
    count: u64,
    /// False if there may be more: of each topic the newest dead letters are read, of issues and replies so many.
    complete: bool,
    /// Number of different keys, issues or receivers.
    keys: u64,
    first: Option<String>,
    last: Option<String>,
    /// How many failed in each of 24 equal parts of the time from first to last; empty if their times are unknown.
    curve: Vec<u64>,
    /// The newest ones.
    samples: Vec<FailureSample>,
    /// The ids of all, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    ids: Option<Vec<String>>,
}

/// One failure.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct FailureSample {
    /// Entry id, or number of the issue or outbox row.
    id: String,
    key: Option<String>,
    at: Option<String>,
    message: String,
}

/// A failure with where it happened.
struct Failure {
    kind: &'static str,
    place: String,
    sample: FailureSample,
}

/// List failures by cause.
#[utoipa::path(get, path = "/failures", tag = "console", responses((status = 200, body = FailuresResponse)))]
async fn list(
    State(app): State<App>,
    principal: Principal,
    Extension(operations): Extension<Operations>,
) -> JsonResult<FailuresResponse> {
    let (mut clusters, sources) = read_all(&app, &principal, &operations).await;
    most_frequent_first(&mut clusters);
    clusters.truncate(CLUSTERS_MAX);
    let clusters = clusters.iter().map(|cluster| cluster.cut(LISTED_SAMPLES_MAX, false)).collect();
    Ok(Json(FailuresResponse { clusters, sources }))
}

/// Options of one cause.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FailureQuery {
    /// Also return the ids of all.
    #[serde(default)]
    ids: bool,
}

/// Show one cause with samples.
#[utoipa::path(get, path = "/failures/{id}", tag = "console", params(("id" = String, Path), FailureQuery),
    responses((status = 200, body = FailureCluster), (status = 404)))]
async fn show(
    State(app): State<App>,
    principal: Principal,
    Extension(operations): Extension<Operations>,
    PathParams(id): PathParams<String>,
    QueryParams(query): QueryParams<FailureQuery>,
) -> JsonResult<FailureCluster> {
    let cluster = find(&app, &principal, &operations, &id).await?;
    Ok(Json(cluster.cut(SAMPLES_MAX, query.ids)))
}

/// Topic and cause of the dead letters with this cause.
pub(super) async fn dead_letter_cause(
    app: &App,
    principal: &Principal,
    operations: &Operations,
    id: &str,
) -> Result<(String, String), ApiError> {
    let cluster = find(app, principal, operations, id).await?;
    if cluster.kind != "dead_letter" {
        let message = "this cause has no dead letters; `headwater issue release` and `headwater outbox retry` are for \
                       quarantined issues and dead replies";
        return Err(ApiError::invalid(message));
    }
    Ok((cluster.place.clone(), cluster.cause.clone()))
}

async fn find(
    app: &App,
    principal: &Principal,
    operations: &Operations,
    id: &str,
) -> Result<Arc<FailureCluster>, ApiError> {
    let (clusters, sources) = read_all(app, principal, operations).await;
    let found = clusters.into_iter().find(|cluster| cluster.id == id);
    found.ok_or_else(|| {
        // It may be in the source that could not be read.
        let is_unread =
            |source: &&FailureSource| source.problem.is_some() || !source.unread.is_empty();
        if let Some(source) = sources.iter().find(is_unread) {
            let message = format!("{} cannot be read; try again later", source.name.to_lowercase());
            return ApiError::unavailable(message);
        }
        ApiError::not_found(format!("no failure has the cause `{}` any more", text::cut(id, 100)))
    })
}

async fn read_all(
    app: &App,
    principal: &Principal,
    operations: &Operations,
) -> (Vec<Arc<FailureCluster>>, Vec<FailureSource>) {
    let (for_issues, for_replies) = (Arc::clone(app), Arc::clone(app));
    let (of_issues, of_replies) = (principal.clone(), principal.clone());
    let sees_topics = principal.integrations.is_none();
    // On tasks of their own: a query is not dropped half-way.
    let issues = tokio::spawn(async move { quarantined_issues(&for_issues, &of_issues).await });
    let replies = tokio::spawn(async move { dead_replies(&for_replies, &of_replies).await });
    let letters = async {
        match sees_topics {
            true => operations.letter_clusters.read(operations.queue()).await,
            false => Ok(ClusteredSource::new(Vec::new(), true)),
        }
    };
    let (letters, issues, replies) = tokio::join!(
        timeout(SOURCE_TIMEOUT, letters),
        timeout(SOURCE_TIMEOUT, issues),
        timeout(SOURCE_TIMEOUT, replies)
    );
    let failed = || ApiError::internal().message().to_owned();
    let letters =
        letters.map(|read| read.map_err(|error| ApiError::from(error).message().to_owned()));
    let of_task = |read: Result<Result<ClusteredSource, ApiError>, _>| match read {
        Ok(read) => read.map_err(|error| error.message().to_owned()),
        Err(_) => Err(failed()),
    };
    let read = [
        ("Dead letters", letters),
        ("Quarantined issues", issues.map(of_task)),
        ("Dead replies", replies.map(of_task)),
    ];
    let (mut clusters, mut sources) = (Vec::new(), Vec::new());
    for (name, read) in read {
        let late = |_| Err(format!("no answer within {} s", SOURCE_TIMEOUT.as_secs()));
        sources.push(match read.unwrap_or_else(late) {
            Ok(source) => {
                clusters.extend(source.clusters);
                let ClusteredSource { read, complete, unread, .. } = source;
                FailureSource { name, read, complete, unread, problem: None }
            }
            Err(problem) => {
                let unread = Vec::new();
                FailureSource { name, read: 0, complete: false, unread, problem: Some(problem) }
            }
        });
    }
    (clusters, sources)
}

/// What was read of a source, by cause.
#[derive(Clone)]
struct ClusteredSource {
    clusters: Vec<Arc<FailureCluster>>,
    /// How many failures these are.
    read: u64,
    /// Whether these are all.
    complete: bool,
    /// Topics whose server did not answer in time: of these, what was read before.
    unread: Vec<String>,
}

impl ClusteredSource {
    fn new(failures: Vec<Failure>, complete: bool) -> Self {
        let read = failures.len() as u64;
        let clusters = clusters(failures, complete).into_iter().map(Arc::new).collect();
        Self { clusters, read, complete, unread: Vec::new() }
    }
}

/// The causes of the dead letters of each topic, as long as the dead letters are the same.
#[derive(Default)]
pub(super) struct LetterClusters {
    topics: Mutex<HashMap<String, (DeadLettersRevision, ClusteredSource)>>,
}

impl LetterClusters {
    async fn read(&self, queue: &Queue) -> Result<ClusteredSource, QueueError> {
        let mut names = queue.topics().list().await?;
        let has_all_topics = names.len() <= TOPICS_MAX;
        names.truncate(TOPICS_MAX);
        self.locked().retain(|topic, _| names.contains(topic));
        let until = Instant::now() + TOPICS_TIME;
        let reads = names.into_iter().map(|topic: String| async move {
            let read = timeout_at(until, self.of_topic(queue, &topic)).await;
            (topic, read)
        });
        let (mut topics, mut unread) = (Vec::new(), Vec::new());
        for (topic, read) in read_each(TOPICS_AT_ONCE, reads.collect()).await {
            match read {
                Ok(Ok(read)) => topics.push(read),
                // Deleted in the meantime.
                Ok(Err(QueueError::NoTopic { .. })) => {}
                Ok(Err(error)) if !error.is_transient() => return Err(error),
                // What was read before is more than nothing.
                Ok(Err(_)) | Err(_) => {
                    let kept = self.locked().get(&topic).map(|(_, kept)| kept.clone());
                    topics.extend(kept);
                    unread.push(topic);
                }
            }
        }
        Ok(ClusteredSource {
            read: topics.iter().map(|topic| topic.read).sum(),
            complete: has_all_topics
                && unread.is_empty()
                && topics.iter().all(|topic| topic.complete),
            clusters: topics.into_iter().flat_map(|topic| topic.clusters).collect(),
            unread,
        })
    }

    async fn of_topic(&self, queue: &Queue, topic: &str) -> Result<ClusteredSource, QueueError> {
        let letters = queue.dead_letters(topic).await?;
        let revision = letters.revision().await?;
        if let Some((_, kept)) = self.locked().get(topic).filter(|(of, _)| *of == revision) {
            return Ok(kept.clone());
        }
        let query = DeadLetterQuery {
            direction: Direction::Backward,
            limit: PAGE_MAX,
            ..DeadLetterQuery::default()
        };
        let Page { items, next } = letters.browse(&query).await?;
        let failures = items.into_iter().map(|letter| Failure {
            kind: "dead_letter",
            place: topic.to_owned(),
            sample: FailureSample {
                id: letter.id.to_string(),
                key: letter.key,
                at: letter.failed_at.map(|at| at.to_rfc3339()),
                message: letter.reason,
            },
        });
        let read = ClusteredSource::new(failures.collect(), next.is_none());
        let mut kept = self.locked();
        kept.remove(topic);
        let bytes = |source: &ClusteredSource| -> usize {
            source.clusters.iter().map(|cluster| cluster.bytes()).sum()
        };
        let kept_bytes: usize = kept.values().map(|(_, source)| bytes(source)).sum();
        if kept_bytes + bytes(&read) <= KEPT_BYTES_MAX {
            kept.insert(topic.to_owned(), (revision, read.clone()));
        }
        Ok(read)
    }

    fn locked(
        &self,
    ) -> std::sync::MutexGuard<'_, HashMap<String, (DeadLettersRevision, ClusteredSource)>> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FailureCluster {
    /// The same with so many samples at most, and perhaps without ids.
    fn cut(&self, samples: usize, with_ids: bool) -> Self {
        Self {
            id: self.id.clone(),
            kind: self.kind,
            place: self.place.clone(),
            cause: self.cause.clone(),
            count: self.count,
            complete: self.complete,
            keys: self.keys,
            first: self.first.clone(),
            last: self.last.clone(),
            curve: self.curve.clone(),
            samples: self.samples.iter().take(samples).cloned().collect(),
            ids: self.ids.clone().filter(|_| with_ids),
        }
    }

    /// Approximate size in memory.
    fn bytes(&self) -> usize {
        let samples = self.samples.iter().map(|sample| {
            size_of::<FailureSample>()
                + sample.id.len()
                + sample.message.len()
                + sample.key.as_ref().map_or(0, String::len)
        });
        let ids = self.ids.iter().flatten().map(|id| size_of::<String>() + id.len());
        size_of::<Self>() + self.place.len() + self.cause.len() + samples.chain(ids).sum::<usize>()
    }
}

async fn quarantined_issues(app: &App, principal: &Principal) -> Result<ClusteredSource, ApiError> {
    let filter = IssueFilter { quarantined: Some(true), ..IssueFilter::default() };
    let read = |last, count| {
        let filter = IssueFilter { after: last, ..filter.clone() };
        async move { visible_issues(app, principal, &filter, count).await }
    };
    let measure = |issue: &Issue| (issue.id, issue.fields.len() + issue.discussions.len());
    let (issues, last) = paging::read_page(ROWS_MAX, measure, read).await?;
    let failures = issues.into_iter().map(|issue| Failure {
        kind: "issue",
        sample: FailureSample {
            id: issue.id.0.to_string(),
            key: Some(format!("{}#{}", issue.external_project_id, issue.external_issue_id)),
            at: issue.quarantined_at.map(|at| at.to_rfc3339()),
            message: issue.last_error.unwrap_or_default(),
        },
        place: issue.integration,
    });
    Ok(ClusteredSource::new(failures.collect(), last.is_none()))
}

async fn dead_replies(app: &App, principal: &Principal) -> Result<ClusteredSource, ApiError> {
    let read = |last, count| visible_dead_rows(app, principal, last, count);
    let measure = |dead: &DeadOutboxRow| (dead.row.id, dead.row.payload.len());
    let (rows, last) = paging::read_page(ROWS_MAX, measure, read).await?;
    let failures = rows.into_iter().map(|dead| Failure {
        kind: "reply",
        sample: FailureSample {
            id: dead.row.id.0.to_string(),
            key: Some(dead.row.target),
            at: Some(dead.row.created_at.to_rfc3339()),
            message: dead.error,
        },
        place: dead.row.integration,
    });
    Ok(ClusteredSource::new(failures.collect(), last.is_none()))
}

/// Groups failures by kind, place and cause. All ids are kept. `complete`: these are all failures of their source.
fn clusters(failures: Vec<Failure>, complete: bool) -> Vec<FailureCluster> {
    let mut groups: BTreeMap<(&'static str, String, String), Vec<FailureSample>> = BTreeMap::new();
    for Failure { kind, place, sample } in failures {
        let cause = cause_of(&sample.message);
        groups.entry((kind, place, cause)).or_default().push(sample);
    }
    let build =
        |((kind, place, cause), mut all): ((&'static str, String, String), Vec<FailureSample>)| {
            all.sort_by(|one, other| other.at.cmp(&one.at));
            let keys: HashSet<_> = all.iter().filter_map(|sample| sample.key.as_ref()).collect();
            let keys = keys.len() as u64;
            let times = || all.iter().filter_map(|sample| sample.at.clone());
            let mut samples: Vec<_> = all.iter().take(SAMPLES_MAX).cloned().collect();
            for sample in &mut samples {
                sample.message = text::cut(&sample.message, MESSAGE_BYTES_MAX).to_owned();
            }
            FailureCluster {
                id: cause_id(kind, &place, &cause),
                count: all.len() as u64,
                complete,
                keys,
                first: times().min(),
                last: times().max(),
                curve: curve(all.iter().filter_map(|sample| sample.at.as_deref())),
                samples,
                ids: Some(all.into_iter().map(|sample| sample.id).collect()),
                kind,
                place,
                cause,
            }
        };
    groups.into_iter().map(build).collect()
}

fn most_frequent_first(clusters: &mut [Arc<FailureCluster>]) {
    clusters.sort_by(|one, other| other.count.cmp(&one.count).then(other.last.cmp(&one.last)));
}

/// How many of these times are in each of equal parts of the time from the first to the last.
fn curve<'a>(times: impl Iterator<Item = &'a str>) -> Vec<u64> {
    let times: Vec<u64> =
        times.filter_map(Timestamp::from_rfc3339).map(|at| at.as_millis()).collect();
    let (Some(first), Some(last)) = (times.iter().min(), times.iter().max()) else {
        return Vec::new();
    };
    let span = last - first + 1;
    let mut counts = vec![0; CURVE_STEPS];
    for at in &times {
        let step = u128::from(at - first) * CURVE_STEPS as u128 / u128::from(span);
        counts[usize::try_from(step).unwrap_or(0)] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_grouped_by_place_and_cause_most_frequent_first() {
        let failure = |place: &str, id: &str, at: &str, message: &str| Failure {
            kind: "dead_letter",
            place: place.to_owned(),
            sample: FailureSample {
                id: id.to_owned(),
                key: Some("k".to_owned()),
                at: Some(at.to_owned()),
                message: message.to_owned(),
            },
        };
        let all = ClusteredSource::new(
            vec![
                failure("orders", "1-0", "2026-01-01T00:00:00Z", "refused"),
                failure("orders", "2-0", "2026-01-03T00:00:00Z", "order 7 late"),
                failure("orders", "3-0", "2026-01-02T00:00:00Z", "order 8 late"),
                failure("mails", "4-0", "2026-01-02T00:00:00Z", "order 8 late"),
            ],
            true,
        );
        assert!(all.clusters.iter().all(|cluster| cluster.complete));
        let newest = vec![failure("orders", "1-0", "2026-01-01T00:00:00Z", "refused")];
        let newest = ClusteredSource::new(newest, false).clusters;
        assert!(!newest[0].complete && !newest[0].cut(1, false).complete);
        let mut found = all.clusters;
        most_frequent_first(&mut found);
        assert_eq!(found.len(), 3);
        let first = &found[0];
        assert_eq!((&*first.cause, first.count, first.keys), ("order # late", 2, 1));
        assert_eq!(
            first.ids.as_deref(),
            Some(&["2-0".to_owned(), "3-0".to_owned()][..]),
            "newest first"
        );
        assert_eq!(first.first.as_deref(), Some("2026-01-02T00:00:00Z"));
        assert_ne!(first.id, found[1].id);
        assert_eq!((first.curve.len(), first.curve[0], first.curve[23]), (CURVE_STEPS, 1, 1));
        assert_eq!(found[1].curve[0], 1, "one time is one part");
    }
}
