//! How metrics changed: `GET /history`, for the charts of the console and `headwater history`.
//!
//! Upstream: the console and the command line. Downstream: `telemetry/history`. Guarantees: read-only; at most [`POINTS_MAX`]
//! points; a step that has not ended, or without samples, has no point; without the database it answers what this process knows, and
//! says so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{milliseconds, time};
use crate::config;
use crate::http::ApiError;
use crate::http::body::JsonResult;
use crate::http::extract::QueryParams;
use crate::server::app_state::App;
use crate::server::plans;
use crate::telemetry::history::series::all_series;
use crate::telemetry::history::{HistoryRange, SAMPLE_EVERY};

/// Maximum points of a response.
const POINTS_MAX: u64 = 500;

/// Maximum replay plans of a response, the newest; and the time to read them.
const PLAN_MARKS_MAX: usize = 50;
const PLAN_MARKS_TIME_MAX: Duration = Duration::from_millis(500);

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
    name: &'static str,
    meaning: &'static str,
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
    values: BTreeMap<&'static str, Value>,
}

/// Something that happened.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HistoryMarkDto {
    at: String,
    /// `started`: a process started. `plan`: a replay plan was made.
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    /// Id of the replay plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<i64>,
}

/// Show how metrics changed: counts, sizes and latencies, in steps.
#[utoipa::path(get, path = "/history", tag = "console", params(HistoryQuery),
    responses((status = 200, body = HistoryResponse), (status = 400)))]
async fn history(
    State(app): State<App>,
    QueryParams(query): QueryParams<HistoryQuery>,
) -> JsonResult<HistoryResponse> {
    let series = selected(query.series.as_deref())?;
    let range = range(&query, SystemClock.now())?;
    let read = app.history.read(&app.store, range).await;
    let at = |ms: u64| time(Timestamp::from_millis(ms));
    let points = read.points.iter().map(|(from, point)| HistoryPointDto {
        at: at(*from),
        covered_ms: milliseconds(point.covered()),
        processes: point.processes(),
        values: series.iter().map(|one| (one.name, point.sum.value(one.name))).collect(),
    });
    let starts = read.starts.iter().map(|(process, start)| HistoryMarkDto {
        at: time(start.at),
        kind: "started",
        process: Some(process.clone()),
        version: Some(start.version.clone()),
        plan: None,
    });
    let plans = match read.problem {
        None => plans_made(&app, range).await,
        Some(_) => Vec::new(),
    };
    let plans = plans.into_iter().map(|(id, created_at)| HistoryMarkDto {
        at: time(created_at),
        kind: "plan",
        process: None,
        version: None,
        plan: Some(id),
    });
    let marks = starts.chain(plans);
    Ok(Json(HistoryResponse {
        from: at(range.from_ms),
        to: at(range.to_ms),
        step_ms: range.step_ms,
        scope: if range.is_of_all_processes() { "all" } else { "process" },
        problem: read.problem,
        points: points.collect(),
        marks: marks.collect(),
        series,
    }))
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
    let known = || all_series().map(|(name, meaning)| HistorySeriesDto { name, meaning });
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
        HistoryQuery { series: None, from: owned(from), to: owned(to), step: owned(step) }
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
            selected(Some("runs, events,runs")).unwrap().iter().map(|one| one.name).collect();
        assert_eq!(names, ["runs", "events"]);
    }
}
