//! Reports, SQL and Consistency.

use std::time::Duration;

use axum::extract::Path;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};
use serde_json::Value;
use tokio::time::Instant;

use crate::api_client::Problem;
use crate::components::{Tone, badge, banner, empty, excerpt, facts, id, problem, table};
use crate::screen::{Screen, ScreenContent};
use crate::text::{counted, encoded, field, items, number, plain, shell_word};

/// Rows of a result that are shown.
const RESULT_ROWS: usize = 1000;

/// Pages of issues that one request checks, the issues of each, those of each after a page took too long, and the time after which it
/// checks no further page.
const CHECKED_PAGES: usize = 20;
const CHECKED_ISSUES: usize = 1000;
const CHECKED_ISSUES_IF_SLOW: usize = 10;
const CHECKING_TIME_MAX: Duration = Duration::from_secs(15);

/// Says that analytics is not built in or disabled, which is not an error.
fn unavailable(what: &str, error: &Problem, screen: &Screen) -> Markup {
    if error.status == axum::http::StatusCode::NOT_IMPLEMENTED {
        return empty(&format!("{}.", error.message), None);
    }
    problem(what, error, screen)
}

pub(crate) async fn reports(screen: Screen) -> Response {
    let content = match screen.api.get("/reports").await {
        Err(error) => unavailable("The reports", &error, &screen),
        Ok(page) => html! {
            ul {
                @for report in items(&page, "reports") {
                    li { a href={ "/console/reports/" (encoded(field(report, "name"))) } { (field(report, "title")) } }
                }
            }
        },
    };
    screen.page(ScreenContent {
        title: "Reports".to_owned(),
        path: Vec::new(),
        command: "headwater report".to_owned(),
        content,
    })
}

pub(crate) async fn report(screen: Screen, Path(name): Path<String>) -> Response {
    let path = format!("/reports/{}", encoded(&name));
    let (result, all) = tokio::join!(screen.api.get(&path), screen.api.get("/reports"));
    let known = all.ok().and_then(|all| {
        items(&all, "reports").iter().find(|report| field(report, "name") == name).cloned()
    });
    let title = known.map_or_else(|| name.clone(), |report| field(&report, "title").to_owned());
    let content = match &result {
        Err(error) if error.is_not_found() => return screen.failed("Report", error),
        Err(error) => unavailable("The report", error, &screen),
        Ok(found) if items(found, "rows").is_empty() => empty("There is no data yet.", None),
        Ok(found) => html! {
            p { img.chart src={ "/console/reports/" (encoded(&name)) "/chart.svg" } alt={ "Chart; the table below has its data" }; }
            (result_table(&title, found))
            p { a.button href={ "/console/reports/" (encoded(&name)) "/data.csv" } download={ (name) ".csv" } { "Download CSV" } }
        },
    };
    screen.page(ScreenContent {
        title,
        path: vec![("Reports".to_owned(), "/console/reports".to_owned())],
        command: format!("headwater report {}", shell_word(&name)),
        content,
    })
}

/// The chart of a report, or its rows as CSV.
pub(crate) async fn report_file(
    screen: Screen,
    Path((name, file)): Path<(String, String)>,
) -> Response {
    let format = match file.as_str() {
        "chart.svg" => "svg",
        "data.csv" => "csv",
        _ => {
            let status = axum::http::StatusCode::NOT_FOUND;
            return screen
                .failed("File", &Problem::new(status, "not_found", "there is no such file"));
        }
    };
    let path = format!("/reports/{}?format={format}", encoded(&name));
    result_file(&screen, "Report", &path, format).await
}

/// A result as `csv` or `svg`.
async fn result_file(screen: &Screen, what: &str, path: &str, format: &str) -> Response {
    let kind = if format == "svg" { "image/svg+xml" } else { "text/csv; charset=utf-8" };
    match screen.api.get_text(path).await {
        Err(error) => screen.failed(what, &error),
        // An image cannot run scripts, opened as a page neither.
        Ok(text) => {
            let headers = [
                (header::CONTENT_TYPE, kind),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
                (header::CACHE_CONTROL, "no-store"),
                (
                    header::CONTENT_SECURITY_POLICY,
                    "default-src 'none'; style-src 'unsafe-inline'; sandbox",
                ),
            ];
            (headers, text).into_response()
        }
    }
}

fn result_table(label: &str, found: &Value) -> Markup {
    let columns: Vec<String> = items(found, "columns").iter().map(plain).collect();
    let head: Vec<&str> = columns.iter().map(String::as_str).collect();
    let rows = items(found, "rows");
    html! {
        (table(label, &head, &html! {
            @for row in rows.iter().take(RESULT_ROWS) {
                tr { @for value in row.as_array().map_or(&[][..], Vec::as_slice) { td { (excerpt(&plain(value))) } } }
            }
        }))
        p.quiet {
            (counted(rows.len() as u64, "row", "rows"))
            @if rows.len() > RESULT_ROWS || found["is_cut"] == true { "; further rows are not shown" } "."
        }
    }
}

/// The result of a query with its chart, if it has one.
fn sql_result(path: &str, found: &Value) -> Markup {
    let rows = items(found, "rows").len() as u64;
    html! {
        @if found["has_chart"] == true {
            p { img.chart src={ "/console" (path) "&format=svg" } alt="Chart; the table below has its data"; }
        }
        (result_table("Result", found))
        p {
            a.button href={ "/console" (path) "&format=csv" } download="result.csv" { "Download CSV" }
            @if found["is_cut"] == true { " " span.quiet { "The result is cut: the file has the first " (counted(rows, "row", "rows")) "." } }
        }
    }
}

/// A query and its result; with `format`, the result as a file.
pub(crate) async fn sql(screen: Screen) -> Response {
    let query = screen.query.get("query").to_owned();
    let path = format!("/sql?query={}", encoded(query.trim()));
    let format = screen.query.get("format");
    if matches!(format, "csv" | "svg") {
        return result_file(&screen, "Result", &format!("{path}&format={format}"), format).await;
    }
    let result = match query.trim() {
        "" => {
            html! { p.quiet { "One SELECT in the DuckDB dialect. Nothing can be changed here." } }
        }
        _ => match screen.api.get(&path).await {
            Err(error) if error.status == axum::http::StatusCode::BAD_REQUEST => {
                banner(Tone::Bad, &html! { p { (excerpt_long(&error.message)) } })
            }
            Err(error) => unavailable("The result", &error, &screen),
            Ok(found) => sql_result(&path, &found),
        },
    };
    let content = html! {
        form.stacked action="/console/sql" {
            label for="query" { "Query" }
            textarea #query name="query" rows="6" maxlength="10000" spellcheck="false" required { (query) }
            button.button.primary type="submit" { "Run" }
        }
        (result)
    };
    screen.page(ScreenContent {
        title: "SQL".to_owned(),
        path: Vec::new(),
        command: match query.trim() {
            "" => "headwater sql 'SELECT …'".to_owned(),
            query => format!("headwater sql {}", shell_word(query)),
        },
        content,
    })
}

fn excerpt_long(text: &str) -> Markup {
    html! { bdi { (crate::text::visible(crate::text::cut(text, 2000).0)) } }
}

/// Checks issues page by page, as many as one request may.
pub(crate) async fn consistency(screen: Screen) -> Response {
    if screen.query.get("check").is_empty() {
        let content = html! {
            p { "Every event that came in is processed, pending or quarantined. The check counts the events of all issues and compares." }
            form action="/console/consistency" { button.button.primary type="submit" name="check" value="1" { "Check now" } }
        };
        return consistency_page(&screen, content);
    }
    let mut cursor = screen.query.get("cursor").to_owned();
    let names =
        ["issues", "recorded", "processed", "pending", "quarantined", "discrepancies_total"];
    let mut totals: Vec<u64> =
        names.iter().map(|name| screen.query.get(name).parse().unwrap_or(0)).collect();
    let mut found: Vec<Value> = Vec::new();
    let (began, mut limit, mut failed) = (Instant::now(), CHECKED_ISSUES, None);
    for _ in 0..CHECKED_PAGES {
        let path = match cursor.as_str() {
            "" => format!("/audit/books?limit={limit}"),
            cursor => format!("/audit/books?limit={limit}&cursor={}", encoded(cursor)),
        };
        let page = match screen.api.get(&path).await {
            Ok(page) => page,
            // Issues with very many events.
            Err(_) if limit > CHECKED_ISSUES_IF_SLOW => {
                limit = CHECKED_ISSUES_IF_SLOW;
                continue;
            }
            Err(error) => {
                let problem = problem("The check", &error, &screen);
                if cursor.is_empty() {
                    // Nothing was checked.
                    return consistency_page(&screen, problem);
                }
                failed = Some(problem);
                break;
            }
        };
        for (total, name) in totals.iter_mut().zip(names) {
            // The first ones are from the address, and may be anything.
            *total = total.saturating_add(page[name].as_u64().unwrap_or(0));
        }
        found.extend(items(&page, "discrepancies").iter().cloned());
        cursor = plain(&page["next_cursor"]);
        if cursor.is_empty() || began.elapsed() >= CHECKING_TIME_MAX {
            break;
        }
    }
    let is_done = cursor.is_empty() && failed.is_none();
    let facts: Vec<(&str, Markup)> =
        ["Issues", "Came in", "Processed", "Pending", "Quarantined", "Inconsistent issues"]
            .into_iter()
            .zip(&totals)
            .map(|(name, total)| (name, html! { (number(*total)) }))
            .collect();
    let content = html! {
        @if let Some(failed) = failed { (failed) }
        @if totals[5] > 0 { (banner(Tone::Bad, &html! { p { strong { (counted(totals[5], "issue is", "issues are")) " inconsistent." } } })) }
        @else if is_done { (banner(Tone::Good, &html! { p { strong { "Consistent: " } "came in = processed + pending + quarantined." } })) }
        @else { (banner(Tone::Neutral, &html! { p { "Consistent so far; there are further issues." } })) }
        (self::facts(&facts))
        @if !found.is_empty() {
            (table("Inconsistent issues", &["Issue", "Status", "Pending", "Problem"], &html! {
                @for one in &found {
                    @let issue = plain(&one["issue_id"]);
                    tr {
                        th scope="row" { a href={ "/console/issues/" (issue) } { (id(&issue)) } }
                        td { (badge(Tone::Bad, field(one, "processing_status"))) }
                        td { (plain(&one["pending_events"])) }
                        td { (excerpt_long(field(one, "problem"))) }
                    }
                }
            }))
        }
        @if !is_done {
            form action="/console/consistency" {
                input type="hidden" name="check" value="1";
                input type="hidden" name="cursor" value=(cursor);
                @for (name, total) in names.iter().zip(&totals) { input type="hidden" name=(name) value=(total); }
                button.button.primary type="submit" { "Check the next issues" }
            }
        }
    };
    consistency_page(&screen, content)
}

fn consistency_page(screen: &Screen, content: Markup) -> Response {
    screen.page(ScreenContent {
        title: "Consistency".to_owned(),
        path: Vec::new(),
        command: "headwater audit books".to_owned(),
        // Not live: the check reads all events.
        content,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::body::to_bytes;
    use axum::http::Uri;
    use axum::routing::get;
    use axum::{Json, Router};
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn totals_of_the_address_cannot_overflow_and_pages_are_as_large_as_the_api_allows() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let paths = Arc::clone(&seen);
        let books = move |uri: Uri| async move {
            paths.lock().unwrap().push(uri.to_string());
            Json(json!({"issues": 1000, "recorded": 7, "next_cursor": null}))
        };
        let api = Router::new().route("/api/v1/audit/books", get(books));
        let address = "/console/consistency?check=1&cursor=9&issues=18446744073709551615";
        let page = consistency(Screen::for_test(api, address)).await;
        let page = to_bytes(page.into_body(), usize::MAX).await.unwrap();
        assert!(str::from_utf8(&page).unwrap().contains("18,446,744,073,709,551,615"));
        assert_eq!(*seen.lock().unwrap(), ["/api/v1/audit/books?limit=1000&cursor=9"]);
    }

    /// Issues with very many events: fewer are checked at a time, and what was checked before a failure is shown.
    #[tokio::test]
    async fn a_check_that_takes_too_long_goes_on_in_smaller_pages() {
        let books = |uri: Uri| async move {
            match uri.query() {
                Some("limit=10") => {
                    Ok(Json(json!({"issues": 10, "recorded": 123, "next_cursor": 9})))
                }
                _ => Err(axum::http::StatusCode::SERVICE_UNAVAILABLE),
            }
        };
        let api = Router::new().route("/api/v1/audit/books", get(books));
        let page = consistency(Screen::for_test(api, "/console/consistency?check=1")).await;
        let page = to_bytes(page.into_body(), usize::MAX).await.unwrap();
        let page = str::from_utf8(&page).unwrap();
        for part in ["The check", "cannot be shown", "123", "name=\"cursor\" value=\"9\""] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }
}
