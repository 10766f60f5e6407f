//! Failures grouped by cause: dead letters, quarantined issues, and replies whose delivery was given up.
//!
//! Upstream: the console. Downstream: the queue and the store. Guarantees: bounded reads, newest first, each source with
//! a timeout of its own; the answer says how much of each was read and which could not be. A cause is the message without
//! what differs from case to case: numbers, ids, quoted text and times.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use headwater_issue::{DeadOutboxRow, Issue, IssueFilter};
use headwater_queue::{DeadLetterQuery, Queue, QueueError};
use headwater_stream::Direction;
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
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

/// Maximum topics read, dead letters of a page (each may hold a megabyte), and pages of a topic.
const TOPICS_MAX: usize = 50;
const LETTERS_PAGE: usize = 100;
const PAGES_MAX: usize = 10;

/// Maximum quarantined issues and dead replies read.
const ROWS_MAX: usize = 500;

/// Maximum causes of an answer, and samples of a cause.
const CLUSTERS_MAX: usize = 200;
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
    /// Why it could not be read.
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
    let (failures, sources) = read_all(&app, &principal, operations.queue()).await;
    let mut clusters = clusters(failures);
    clusters.truncate(CLUSTERS_MAX);
    for cluster in &mut clusters {
        cluster.samples.truncate(3);
        cluster.ids = None;
    }
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
    let mut cluster = find(&app, &principal, operations.queue(), &id).await?;
    if !query.ids {
        cluster.ids = None;
    }
    Ok(Json(cluster))
}

/// Topic and cause of the dead letters with this cause.
pub(super) async fn dead_letter_cause(
    app: &App,
    principal: &Principal,
    queue: &Queue,
    id: &str,
) -> Result<(String, String), ApiError> {
    let FailureCluster { kind, place, cause, .. } = find(app, principal, queue, id).await?;
    if kind != "dead_letter" {
        let message = "this cause has no dead letters; `headwater issue release` and `headwater outbox retry` are for \
                       quarantined issues and dead replies";
        return Err(ApiError::invalid(message));
    }
    Ok((place, cause))
}

async fn find(
    app: &App,
    principal: &Principal,
    queue: &Queue,
    id: &str,
) -> Result<FailureCluster, ApiError> {
    let (failures, sources) = read_all(app, principal, queue).await;
    let found = clusters(failures).into_iter().find(|cluster| cluster.id == id);
    found.ok_or_else(|| {
        // It may be in the source that could not be read.
        if let Some(source) = sources.iter().find(|source| source.problem.is_some()) {
            let message = format!("{} cannot be read; try again later", source.name.to_lowercase());
            return ApiError::unavailable(message);
        }
        ApiError::not_found(format!("no failure has the cause `{}` any more", text::cut(id, 100)))
    })
}

async fn read_all(
    app: &App,
    principal: &Principal,
    queue: &Queue,
) -> (Vec<Failure>, Vec<FailureSource>) {
    let (for_issues, for_replies) = (Arc::clone(app), Arc::clone(app));
    let (of_issues, of_replies) = (principal.clone(), principal.clone());
    let sees_topics = principal.integrations.is_none();
    // On tasks of their own: a query is not dropped half-way.
    let issues = tokio::spawn(async move { quarantined_issues(&for_issues, &of_issues).await });
    let replies = tokio::spawn(async move { dead_replies(&for_replies, &of_replies).await });
    let (letters, issues, replies) = tokio::join!(
        timeout(SOURCE_TIMEOUT, async {
            if sees_topics { dead_letters(queue).await } else { Ok((Vec::new(), true)) }
        }),
        timeout(SOURCE_TIMEOUT, issues),
        timeout(SOURCE_TIMEOUT, replies)
    );
    let failed = || ApiError::internal().message().to_owned();
    let letters =
        letters.map(|read| read.map_err(|error| ApiError::from(error).message().to_owned()));
    let of_task = |read: Result<Result<SourceRead, ApiError>, _>| match read {
        Ok(read) => read.map_err(|error| error.message().to_owned()),
        Err(_) => Err(failed()),
    };
    let read = [
        ("Dead letters", letters),
        ("Quarantined issues", issues.map(of_task)),
        ("Dead replies", replies.map(of_task)),
    ];
    let (mut failures, mut sources) = (Vec::new(), Vec::new());
    for (name, read) in read {
        let late = |_| Err(format!("no answer within {} s", SOURCE_TIMEOUT.as_secs()));
        sources.push(match read.unwrap_or_else(late) {
            Ok((found, complete)) => {
                let read = found.len() as u64;
                failures.extend(found);
                FailureSource { name, read, complete, problem: None }
            }
            Err(problem) => {
                FailureSource { name, read: 0, complete: false, problem: Some(problem) }
            }
        });
    }
    (failures, sources)
}

/// Failures, and whether these are all.
type SourceRead = (Vec<Failure>, bool);

async fn dead_letters(queue: &Queue) -> Result<SourceRead, QueueError> {
    let mut names = queue.topics().list().await?;
    names.sort();
    let mut complete = names.len() <= TOPICS_MAX;
    let mut failures = Vec::new();
    for topic in names.into_iter().take(TOPICS_MAX) {
        let mut cursor = None;
        for _ in 0..PAGES_MAX {
            let query = DeadLetterQuery {
                direction: Direction::Backward,
                limit: LETTERS_PAGE,
                cursor: cursor.take(),
                ..DeadLetterQuery::default()
            };
            let page = async { queue.dead_letters(&topic).await?.browse(&query).await }.await;
            let page = match page {
                Ok(page) => page,
                // Deleted in the meantime.
                Err(QueueError::NoTopic { .. }) => break,
                Err(error) => return Err(error),
            };
            failures.extend(page.items.into_iter().map(|letter| Failure {
                kind: "dead_letter",
                place: topic.clone(),
                sample: FailureSample {
                    id: letter.id.to_string(),
                    key: letter.key,
                    at: letter.failed_at.map(|at| at.to_rfc3339()),
                    message: letter.reason,
                },
            }));
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
        complete &= cursor.is_none();
    }
    Ok((failures, complete))
}

async fn quarantined_issues(app: &App, principal: &Principal) -> Result<SourceRead, ApiError> {
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
    Ok((failures.collect(), last.is_none()))
}

async fn dead_replies(app: &App, principal: &Principal) -> Result<SourceRead, ApiError> {
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
    Ok((failures.collect(), last.is_none()))
}

/// Groups failures by kind, place and cause; the most frequent first. All ids are kept.
fn clusters(failures: Vec<Failure>) -> Vec<FailureCluster> {
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
    let mut clusters: Vec<_> = groups.into_iter().map(build).collect();
    clusters.sort_by(|one, other| other.count.cmp(&one.count).then(other.last.cmp(&one.last)));
    clusters
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
        let found = clusters(vec![
            failure("orders", "1-0", "2026-01-01T00:00:00Z", "refused"),
            failure("orders", "2-0", "2026-01-03T00:00:00Z", "order 7 late"),
            failure("orders", "3-0", "2026-01-02T00:00:00Z", "order 8 late"),
            failure("mails", "4-0", "2026-01-02T00:00:00Z", "order 8 late"),
        ]);
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
