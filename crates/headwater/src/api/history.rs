//! How metrics changed: `GET /history`, for the charts of the console and `headwater history`.
//!
//! Upstream: the console and the command line. Downstream: `telemetry/history`; of one topic, `telemetry/history/topics.rs`. Guarantees: read-only; at most [`POINTS_MAX`]
//! points; a step that has not ended, or without samples, has no point; without the database it answers what this process knows, and
//! says so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::dto::{milliseconds, time};
use crate::api::names::{shown_group, shown_topic, wire_group};
use crate::config;
use crate::http::ApiError;
use crate::http::body::JsonResult;
use crate::http::extract::QueryParams;
use crate::server::app_state::App;
use crate::server::plans;
use crate::telemetry::history::series::{all_series, bounds_ms};
use crate::telemetry::history::topics::{GROUPS_MAX, GroupRebalance, TopicHistory, TopicPoint};
use crate::telemetry::history::{HistoryPoint, HistoryRange, SAMPLE_EVERY};

/// Maximum points of a response.
const POINTS_MAX: u64 = 500;

/// Maximum replay plans of a response, the newest; and the time to read them.
const PLAN_MARKS_MAX: usize = 50;
const PLAN_MARKS_TIME_MAX: Duration = Duration::from_millis(500);

/// Maximum rebalances of a response, the newest.
const REBALANCE_MARKS_MAX: usize = 50;

/// Points that the default step aims at.
const POINTS_DEFAULT: u64 = 120;

/// Length of the default range.
const RANGE_DEFAULT: Duration = Duration::from_secs(3600);

/// Default steps, in minutes.
const STEPS_MIN: [u64; 8] = [1, 5, 10, 30, 60, 180, 360, 1440];

/// Longest step.
const STEP_MAX: Duration = Duration::from_secs(24 * 3600);

/// A step ends this much later for readers: by then processes have stored their minute.
const SETTLED_MS: u64 = 2_000;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(history))
}

/// Which part of the history.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct HistoryQuery {
    /// Names, separated by commas. Default: all.
    series: Option<String>,
    /// Only this topic: messages added and settled, and the lag of each group, in the last hour as the answering process measured
    /// them. The 50 busiest topics have such a history. Not with `series`.
    topic: Option<String>,
    /// With `topic`: only this group.
    group: Option<String>,
    /// Begin, such as `2026-11-15T10:00:00Z`. Default: one hour before `to`.
    from: Option<String>,
    /// End. Default: now.
    to: Option<String>,
    /// Length of a step: a multiple of `10s`, at most `24h`. Multiples of `1m` include all processes; others only the
    /// last hour of the answering one. Default: `1m`, or more for a long range.
    step: Option<String>,
}

/// A part of the history of metrics.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HistoryResponse {
    /// Begin of the first step.
    from: String,
    /// End of the last step.
    to: String,
    step_ms: u64,
    /// `all` processes, or only the answering `process`.
    scope: &'static str,
    /// What is missing, and why.
    problem: Option<&'static str>,
    series: Vec<HistorySeriesDto>,
    /// Oldest first. A step without samples is absent.
    points: Vec<HistoryPointDto>,
    marks: Vec<HistoryMarkDto>,
}

/// A series of values.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HistorySeriesDto {
    name: String,
    meaning: String,
    /// Upper bounds in milliseconds, if each value is a list of counts: one for each bound, and one for what took longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    bounds_ms: Option<Vec<f64>>,
}

/// The values of a step.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HistoryPointDto {
    /// Begin of the step.
    at: String,
    /// How much of the step was sampled.
    covered_ms: u64,
    /// Number of processes.
    processes: usize,
    /// By name of the series. Counts are sums over the step, sizes the largest value in it; `null` if it is unknown.
    values: BTreeMap<String, Value>,
}

/// Something that happened.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct HistoryMarkDto {
    at: String,
    /// `started`: a process started. `plan`: a replay plan was made. `rebalance`: partitions of a group have new owners, as the
    /// answering process noticed in the last hour.
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    /// Id of the replay plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<i64>,
    /// Of a rebalance, also the next two.
    #[serde(skip_serializing_if = "Option::is_none")]
    topic: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<String>,
    /// Number of partitions with a new owner.
    #[serde(skip_serializing_if = "Option::is_none")]
    partitions: Option<u64>,
}

/// Show how metrics changed: counts, sizes and latencies, in steps.
#[utoipa::path(get, path = "/history", tag = "console", params(HistoryQuery),
    responses((status = 200, body = HistoryResponse), (status = 400)))]
async fn history(
    State(app): State<App>,
    Extension(operations): Extension<Operations>,
    QueryParams(query): QueryParams<HistoryQuery>,
) -> JsonResult<HistoryResponse> {
    let range = range(&query, SystemClock.now())?;
    let topics = operations.topic_history();
    if let Some(topic) = query.topic {
        if query.series.is_some() {
            return Err(ApiError::invalid("`series` cannot be combined with `topic`"));
        }
        return Ok(Json(topic_response(topics, topic, query.group, range)));
    }
    if query.group.is_some() {
        return Err(ApiError::invalid("`group` requires `topic`"));
    }
    let series = selected(query.series.as_deref())?;
    let read = app.history.read(&app.store, range).await;
    let values = |point: &HistoryPoint| {
        let value = |one: &HistorySeriesDto| (one.name.clone(), point.sum.value(&one.name));
        series.iter().map(value).collect()
    };
    let points = read.points.iter().map(|(from, point)| HistoryPointDto {
        at: at(*from),
        covered_ms: milliseconds(point.covered()),
        processes: point.processes(),
        values: values(point),
    });
    let points = points.collect();
    let starts = read.starts.iter().map(|(process, start)| HistoryMarkDto {
        at: time(start.at),
        kind: "started",
        process: Some(process.clone()),
        version: Some(start.version.clone()),
        ..HistoryMarkDto::default()
    });
    let plans = match read.problem {
        None => plans_made(&app, range).await,
        Some(_) => Vec::new(),
    };
    let plans = plans.into_iter().map(|(id, created_at)| HistoryMarkDto {
        at: time(created_at),
        kind: "plan",
        plan: Some(id),
        ..HistoryMarkDto::default()
    });
    let marks = starts.chain(plans).chain(rebalance_marks(topics, range, |_| true)).collect();
    let scope = if range.is_of_all_processes() { "all" } else { "process" };
    Ok(Json(HistoryResponse::new(range, scope, read.problem, series, points, marks)))
}

fn at(ms: u64) -> String {
    time(Timestamp::from_millis(ms))
}

impl HistoryResponse {
    fn new(
        range: HistoryRange,
        scope: &'static str,
        problem: Option<&'static str>,
        series: Vec<HistorySeriesDto>,
        points: Vec<HistoryPointDto>,
        marks: Vec<HistoryMarkDto>,
    ) -> Self {
        let (from, to) = (at(range.from_ms), at(range.to_ms));
        Self { from, to, step_ms: range.step_ms, scope, problem, series, points, marks }
    }
}

/// The newest rebalances in this range.
fn rebalance_marks(
    topics: &TopicHistory,
    range: HistoryRange,
    is_wanted: impl Fn(&GroupRebalance) -> bool,
) -> Vec<HistoryMarkDto> {
    let mut found = topics.rebalances(range);
    found.retain(|one| is_wanted(one));
    let newest = found.split_off(found.len().saturating_sub(REBALANCE_MARKS_MAX));
    let mark = |one: GroupRebalance| HistoryMarkDto {
        at: time(one.at),
        kind: "rebalance",
        group: Some(shown_group(&one.topic, &one.group).into_owned()),
        topic: Some(shown_topic(&one.topic).into_owned()),
        partitions: Some(one.partitions),
        ..HistoryMarkDto::default()
    };
    newest.into_iter().map(mark).collect()
}

/// The history of a topic or of one of its groups.
fn topic_response(
    topics: &TopicHistory,
    topic: String,
    group: Option<String>,
    range: HistoryRange,
) -> HistoryResponse {
    let is_of_group = group.is_some();
    let (topic, group) = wire_group((topic, group.unwrap_or_default()));
    let marks = rebalance_marks(topics, range, |one| {
        one.topic == topic && (!is_of_group || one.group == group)
    });
    let points = topics.points(&topic, range);
    let problem = points.is_none().then_some(
        "the topic is not among the 50 busiest, or this process has not measured it yet",
    );
    let points = points.unwrap_or_default();
    let lag_name = |group: &str| format!("lag:{}", shown_group(&topic, group));
    let groups = match is_of_group {
        true => Vec::new(),
        false => most_behind(&points),
    };
    let series = |name: &str, meaning: &str| HistorySeriesDto {
        name: name.to_owned(),
        meaning: meaning.to_owned(),
        bounds_ms: None,
    };
    let mut all = vec![
        series("added", "messages added to the topic"),
        series("settled", "messages settled, or skipped by a reset"),
    ];
    if is_of_group {
        all.push(series("lag", "messages not delivered yet"));
        all.push(series("pending", "messages delivered and not settled"));
    }
    let lags = groups.iter().map(|group| series(&lag_name(group), "messages not delivered yet"));
    all.extend(lags);
    let values = |point: &TopicPoint| {
        let mut values = BTreeMap::from([("added".to_owned(), Value::from(point.added))]);
        if is_of_group {
            let of_group = point.groups.get(&group);
            values.insert("settled".to_owned(), of_group.and_then(|group| group.settled).into());
            values.insert("lag".to_owned(), of_group.and_then(|group| group.lag).into());
            values.insert("pending".to_owned(), of_group.map(|group| group.pending).into());
            return values;
        }
        let settled = point.groups.values().filter_map(|group| group.settled);
        values.insert("settled".to_owned(), settled.reduce(u64::saturating_add).into());
        for group in &groups {
            let lag = point.groups.get(group).and_then(|group| group.lag);
            values.insert(lag_name(group), lag.into());
        }
        values
    };
    let points = points.iter().map(|(from, point)| HistoryPointDto {
        at: at(*from),
        covered_ms: milliseconds(SAMPLE_EVERY) * point.samples,
        processes: 1,
        values: values(point),
    });
    HistoryResponse::new(range, "process", problem, all, points.collect(), marks)
}

/// The groups of a topic with the largest lags, by name.
fn most_behind(points: &BTreeMap<u64, TopicPoint>) -> Vec<String> {
    let mut lags: BTreeMap<&String, u64> = BTreeMap::new();
    for (name, group) in points.values().flat_map(|point| &point.groups) {
        let largest = lags.entry(name).or_default();
        *largest = (*largest).max(group.lag.unwrap_or(0));
    }
    let mut groups: Vec<_> = lags.into_iter().collect();
    groups.sort_by_key(|(name, lag)| (std::cmp::Reverse(*lag), *name));
    groups.truncate(GROUPS_MAX);
    let mut names: Vec<_> = groups.into_iter().map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}

/// Plans made in this range; none if the database does not answer soon. On a task of its own: a query is not dropped
/// half-way.
async fn plans_made(app: &App, range: HistoryRange) -> Vec<(i64, Timestamp)> {
    let (store, made) = (Arc::clone(&app.store), (range.from_ms, range.to_ms));
    let reading = tokio::spawn(async move {
        plans::rows::created_between(store.as_ref(), made, PLAN_MARKS_MAX).await
    });
    let read = timeout(PLAN_MARKS_TIME_MAX, reading).await;
    read.ok().and_then(Result::ok).and_then(Result::ok).unwrap_or_default()
}

/// The series of these names, in the order of the names.
fn selected(names: Option<&str>) -> Result<Vec<HistorySeriesDto>, ApiError> {
    let known = || {
        all_series().map(|(name, meaning)| HistorySeriesDto {
            name: name.to_owned(),
            meaning: meaning.to_owned(),
            bounds_ms: bounds_ms(name),
        })
    };
    let Some(names) = names else { return Ok(known().collect()) };
    let find = |name: &str| {
        known().find(|one| one.name == name.trim()).ok_or_else(|| {
            let all: Vec<_> = known().map(|one| one.name).collect();
            let name: String = name.chars().take(60).collect();
            ApiError::invalid(format!("unknown series `{name}`; known are {}", all.join(", ")))
        })
    };
    // More names than there are series can only be repetitions.
    let mut series: Vec<HistorySeriesDto> = Vec::new();
    for name in names.split(',') {
        let found = find(name)?;
        if series.iter().all(|one| one.name != found.name) {
            series.push(found);
        }
    }
    Ok(series)
}

fn range(query: &HistoryQuery, now: Timestamp) -> Result<HistoryRange, ApiError> {
    let at = |what: &str, text: &Option<String>| {
        let parse = |text: &String| {
            Timestamp::from_rfc3339(text).ok_or_else(|| {
                let text: String = text.chars().take(60).collect();
                ApiError::invalid(format!(
                    "invalid `{what}` = `{text}`; expected a time such as 2026-11-15T10:00:00Z"
                ))
            })
        };
        text.as_ref().map(parse).transpose()
    };
    let to = at("to", &query.to)?.unwrap_or(now).min(now);
    let from = at("from", &query.from)?.unwrap_or_else(|| to.before(RANGE_DEFAULT));
    if from >= to {
        return Err(ApiError::invalid("`from` must be before `to`, and in the past"));
    }
    let length = milliseconds(to.since(from));
    let sample_ms = milliseconds(SAMPLE_EVERY);
    let step_ms = match &query.step {
        None => {
            let fits = |step: &u64| length / (step * 60_000) <= POINTS_DEFAULT;
            STEPS_MIN.into_iter().find(fits).unwrap_or(STEPS_MIN[STEPS_MIN.len() - 1]) * 60_000
        }
        Some(text) => {
            let step = config::time(text).filter(|step| *step <= STEP_MAX).map(milliseconds);
            let is_whole = |step: &u64| *step > 0 && step.is_multiple_of(sample_ms);
            step.filter(is_whole).ok_or_else(|| {
                let text: String = text.chars().take(60).collect();
                ApiError::invalid(format!(
                    "invalid `step` = `{text}`; expected a multiple of 10s up to 24h, such as 1m"
                ))
            })?
        }
    };
    let points = length.div_ceil(step_ms);
    if points > POINTS_MAX {
        return Err(ApiError::invalid(format!(
            "the range has {points} steps, at most {POINTS_MAX} are allowed; raise `step`"
        )));
    }
    let align = |ms: u64| ms - ms % step_ms;
    let ended = align(now.as_millis().saturating_sub(SETTLED_MS));
    let to_ms = align(to.as_millis()).min(ended);
    let from_ms = align(from.as_millis()).min(to_ms);
    Ok(HistoryRange { from_ms, to_ms, step_ms })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(from: Option<&str>, to: Option<&str>, step: Option<&str>) -> HistoryQuery {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let (from, to, step) = (owned(from), owned(to), owned(step));
        HistoryQuery { series: None, topic: None, group: None, from, to, step }
    }

    fn now() -> Timestamp {
        Timestamp::from_rfc3339("2026-11-15T12:00:31Z").unwrap()
    }

    fn shown(query: &HistoryQuery) -> (String, String, u64) {
        let range = range(query, now()).unwrap();
        let at = |ms| time(Timestamp::from_millis(ms))[11..19].to_owned();
        (at(range.from_ms), at(range.to_ms), range.step_ms / 1000)
    }

    #[test]
    fn only_steps_that_have_ended_are_read() {
        let of = |from: &str, to: &str, step| (from.to_owned(), to.to_owned(), step);
        assert_eq!(shown(&query(None, None, None)), of("11:00:00", "12:00:00", 60));
        assert_eq!(shown(&query(None, None, Some("10s"))), of("11:00:30", "12:00:20", 10));
        let day = query(Some("2026-11-13T12:00:00Z"), None, None);
        assert_eq!(shown(&day), of("12:00:00", "12:00:00", 1800));
        let future = query(None, Some("2030-01-01T00:00:00Z"), None);
        assert_eq!(shown(&future), of("11:00:00", "12:00:00", 60));
    }

    #[test]
    fn invalid_ranges_and_series_are_refused_with_the_allowed_values() {
        for (query, part) in [
            (query(Some("yesterday"), None, None), "invalid `from`"),
            (query(None, Some("2026-11-15"), None), "invalid `to`"),
            (query(Some("2027-01-01T00:00:00Z"), None, None), "must be before"),
            (query(None, None, Some("7s")), "multiple of 10s"),
            (query(None, None, Some("0s")), "multiple of 10s"),
            (query(None, None, Some("48h")), "multiple of 10s"),
            (query(None, None, Some("often")), "multiple of 10s"),
            (query(Some("2026-11-15T00:00:00Z"), None, Some("10s")), "raise `step`"),
            (query(Some("1970-01-01T00:00:00Z"), None, None), "raise `step`"),
        ] {
            let error = range(&query, now()).unwrap_err();
            assert!(error.message().contains(part), "{}", error.message());
        }
        let error = selected(Some("events,nonsense")).unwrap_err();
        assert!(error.message().contains("known are events, runs"), "{}", error.message());
        let names: Vec<_> =
            selected(Some("runs, events,runs")).unwrap().into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["runs", "events"]);
    }
}
