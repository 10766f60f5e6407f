//! A build without the feature `analytics`: everything else works, and errors explain how to enable it.
#![cfg(not(feature = "analytics"))]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use serde_json::json;

use support::{ServerDir, text};

#[tokio::test]
async fn without_analytics_the_rest_works_and_errors_explain_how_to_enable_it() {
    let place = ServerDir::new().unwrap();
    for verb in [
        &["sql", "SELECT 1"][..],
        &["report", "tickets-per-day"],
        &["analytics", "rebuild", "--yes"],
    ] {
        let output = place.run(verb).unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{verb:?}: {stderr}");
        assert!(stderr.contains("--features analytics"), "{verb:?}: {stderr}");
    }
    let output = place.run(&["report", "list", "--json"]).unwrap();
    assert!(text(&output.stdout).contains("tickets-per-day"), "{}", text(&output.stderr));

    let mut server = place.serve(&[]).unwrap();
    let ready = server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
    assert_eq!(ready["analytics"], json!({"state": "not_built_in"}), "{ready}");
    let (status, body) = server.get("/api/v1/reports/tickets-per-day").await.unwrap();
    assert_eq!((status, &body["error"]["code"]), (501, &json!("no_analytics")), "{body}");
    // The screens say it, too.
    for path in ["/console/reports/tickets-per-day", "/console/sql?query=SELECT%201"] {
        let response = server.client.get(server.url(path)).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        let page = response.text().await.unwrap();
        assert!(page.contains("was built without analytics"), "{path}: {page}");
        assert!(
            page.contains("--features analytics") && page.contains("</main>"),
            "{path}: {page}"
        );
    }
    let url = server.url("");
    let output = place.run(&["sql", "SELECT 1", "--url", &url]).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("--features analytics"), "{}", text(&output.stderr));
    assert!(server.stop().unwrap().success(), "{}", server.log());
    assert!(!place.path().join("headwater-data/analytics.duckdb").exists());
}
