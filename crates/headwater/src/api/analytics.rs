//! Reports, SQL queries and the rebuild of analytics, below `/api/v1`.
//!
//! Upstream: `http/router.rs`. Downstream: `analytics`. Guarantees: queries require the role `read` and are read-only;
//! a rebuild requires `admin`.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use headwater_analytics::{Chart, REPORTS, Table, report, svg};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::analytics::{self, Analytics, RebuildProgress};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::extract::{PathParams, QueryParams};
use crate::text;

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

/// A query result, and whether it can be drawn.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SqlResponse {
    #[serde(flatten)]
    table: TableResponse,
    /// Whether `format=svg` draws it: one column has texts or times, and one to six have numbers.
    has_chart: bool,
}

/// Format of a report or query result.
#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TableFormat {
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
    format: TableFormat,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SqlQuery {
    /// One `SELECT` in the DuckDB dialect.
    query: String,
    /// Output format, `json` by default. `svg` needs a result with one column of texts or times and one to six columns of numbers.
    #[serde(default)]
    #[param(inline)]
    format: TableFormat,
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
    Ok(match query.format {
        TableFormat::Json => Json(TableResponse::from(table)).into_response(),
        TableFormat::Csv => csv(&table),
        TableFormat::Svg => image(svg(report.title, &report.chart, &table)),
    })
}

fn csv(table: &Table) -> Response {
    ([(header::CONTENT_TYPE, "text/csv; charset=utf-8")], table.to_csv()).into_response()
}

fn image(svg: String) -> Response {
    ([(header::CONTENT_TYPE, "image/svg+xml")], svg).into_response()
}

/// Run an SQL query.
#[utoipa::path(get, path = "/sql", tag = "analytics", params(SqlQuery),
    responses((status = 200, body = SqlResponse), (status = 400, description = "Not a single SELECT, the query failed, or its result has no chart"),
        (status = 501, description = "Analytics is disabled or not built in"), (status = 503, description = "The DuckDB file is not open yet"),
        (status = 504, description = "The query timed out")))]
async fn query_sql(
    State(analytics): State<Analytics>,
    QueryParams(query): QueryParams<SqlQuery>,
) -> Result<Response, ApiError> {
    let table = analytics.query(&query.query).await?;
    Ok(match query.format {
        TableFormat::Json => {
            let has_chart = ChartColumns::of(&table).is_some();
            Json(SqlResponse { table: table.into(), has_chart }).into_response()
        }
        TableFormat::Csv => csv(&table),
        TableFormat::Svg => {
            let columns = ChartColumns::of(&table).ok_or_else(|| {
                ApiError::invalid(
                    "the result has no chart: it needs one column of texts or times, and one to six columns of numbers",
                )
            })?;
            image(columns.draw(&table))
        }
    })
}

/// Columns of numbers that a chart of a query shows at most.
const BARS_MAX: usize = 6;

/// Maximum bytes of the title of a chart of a query.
const TITLE_BYTES_MAX: usize = 120;

/// The columns of a query result that a chart shows.
#[derive(Debug, PartialEq, Eq)]
struct ChartColumns {
    /// Texts or times.
    label: usize,
    /// Numbers.
    bars: Vec<usize>,
}

impl ChartColumns {
    /// `None` if the result is not one column of texts or times and one to six of numbers.
    fn of(table: &Table) -> Option<Self> {
        let (mut labels, mut bars) = (Vec::new(), Vec::new());
        for column in 0..table.columns.len() {
            let mut values = table.rows.iter().map(|row| &row[column]);
            let mut known = values.clone().filter(|value| !value.is_null());
            match known.next()? {
                Value::String(_) if values.all(|value| value.is_string() || value.is_null()) => {
                    labels.push(column);
                }
                Value::Number(_) if values.all(|value| value.is_number() || value.is_null()) => {
                    bars.push(column);
                }
                _ => return None,
            }
        }
        let is_drawable = labels.len() == 1 && (1..=BARS_MAX).contains(&bars.len());
        is_drawable.then(|| Self { label: labels[0], bars })
    }

    /// Bars as in reports.
    fn draw(&self, table: &Table) -> String {
        let bars: Vec<&str> =
            self.bars.iter().map(|column| table.columns[*column].as_str()).collect();
        let label = table.columns[self.label].as_str();
        let title = text::one_line(&format!("{} by {label}", bars.join(", ")), TITLE_BYTES_MAX);
        svg(&title, &Chart { label, bars: &bars }, table)
    }
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table(columns: &[&str], rows: &[Value]) -> Table {
        let row = |row: &Value| row.as_array().cloned().unwrap_or_default();
        Table {
            columns: columns.iter().map(|name| (*name).to_owned()).collect(),
            rows: rows.iter().map(row).collect(),
            truncated: false,
        }
    }

    #[test]
    fn a_result_with_one_label_and_up_to_six_numbers_has_a_chart() {
        let drawn =
            table(&["n", "day"], &[json!([5, "mon"]), json!([null, null]), json!([2, "tue"])]);
        assert_eq!(ChartColumns::of(&drawn), Some(ChartColumns { label: 1, bars: vec![0] }));
        let wide = [json!(["a", 1, 2, 3, 4, 5, 6.5])];
        let names = ["who", "a", "b", "c", "d", "e", "f"];
        assert!(ChartColumns::of(&table(&names, &wide)).is_some());
        for (columns, rows) in [
            (&["n"][..], vec![json!([1])]),
            (&["a", "b"], vec![json!(["x", "y"])]),
            (&["a", "b", "n"], vec![json!(["x", "y", 1])]),
            (&["a", "n"], vec![]),
            (&["a", "n"], vec![json!(["x", null])]),
            (&["a", "n"], vec![json!(["x", 1]), json!(["y", "Infinity"])]),
            (&["a", "n", "is"], vec![json!(["x", 1, true])]),
            (
                &["a", "n1", "n2", "n3", "n4", "n5", "n6", "n7"],
                vec![json!(["x", 1, 2, 3, 4, 5, 6, 7])],
            ),
        ] {
            assert_eq!(ChartColumns::of(&table(columns, &rows)), None, "{columns:?} {rows:?}");
        }
    }

    #[test]
    fn a_chart_names_the_columns_of_the_query() {
        let drawn = table(&["in", "who", "<out>"], &[json!([5, "ann", 2.5])]);
        let svg = ChartColumns::of(&drawn).map(|columns| columns.draw(&drawn)).unwrap_or_default();
        assert!(svg.contains("<title>in, &lt;out&gt; by who</title>"), "{svg}");
        // The scale ends at 5: the second bar is half as high.
        for part in ["height=\"248.0\"", "height=\"124.0\"", ">ann<"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
    }
}
