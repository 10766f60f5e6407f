//! Reports, SQL queries and the rebuild of analytics, below `/api/v1`.
//!
//! Upstream: `http/router.rs`. Downstream: `analytics`. Guarantees: queries require the role `read` and are read-only;
//! a rebuild requires `admin`.

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

use crate::analytics::{self, Analytics, RebuildProgress};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::JsonResult;
use crate::http::extract::{PathParams, QueryParams};

/// The routes with their descriptions.
pub(crate) fn routes() -> OpenApiRouter<Analytics> {
    OpenApiRouter::new()
        .routes(routes!(reports))
        .routes(routes!(show_report))
        .routes(routes!(query_sql))
        .routes(routes!(status))
        .routes(routes!(rebuild))
}

/// The built-in reports.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReportListResponse {
    reports: Vec<ReportDto>,
}

/// A built-in report.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReportDto {
    name: &'static str,
    /// What it shows.
    title: &'static str,
}

/// A query result.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TableResponse {
    columns: Vec<String>,
    /// One value for each column.
    #[schema(value_type = Vec<Vec<Object>>)]
    rows: Vec<Vec<Value>>,
    /// Whether rows were left out because of the row limit.
    is_cut: bool,
}

impl From<Table> for TableResponse {
    fn from(table: Table) -> Self {
        Self { columns: table.columns, rows: table.rows, is_cut: table.truncated }
    }
}

/// Format of a report.
#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ReportFormat {
    /// Columns and rows.
    #[default]
    Json,
    /// CSV with a header line.
    Csv,
    /// A chart.
    Svg,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ReportQuery {
    /// Output format, `json` by default.
    #[serde(default)]
    #[param(inline)]
    format: ReportFormat,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SqlQuery {
    /// One `SELECT` in the DuckDB dialect.
    query: String,
}

/// State of analytics.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AnalyticsResponse {
    #[serde(flatten)]
    state: analytics::AnalyticsState,
    /// The latest rebuild since the server started.
    rebuild: RebuildProgress,
}

/// List the built-in reports.
#[utoipa::path(get, path = "/reports", tag = "analytics", responses((status = 200, body = ReportListResponse)))]
async fn reports() -> Json<ReportListResponse> {
    let to_dto =
        |report: &headwater_analytics::Report| ReportDto { name: report.name, title: report.title };
    Json(ReportListResponse { reports: REPORTS.iter().map(to_dto).collect() })
}

/// Run a built-in report.
#[utoipa::path(get, path = "/reports/{name}", tag = "analytics", params(("name" = String, Path), ReportQuery),
    responses((status = 200, body = TableResponse), (status = 404), (status = 501, description = "Analytics is disabled or not built in"),
        (status = 503, description = "The DuckDB file is not open yet")))]
async fn show_report(
    State(analytics): State<Analytics>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<ReportQuery>,
) -> Result<Response, ApiError> {
    let report = report(&name).map_err(|error| ApiError::not_found(error.to_string()))?;
    let table = analytics.report(report).await?;
    let with =
        |kind: &'static str, text: String| ([(header::CONTENT_TYPE, kind)], text).into_response();
    Ok(match query.format {
        ReportFormat::Json => Json(TableResponse::from(table)).into_response(),
        ReportFormat::Csv => with("text/csv; charset=utf-8", table.to_csv()),
        ReportFormat::Svg => with("image/svg+xml", svg(report.title, &report.chart, &table)),
    })
}

/// Run an SQL query.
#[utoipa::path(get, path = "/sql", tag = "analytics", params(SqlQuery),
    responses((status = 200, body = TableResponse), (status = 400, description = "Not a single SELECT, or the query failed"),
        (status = 501, description = "Analytics is disabled or not built in"), (status = 503, description = "The DuckDB file is not open yet"),
        (status = 504, description = "The query timed out")))]
async fn query_sql(
    State(analytics): State<Analytics>,
    QueryParams(query): QueryParams<SqlQuery>,
) -> JsonResult<TableResponse> {
    Ok(Json(analytics.query(&query.query).await?.into()))
}

/// Show the state of analytics and its latest rebuild. Reasons are included only for the role `admin`.
#[utoipa::path(get, path = "/analytics", tag = "analytics", responses((status = 200, body = AnalyticsResponse)))]
async fn status(
    State(analytics): State<Analytics>,
    principal: Principal,
) -> Json<AnalyticsResponse> {
    let (state, rebuild) = (analytics.state(), analytics.rebuild_progress());
    Json(match principal.require_role(Role::Admin) {
        Ok(()) => AnalyticsResponse { state, rebuild },
        Err(_) => {
            AnalyticsResponse { state: state.without_reason(), rebuild: rebuild.without_reason() }
        }
    })
}

/// Start to replace all events in the DuckDB file by those of the database; `GET /analytics` shows the progress.
#[utoipa::path(post, path = "/analytics/rebuild", tag = "analytics",
    responses((status = 202, body = RebuildProgress), (status = 409, description = "A rebuild is in progress"),
        (status = 501, description = "Analytics is disabled or not built in"), (status = 503, description = "The DuckDB file is not open yet")))]
async fn rebuild(
    State(analytics): State<Analytics>,
    principal: Principal,
) -> Result<Response, ApiError> {
    principal.require_role(Role::Admin)?;
    let begun = analytics.rebuild()?;
    Ok((StatusCode::ACCEPTED, Json(begun)).into_response())
}
