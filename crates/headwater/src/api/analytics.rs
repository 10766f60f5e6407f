//! Reports, SQL and the rebuild of analytics, as routes below `/api/v1`.
//!
//! Upstream: `router`. Downstream: `analytics`. Promises: asking takes the role `read`, rebuilding takes `admin`; a question
//! changes nothing, whatever it is.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use headwater_analytics::{REPORTS, Table, report, svg};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::analytics::{self, Analytics, Rebuilding};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Caller;
use crate::http::body::Answer;
use crate::http::extract::{PathOf, QueryOf};

/// The routes with their description.
pub(crate) fn routes() -> OpenApiRouter<Analytics> {
    OpenApiRouter::new()
        .routes(routes!(reports))
        .routes(routes!(show_report))
        .routes(routes!(ask))
        .routes(routes!(status))
        .routes(routes!(rebuild))
}

/// The questions that have names.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReportList {
    reports: Vec<ReportLine>,
}

/// A question that has a name.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReportLine {
    name: &'static str,
    /// What it answers.
    title: &'static str,
}

/// An answer: columns and rows.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TableView {
    columns: Vec<String>,
    /// A value for each column.
    #[schema(value_type = Vec<Vec<Object>>)]
    rows: Vec<Vec<Value>>,
    /// Whether there were more rows than an answer may have.
    is_cut: bool,
}

impl From<Table> for TableView {
    fn from(table: Table) -> Self {
        Self { columns: table.columns, rows: table.rows, is_cut: table.is_cut }
    }
}

/// How an answer looks.
#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Format {
    /// Columns and rows.
    #[default]
    Json,
    /// With a header line.
    Csv,
    /// A chart.
    Svg,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ReportQuery {
    /// `json` by default.
    #[serde(default)]
    #[param(inline)]
    format: Format,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SqlQuery {
    /// One `SELECT`, in the dialect of DuckDB.
    query: String,
}

/// How analytics stands.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AnalyticsView {
    #[serde(flatten)]
    state: analytics::State,
    /// The last rebuild since the server started.
    rebuild: Rebuilding,
}

/// Lists the reports.
#[utoipa::path(get, path = "/reports", tag = "analytics", responses((status = 200, body = ReportList)))]
async fn reports() -> Json<ReportList> {
    let line = |report: &headwater_analytics::Report| ReportLine {
        name: report.name,
        title: report.title,
    };
    Json(ReportList { reports: REPORTS.iter().map(line).collect() })
}

/// The answer to a report.
#[utoipa::path(get, path = "/reports/{name}", tag = "analytics", params(("name" = String, Path), ReportQuery),
    responses((status = 200, body = TableView), (status = 404), (status = 501, description = "Analytics is off, or not built in"),
        (status = 503, description = "The file is not open yet")))]
async fn show_report(
    State(analytics): State<Analytics>,
    PathOf(name): PathOf<String>,
    QueryOf(query): QueryOf<ReportQuery>,
) -> Result<Response, ApiError> {
    let report = report(&name).map_err(|error| ApiError::not_found(error.to_string()))?;
    let table = analytics.query(report.sql).await?;
    let with =
        |kind: &'static str, text: String| ([(header::CONTENT_TYPE, kind)], text).into_response();
    Ok(match query.format {
        Format::Json => Json(TableView::from(table)).into_response(),
        Format::Csv => with("text/csv; charset=utf-8", table.to_csv()),
        Format::Svg => with("image/svg+xml", svg(report.title, &report.chart, &table)),
    })
}

/// The answer to a question of your own.
#[utoipa::path(get, path = "/sql", tag = "analytics", params(SqlQuery),
    responses((status = 200, body = TableView), (status = 400, description = "Not one SELECT, or it cannot be answered"),
        (status = 501, description = "Analytics is off, or not built in"), (status = 503, description = "The file is not open yet"),
        (status = 504, description = "It took too long")))]
async fn ask(
    State(analytics): State<Analytics>,
    QueryOf(query): QueryOf<SqlQuery>,
) -> Answer<TableView> {
    Ok(Json(analytics.query(&query.query).await?.into()))
}

/// How analytics stands, and its last rebuild. Reasons are for the role `admin`; others are told that the log has them.
#[utoipa::path(get, path = "/analytics", tag = "analytics", responses((status = 200, body = AnalyticsView)))]
async fn status(State(analytics): State<Analytics>, caller: Caller) -> Json<AnalyticsView> {
    let (state, rebuild) = (analytics.state(), analytics.rebuilding());
    Json(match caller.must_be(Role::Admin) {
        Ok(()) => AnalyticsView { state, rebuild },
        Err(_) => {
            AnalyticsView { state: state.without_reason(), rebuild: rebuild.without_reason() }
        }
    })
}

/// Begins to replace all events in the DuckDB file by those of the database; `GET /analytics` says how far it is.
#[utoipa::path(post, path = "/analytics/rebuild", tag = "analytics",
    responses((status = 202, body = Rebuilding), (status = 409, description = "One is under way"),
        (status = 501, description = "Analytics is off, or not built in"), (status = 503, description = "The file is not open yet")))]
async fn rebuild(State(analytics): State<Analytics>, caller: Caller) -> Result<Response, ApiError> {
    caller.must_be(Role::Admin)?;
    let begun = analytics.rebuild()?;
    Ok((StatusCode::ACCEPTED, Json(begun)).into_response())
}
