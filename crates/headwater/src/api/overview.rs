//! The overview: is all well, and what should be done?
//!
//! Upstream: the console and monitoring. Downstream: the database and the stream backend, each with a timeout of its own,
//! at the same time. Guarantees: always answers; what cannot be read is `null`, and its dependency is named as
//! unavailable. Topics whose server does not answer in time are counted, and do not hide the others. At most
//! [`TOPICS_MAX`] topics are read; then `complete` is `false`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use headwater_issue::limits::OLDEST_WAIT_ISSUES;
use headwater_issue::{Backlog, WorkerInfo};
use headwater_queue::{Queue, QueueError, read_each};
use headwater_stream::clock::{Clock, SystemClock};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout, timeout_at};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::dto::milliseconds;
use crate::http::body::JsonResult;
use crate::http::extract::QueryParams;
use crate::server::app_state::App;

/// Time for each dependency.
const DEPENDENCY_TIMEOUT: Duration = Duration::from_secs(2);

/// Time for the topics: less, so that those which were read are shown.
const TOPICS_TIMEOUT: Duration = Duration::from_millis(1500);
const _: () = assert!(TOPICS_TIMEOUT.as_millis() < DEPENDENCY_TIMEOUT.as_millis());

/// Maximum topics read, and how many at a time.
const TOPICS_MAX: usize = 100;
const TOPICS_AT_ONCE: usize = 8;

/// Name of the stream backend among the dependencies.
const STREAMS: &str = "Streams";

/// A reply that waits longer than this is a problem.
const OUTBOX_LAG_MAX: Duration = Duration::from_secs(60);

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(overview))
}

/// State of the whole installation.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OverviewResponse {
    /// `ok`, `warning` or `error`.
    status: &'static str,
    /// The state in one sentence.
    verdict: String,
    /// What should be done, most urgent first.
    problems: Vec<OverviewProblem>,
    dependencies: Vec<OverviewDependency>,
    /// `null` if the database did not answer.
    issues: Option<OverviewIssues>,
    outbox: Option<OverviewOutbox>,
    workers: Option<OverviewWorkers>,
    /// `null` if the stream backend did not answer, or was not asked.
    topics: Option<OverviewTopics>,
    /// Tokens of today; `null` if the database did not answer.
    tokens: Option<OverviewTokens>,
}

/// Something that needs attention.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct OverviewProblem {
    /// `warning` or `error`.
    level: &'static str,
    /// `database_unavailable`, `streams_unavailable`, `topics_unavailable`, `no_worker`, `quarantined`, `dead_replies`,
    /// `dead_letters` or `outbox_lag`.
    code: &'static str,
    /// What is wrong and what to do.
    sentence: String,
}

/// A server that this one depends on.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OverviewDependency {
    name: &'static str,
    /// Which kind of server.
    kind: String,
    ok: bool,
    reason: Option<String>,
}

/// Numbers of issues.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct OverviewIssues {
    queued: u64,
    processing: u64,
    quarantined: u64,
    /// Longest time that a queued issue has waited.
    oldest_wait_ms: u64,
    /// Whether another queued issue may have waited longer, because only the first 10,000 are looked at.
    oldest_wait_or_more: bool,
}

/// Numbers of the outbox.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct OverviewOutbox {
    /// Replies and events to deliver.
    pending: u64,
    /// Those whose attempts are exhausted.
    dead: u64,
    /// Age of the oldest to deliver.
    lag_ms: u64,
}

/// Numbers of workers.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct OverviewWorkers {
    alive: u64,
    claims: u64,
}

/// Sums over topics.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub(crate) struct OverviewTopics {
    count: u64,
    length: u64,
    delayed: u64,
    dead_letters: u64,
    /// Messages that groups have not been given yet.
    lag: u64,
    /// Topics that are not in the sums, because a server of the stream backend did not answer in time.
    unread: u64,
    /// Whether all topics were read.
    complete: bool,
}

/// Tokens of today, of the integration that has used the largest share of its budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct OverviewTokens {
    /// Tokens of all integrations.
    used: u64,
    /// Tokens of the integration that used the most.
    most_used: u64,
    /// Budget of each integration for a day.
    max: u64,
}

/// What to read.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct OverviewQuery {
    /// Whether to read the topics: true by default. Without them, the stream backend is not asked and not among the dependencies.
    topics: Option<bool>,
}

/// Summarize the state of the installation.
#[utoipa::path(get, path = "/overview", tag = "console", params(OverviewQuery), responses((status = 200, body = OverviewResponse)))]
async fn overview(
    State(app): State<App>,
    Extension(operations): Extension<Operations>,
    QueryParams(query): QueryParams<OverviewQuery>,
) -> JsonResult<OverviewResponse> {
    let with_topics = query.topics.unwrap_or(true);
    let store = Arc::clone(&app.store);
    // On a task of its own: a query is not dropped half-way.
    let reading = tokio::spawn(async move { tokio::try_join!(store.backlog(), store.workers()) });
    let for_tokens = Arc::clone(&app);
    let tokens = tokio::spawn(async move { for_tokens.tickets.tokens_of_day().await });
    let (of_database, of_streams, tokens) = tokio::join!(
        timeout(DEPENDENCY_TIMEOUT, reading),
        async {
            match with_topics {
                true => timeout(DEPENDENCY_TIMEOUT, sum_topics(operations.queue())).await,
                false => Ok(Ok(OverviewTopics::default())),
            }
        },
        timeout(DEPENDENCY_TIMEOUT, tokens)
    );
    let tokens = match tokens {
        Ok(Ok(Ok(used))) => Some(OverviewTokens {
            used: used.iter().map(|(_, tokens)| tokens).sum(),
            most_used: used.iter().map(|(_, tokens)| *tokens).max().unwrap_or(0),
            max: app.settings.desk.budget.day_tokens_max,
        }),
        _ => None,
    };
    let late = || format!("no answer within {} s", DEPENDENCY_TIMEOUT.as_secs());
    let of_database = match of_database {
        Ok(Ok(Ok(read))) => Ok(read),
        // Details may name servers, and this route needs only the role `read`.
        Ok(Ok(Err(_))) => Err("does not answer".to_owned()),
        Ok(Err(_)) => Err("internal error; see the server log".to_owned()),
        Err(_) => Err(late()),
    };
    let of_streams = match of_streams {
        Ok(Ok(topics)) => Ok(topics),
        Ok(Err(_)) => Err("does not answer".to_owned()),
        Err(_) => Err(late()),
    };
    let shown = app.settings.database_shown();
    let kinds = [
        shown.split(':').next().unwrap_or_default().to_owned(),
        app.streams.describe().kind.to_string(),
    ];
    let tokens = tokens.filter(|_| of_database.is_ok());
    let mut found = OverviewResponse { tokens, ..summarize(of_database, of_streams, kinds) };
    if !with_topics {
        found.topics = None;
        found.dependencies.retain(|dependency| dependency.name != STREAMS);
    }
    Ok(Json(found))
}

async fn sum_topics(queue: &Queue) -> Result<OverviewTopics, QueueError> {
    let until = Instant::now() + TOPICS_TIMEOUT;
    let mut names = queue.topics().list().await?;
    names.sort();
    let is_all = names.len() <= TOPICS_MAX;
    let count = names.len() as u64;
    let unread = || OverviewTopics { unread: 1, ..OverviewTopics::default() };
    let one = |name: String| async move {
        let inspect = queue.inspect();
        let reading = async { tokio::try_join!(inspect.topic(&name), inspect.groups(&name)) };
        let Ok(read) = timeout_at(until, reading).await else { return Ok(unread()) };
        match read {
            Ok((view, groups)) => Ok(OverviewTopics {
                length: view.length,
                delayed: view.delayed,
                dead_letters: view.dead_letters,
                lag: groups.iter().filter_map(|group| group.lag).sum(),
                ..OverviewTopics::default()
            }),
            // Deleted in the meantime.
            Err(QueueError::NoTopic { .. }) => Ok(OverviewTopics::default()),
            Err(error) if error.is_transient() => Ok(unread()),
            Err(error) => Err(error),
        }
    };
    let reads = names.into_iter().take(TOPICS_MAX).map(one).collect();
    let mut sum = OverviewTopics { count, ..OverviewTopics::default() };
    for topic in read_each(TOPICS_AT_ONCE, reads).await {
        let topic = topic?;
        sum.unread += topic.unread;
        sum.length += topic.length;
        sum.delayed += topic.delayed;
        sum.dead_letters += topic.dead_letters;
        sum.lag += topic.lag;
    }
    sum.complete = is_all && sum.unread == 0;
    Ok(sum)
}

/// What follows from the facts.
fn summarize(
    of_database: Result<(Backlog, Vec<WorkerInfo>), String>,
    of_streams: Result<OverviewTopics, String>,
    [database, streams]: [String; 2],
) -> OverviewResponse {
    let mut problems = Vec::new();
    let mut found =
        |level, code, sentence: String| problems.push(OverviewProblem { level, code, sentence });
    if let Err(reason) = &of_database {
        found(
            "error",
            "database_unavailable",
            format!("The database {reason}: no event is accepted or processed."),
        );
    }
    if let Err(reason) = &of_streams {
        let sentence = format!(
            "The stream backend {reason}: topics stop; issues are found by the sweep, some seconds later."
        );
        found("error", "streams_unavailable", sentence);
    }
    let unread = of_streams.as_ref().map_or(0, |topics| topics.unread);
    if unread > 0 {
        found(
            "error",
            "topics_unavailable",
            sentence(
                unread,
                "topic is",
                "topics are",
                "on a server of the stream backend that does not answer: messages wait until it is back.",
            ),
        );
    }
    let now = SystemClock.now();
    let read = of_database.as_ref().ok();
    let workers = read.map(|(_, workers)| {
        let alive = workers.iter().filter(|worker| worker.expires_at > now);
        OverviewWorkers {
            claims: alive.clone().map(|worker| worker.claims).sum(),
            alive: alive.count() as u64,
        }
    });
    if workers.as_ref().is_some_and(|workers| workers.alive == 0) {
        found("error", "no_worker", "No worker is alive, so no issue is processed: start `headwater worker` or `headwater serve`.".to_owned());
    }
    if let Some((backlog, _)) = read {
        if backlog.quarantined > 0 {
            found(
                "warning",
                "quarantined",
                sentence(
                    backlog.quarantined,
                    "issue is",
                    "issues are",
                    "quarantined after repeated failures: fix the cause, then release.",
                ),
            );
        }
        if backlog.outbox_dead > 0 {
            found(
                "warning",
                "dead_replies",
                sentence(
                    backlog.outbox_dead,
                    "reply was",
                    "replies were",
                    "given up after the last attempt: fix the receiver, then retry.",
                ),
            );
        }
        if backlog.outbox_lag > OUTBOX_LAG_MAX {
            let waited = backlog.outbox_lag.as_secs();
            found(
                "warning",
                "outbox_lag",
                format!(
                    "The oldest reply has waited for {waited} s: its receiver is slow or refuses it."
                ),
            );
        }
    }
    let dead_letters = of_streams.as_ref().map_or(0, |topics| topics.dead_letters);
    if dead_letters > 0 {
        found(
            "warning",
            "dead_letters",
            sentence(
                dead_letters,
                "dead letter waits",
                "dead letters wait",
                "for a decision: replay or purge.",
            ),
        );
    }
    let errors = problems.iter().filter(|problem| problem.level == "error").count();
    let (status, verdict) = match (errors, problems.len()) {
        (0, 0) => ("ok", "All is well.".to_owned()),
        (0, 1) => ("warning", "Work goes on; one thing needs a look.".to_owned()),
        (0, count) => ("warning", format!("Work goes on; {count} things need a look.")),
        (1, _) => ("error", "Work has stopped in part: one thing must be fixed.".to_owned()),
        (count, _) => ("error", format!("Work has stopped in part: {count} things must be fixed.")),
    };
    let dependency = |name, kind, problem: Option<&String>| OverviewDependency {
        name,
        kind,
        ok: problem.is_none(),
        reason: problem.cloned(),
    };
    OverviewResponse {
        status,
        verdict,
        dependencies: vec![
            dependency("Database", database, of_database.as_ref().err()),
            dependency(STREAMS, streams, of_streams.as_ref().err()),
        ],
        issues: read.map(|(backlog, _)| OverviewIssues {
            queued: backlog.queued,
            processing: backlog.processing,
            quarantined: backlog.quarantined,
            oldest_wait_ms: milliseconds(backlog.oldest_wait),
            oldest_wait_or_more: backlog.queued > OLDEST_WAIT_ISSUES as u64,
        }),
        outbox: read.map(|(backlog, _)| OverviewOutbox {
            pending: backlog.outbox_pending,
            dead: backlog.outbox_dead,
            lag_ms: milliseconds(backlog.outbox_lag),
        }),
        workers,
        topics: of_streams.ok(),
        tokens: None,
        problems,
    }
}

fn sentence(count: u64, one: &str, many: &str, rest: &str) -> String {
    format!("{count} {} {rest}", if count == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backlog(quarantined: u64, outbox_dead: u64) -> Backlog {
        Backlog { quarantined, outbox_dead, ..Backlog::default() }
    }

    fn worker() -> WorkerInfo {
        let now = SystemClock.now();
        let expires_at = headwater_stream::clock::Timestamp::from_millis(now.as_millis() + 60_000);
        WorkerInfo { worker: "a".to_owned(), started_at: now, seen_at: now, expires_at, claims: 2 }
    }

    fn kinds() -> [String; 2] {
        ["sqlite".to_owned(), "embedded".to_owned()]
    }

    #[test]
    fn all_is_well_without_problems_and_each_problem_is_named() {
        let topics = || Ok(OverviewTopics { complete: true, ..OverviewTopics::default() });
        let well = summarize(Ok((backlog(0, 0), vec![worker()])), topics(), kinds());
        assert_eq!((well.status, &*well.verdict), ("ok", "All is well."));
        assert_eq!(well.workers.unwrap().claims, 2);
        let oldest_wait = Duration::from_secs(90);
        let busy = Backlog { queued: 10_001, oldest_wait, ..Backlog::default() };
        let issues = summarize(Ok((busy, vec![worker()])), topics(), kinds()).issues.unwrap();
        assert_eq!((issues.oldest_wait_ms, issues.oldest_wait_or_more), (90_000, true));

        let dead = Ok(OverviewTopics { dead_letters: 3, ..OverviewTopics::default() });
        let found = summarize(Ok((backlog(1, 2), Vec::new())), dead, kinds());
        let codes: Vec<_> = found.problems.iter().map(|problem| problem.code).collect();
        assert_eq!(codes, ["no_worker", "quarantined", "dead_replies", "dead_letters"]);
        assert_eq!(found.status, "error");
        assert!(found.problems[1].sentence.starts_with("1 issue is quarantined"));
        assert!(found.problems[3].sentence.starts_with("3 dead letters wait"));

        let unread = Ok(OverviewTopics { unread: 1, ..OverviewTopics::default() });
        let found = summarize(Ok((backlog(0, 0), vec![worker()])), unread, kinds());
        assert_eq!((found.problems[0].code, found.status), ("topics_unavailable", "error"));
        assert!(found.problems[0].sentence.starts_with("1 topic is on a server"));
    }

    #[test]
    fn what_cannot_be_read_is_null_and_its_dependency_is_unavailable() {
        let found = summarize(
            Err("does not answer".to_owned()),
            Err("no answer within 2 s".to_owned()),
            kinds(),
        );
        let json = serde_json::to_value(&found).unwrap();
        for part in ["issues", "outbox", "workers", "topics"] {
            assert!(json[part].is_null(), "{part}");
        }
        assert!(found.dependencies.iter().all(|dependency| !dependency.ok));
        assert_eq!(found.problems.len(), 2, "a database that is down says nothing about workers");
    }
}
