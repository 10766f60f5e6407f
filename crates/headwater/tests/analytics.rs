//! Analytics in the real binary: ingestion while serving; reports, SQL and rebuilds through a server and on the file,
//! embedded and on Redis with PostgreSQL.
#![cfg(feature = "analytics")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::process::Output;

use headwater_testkit::{Database, Postgres, Redis, wait_until};
use serde_json::{Value, json};

use support::{LIMIT, Server, ServerDir, text};

/// Prices, so that every answer has a cost.
const PRICES: [&str; 4] = ["--model-price-in", "1000000", "--model-price-out", "1000000"];

const ALL_EVENTS: &str =
    "SELECT event_type, count(*) AS n FROM ticket_events GROUP BY event_type ORDER BY event_type";

/// Events of another integration: more than two pages of a rebuild.
const OTHER_EVENTS: &str = "
    WITH g AS (INSERT INTO integrations (name, provider) VALUES ('other', 'github') RETURNING id),
      i AS (INSERT INTO issues (integration_id, external_project_id, external_issue_id)
          SELECT g.id, 'p', '1' FROM g RETURNING id, integration_id)
    INSERT INTO event_logs (issue_id, integration_id, source, event_type, dedup_key, digest, payload, payload_bytes, processed_at)
    SELECT id, integration_id, 's', 't', n::text, '', '{}', 2, now() FROM i, generate_series(1, 2500) AS n";

/// A working directory with its servers, and the arguments that select them.
struct Setup {
    place: ServerDir,
    arguments: Vec<String>,
    redis: Option<Redis>,
    database: Option<Database>,
}

impl Setup {
    fn embedded() -> Self {
        Self {
            place: ServerDir::new().unwrap(),
            arguments: Vec::new(),
            redis: None,
            database: None,
        }
    }

    fn servers() -> Self {
        let redis = Redis::start().unwrap();
        let database = Postgres::shared().unwrap().database().unwrap();
        let arguments = ["--stream-url", &redis.url(), "--database-url", &database.url()];
        let arguments = arguments.map(str::to_owned).to_vec();
        let place = ServerDir::new().unwrap();
        Self { place, arguments, redis: Some(redis), database: Some(database) }
    }

    fn serve(&self, more: &[&str]) -> Server {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        self.place.serve(&[&arguments[..], &["--issue-quiet", "0ms"], more].concat()).unwrap()
    }

    fn run(&self, verb: &[&str], to: &[&str]) -> Output {
        self.place.run(&[verb, to].concat()).unwrap()
    }

    /// Runs a verb that must succeed; returns its output lines as JSON.
    fn json(&self, verb: &[&str], to: &[&str]) -> Vec<Value> {
        let output = self.run(&[verb, &["--json"]].concat(), to);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{verb:?}: {out}{err}");
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Runs a verb that must exit with this code; returns its output.
    fn run_failing(&self, verb: &[&str], to: &[&str], code: i32) -> String {
        let output = self.run(verb, to);
        let text = [text(&output.stdout), text(&output.stderr)].concat();
        assert_eq!(output.status.code(), Some(code), "{verb:?}: {text}");
        text
    }

    /// The results of all reports except dead letters, which are not in the database.
    fn reports(&self, to: &[&str]) -> Vec<Vec<Value>> {
        let names = ["tickets-per-day", "first-response", "events-per-run", "tokens-and-cost"];
        names.iter().map(|name| self.json(&["report", name], to)).collect()
    }
}

/// Opens tickets and waits until each is answered and all `in_all` tickets are in the file.
async fn open_tickets(server: &Server, count: usize, in_all: u64) {
    for number in 0..count {
        let ticket = json!({"title": format!("Ticket {number}"), "content": "Where is it?"});
        let (status, body) = server.post("/api/v1/tickets", &ticket).await.unwrap();
        assert!(status < 300, "{status} {body}");
    }
    server
        .until("/api/v1/reports/tokens-and-cost", |status, body| {
            status == 200 && sum(body, "runs") == in_all
        })
        .await
        .unwrap();
    server
        .until("/api/v1/reports/events-per-run", |_, body| sum(body, "runs") == in_all)
        .await
        .unwrap();
    server
        .until("/api/v1/reports/tickets-per-day", |_, body| sum(body, "tickets") == in_all)
        .await
        .unwrap();
}

/// The sum of a column over all days.
fn sum(table: &Value, column: &str) -> u64 {
    let columns = table["columns"].as_array().map(Vec::as_slice).unwrap_or_default();
    let Some(place) = columns.iter().position(|name| name == column) else { return 0 };
    let rows = table["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
    rows.iter().filter_map(|row| row[place].as_u64()).sum()
}

async fn every_verb(setup: Setup) {
    let mut server = setup.serve(&PRICES);
    server
        .until("/health/ready", |_, body| body["analytics"]["state"] == "ingesting")
        .await
        .unwrap();
    open_tickets(&server, 3, 3).await;
    let url = server.url("");
    let over = ["--url", url.as_str()];

    sql_queries(&setup, &over);
    reports(&setup, &over);
    invalid_calls(&setup, &over);

    // Run metrics are in the event: three runs of one event each, at a price of one per token.
    let runs = setup.json(&["report", "events-per-run"], &over);
    assert_eq!(runs, [json!({"events": 1, "runs": 3})]);
    let took =
        "SELECT sum(tokens_in + tokens_out) = sum(cost) AS adds_up, min(tokens_out) > 0 AS says
                FROM ticket_events WHERE event_type = 'AI_RESPONSE_GENERATED'";
    assert_eq!(setup.json(&["sql", took], &over), [json!({"adds_up": true, "says": true})]);

    // An invalid entry becomes a dead letter, and a row of the report.
    let message = json!({"messages": [{"payload": "no event"}]});
    let (status, body) =
        server.post("/api/v1/topics/ticket_events/messages", &message).await.unwrap();
    assert!(status < 300, "{status} {body}");
    server.until("/api/v1/reports/dead-letters", |_, body| sum(body, "letters") > 0).await.unwrap();
    let letters = setup.json(&["report", "dead-letters"], &over);
    assert_eq!(letters[0]["topic"], "ticket_events", "{letters:?}");

    // While the server has the file open, a verb cannot open it and suggests `--url`.
    let (events, before) = (setup.json(&["sql", ALL_EVENTS], &over), setup.reports(&over));
    for verb in
        [&["sql", "SELECT 1"][..], &["report", "dead-letters"], &["analytics", "rebuild", "--yes"]]
    {
        let arguments: Vec<&str> = setup.arguments.iter().map(String::as_str).collect();
        let output = setup.run_failing(verb, &arguments, 1);
        assert!(
            output.contains("is in use by process") && output.contains("--url http://"),
            "{output}"
        );
    }

    // A rebuild by the server does not change query results.
    let output = setup.run_failing(&["analytics", "rebuild"], &over, 2);
    assert!(output.contains("--yes"), "{output}");
    let rebuilt = &setup.json(&["analytics", "rebuild", "--yes"], &over)[0];
    assert_eq!((&rebuilt["read"], &rebuilt["stored"]), (&json!(6), &json!(6)), "{rebuilt}");
    assert_eq!(setup.json(&["sql", ALL_EVENTS], &over), events);
    if let Some(database) = &setup.database {
        database.query(OTHER_EVENTS).unwrap();
    }
    // The ingestion continues.
    open_tickets(&server, 1, 4).await;
    assert!(server.stop().unwrap().success(), "{}", server.log());

    // Without a server the file is queried directly.
    // `tokens-and-cost` reads the database.
    let direct: Vec<&str> = setup.arguments.iter().map(String::as_str).collect();
    let after = setup.reports(&direct);
    assert_eq!(after[2], [json!({"events": 1, "runs": 4})], "before: {before:?}");
    sql_queries(&setup, &[]);
    reports(&setup, &direct);
    invalid_calls(&setup, &[]);

    // Without the file queries fail; a rebuild from the database restores the same results.
    std::fs::remove_file(setup.place.path().join("headwater-data/analytics.duckdb")).unwrap();
    let output = setup.run_failing(&["sql", "SELECT 1"], &[], 1);
    assert!(output.contains("headwater analytics rebuild"), "{output}");
    let arguments: Vec<&str> = setup.arguments.iter().map(String::as_str).collect();
    let rebuilt = &setup.json(&["analytics", "rebuild", "--yes"], &arguments)[0];
    assert_eq!((&rebuilt["removed"], &rebuilt["stored"]), (&json!(0), &json!(8)), "{rebuilt}");
    assert_eq!(setup.reports(&direct), after);
}

fn sql_queries(setup: &Setup, to: &[&str]) {
    let sql = "SELECT DISTINCT event_type, content IS NULL AS is_empty FROM ticket_events WHERE event_type = 'TICKET_CREATED'";
    let rows = setup.json(&["sql", sql], to);
    assert_eq!(rows, [json!({"event_type": "TICKET_CREATED", "is_empty": false})]);
    let table = setup
        .run(&["sql", "SELECT 1 AS a, 'x' AS long_name UNION ALL SELECT 22, NULL ORDER BY a"], to);
    assert_eq!(text(&table.stdout), "A   LONG_NAME\n1   x\n22\n", "{}", text(&table.stderr));
    let csv = setup.run(&["sql", "SELECT 1 AS a, 'x,y' AS b", "--format", "csv"], to);
    assert_eq!(text(&csv.stdout), "a,b\n1,\"x,y\"\n");
}

fn reports(setup: &Setup, to: &[&str]) {
    let list = setup.json(&["report", "list"], to);
    assert_eq!(list.len(), 5, "{list:?}");
    for line in &list {
        let name = line["name"].as_str().unwrap();
        setup.json(&["report", name], to);
        let svg = text(&setup.run(&["report", name, "--format", "svg"], to).stdout);
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{name}: {svg}");
    }
    let csv = text(&setup.run(&["report", "events-per-run", "--format", "csv"], to).stdout);
    assert!(csv.starts_with("events,runs\n1,"), "{csv}");
    let table = text(&setup.run(&["report", "events-per-run"], to).stdout);
    assert!(table.starts_with("EVENTS  RUNS\n1       "), "{table}");
    let svg = text(&setup.run(&["report", "events-per-run", "--format", "svg"], to).stdout);
    assert!(svg.contains("Events answered per run"), "{svg}");
}

fn invalid_calls(setup: &Setup, to: &[&str]) {
    for (verb, hint) in [
        (&["sql", "SELEC 1"][..], "syntax error"),
        (&["sql", "SELECT nothing FROM ticket_events"], "nothing"),
        (&["sql", "DELETE FROM events"], "only one SELECT is allowed"),
        (&["sql", "DROP TABLE events"], "only one SELECT is allowed"),
        (&["sql", "INSERT INTO events SELECT * FROM events"], "only one SELECT is allowed"),
        (&["sql", "SELECT 1; DROP TABLE events"], "one SELECT"),
        (&["sql", "SELECT * FROM read_text('headwater.toml')"], "not allowed"),
        (&["sql", "COPY (SELECT 1) TO 'elsewhere.csv'"], "only one SELECT is allowed"),
        (&["sql", "SELECT 1", "--format", "svg"], "headwater report list"),
        (&["sql"], "Usage"),
        (&["report", "tickets"], "available: tickets-per-day, first-response"),
        (&["report", "list", "--format", "pie"], "possible values"),
        (&["analytics"], "Usage"),
    ] {
        let output = setup.run_failing(verb, to, 2);
        assert!(output.contains(hint), "{verb:?} {to:?}: {output}");
    }
    assert!(!setup.place.path().join("elsewhere.csv").exists());
}

#[tokio::test]
async fn every_verb_on_embedded_streams_and_sqlite() {
    every_verb(Setup::embedded()).await;
}

#[tokio::test]
async fn every_verb_on_redis_and_postgres() {
    every_verb(Setup::servers()).await;
}

#[tokio::test]
async fn a_read_token_may_query_but_not_rebuild() {
    let settings = "[[token]]\nname = \"analyst\"\nrole = \"read\"\ntoken_env = \"ANALYST\"\n";
    let place = ServerDir::new().unwrap().settings(settings).unwrap();
    let place = place.variable("ANALYST", "a-token-of-some-length-1");
    let server = place.serve(&[]).unwrap();
    let ask = |request: reqwest::RequestBuilder, token: Option<&str>| {
        let request = match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        async move { support::answer(request.send().await.unwrap()).await.unwrap() }
    };
    let get = |path: &str| server.client.get(server.url(path));
    let token = Some("a-token-of-some-length-1");
    for path in ["/api/v1/reports", "/api/v1/sql?query=SELECT%201", "/api/v1/analytics"] {
        assert_eq!(ask(get(path), None).await.0, 401, "{path}");
    }
    let started = std::time::Instant::now();
    // The file is opened after the listener.
    while ask(get("/api/v1/sql?query=SELECT%201"), token).await.0 != 200 {
        assert!(started.elapsed() < LIMIT, "{}", server.log());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(ask(get("/api/v1/reports/first-response?format=csv"), token).await.0, 200);
    assert_eq!(ask(get("/api/v1/reports/nothing"), token).await.0, 404);
    let (status, body) =
        ask(server.client.post(server.url("/api/v1/analytics/rebuild")), token).await;
    assert_eq!((status, &body["error"]["code"]), (403, &json!("forbidden")), "{body}");
}

#[tokio::test]
async fn why_a_file_cannot_be_opened_is_shown_to_admins_only() {
    let token = |role: &str| {
        format!(
            "[[token]]\nname = \"{role}\"\nrole = \"{role}\"\ntoken = \"{role}-{role}-{role}-{role}\"\n"
        )
    };
    let place =
        ServerDir::new().unwrap().settings(&[token("read"), token("admin")].concat()).unwrap();
    let path = support::directory(&place, "secret-name").unwrap().display().to_string();
    let server = place.serve(&["--analytics-path", &path]).unwrap();
    let is_waiting = |_: u16, body: &Value| body["analytics"]["state"] == "waiting";
    let ready = server.until("/health/ready", is_waiting).await.unwrap();
    let ask = async |path: &str, role: &str| {
        let token = [role; 4].join("-");
        let request = server.client.get(server.url(path)).bearer_auth(token);
        support::answer(request.send().await.unwrap()).await.unwrap().1.to_string()
    };
    let analytics = ask("/api/v1/analytics", "read").await;
    let asked = ask("/api/v1/sql?query=SELECT%201", "read").await;
    for output in [ready.to_string(), analytics, asked] {
        assert!(
            output.contains("see the server log") && !output.contains("secret-name"),
            "{output}"
        );
    }
    let output = ask("/api/v1/analytics", "admin").await;
    assert!(output.contains("secret-name"), "{output}");
}

#[tokio::test]
async fn a_second_server_waits_for_the_file_and_takes_over_when_the_first_is_killed() {
    let setup = Setup::servers();
    let mut first = setup.serve(&[]);
    open_tickets(&first, 2, 2).await;
    let second = setup.serve(&[]);
    let ready = second
        .until("/health/ready", |status, body| {
            status == 200 && body["analytics"]["state"] == "waiting"
        })
        .await
        .unwrap();
    // The reason is for admins; without tokens every local caller is one, but `/health` is public.
    assert_eq!(ready["analytics"]["reason"], "see the server log");
    let (_, shown) = second.get("/api/v1/analytics").await.unwrap();
    assert!(shown["reason"].as_str().unwrap().contains("in use by another process"), "{shown}");
    let (status, body) = second.get("/api/v1/sql?query=SELECT%201").await.unwrap();
    assert_eq!((status, &body["error"]["code"]), (503, &json!("unavailable")), "{body}");
    assert!(!body.to_string().contains("duckdb"), "{body}");

    first.kill9().unwrap();
    open_tickets(&second, 2, 4).await;
    let (_, counted) = second
        .get("/api/v1/sql?query=SELECT%20count(*)%20AS%20n%20FROM%20ticket_events")
        .await
        .unwrap();
    assert_eq!(counted["rows"], json!([[8]]), "{counted}");
}

#[tokio::test]
async fn events_after_a_redis_flush_are_counted() {
    let setup = Setup::servers();
    let server = setup.serve(&[]);
    open_tickets(&server, 2, 2).await;
    let redis = setup.redis.as_ref().unwrap();
    redis.command(&["FLUSHALL"]).unwrap().ok().unwrap();
    // Groups are created again and read from the beginning.
    wait_until("groups to be created again", LIMIT, || {
        redis.command(&["XINFO", "GROUPS", "ticket_events"]).unwrap().items().len() == 2
    })
    .unwrap();
    open_tickets(&server, 2, 4).await;
}

#[tokio::test]
async fn an_empty_path_disables_analytics() {
    let setup = Setup::embedded();
    let server = setup.serve(&["--analytics-path", ""]);
    let ready = server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
    assert_eq!(ready["analytics"], json!({"state": "off"}), "{ready}");
    let (status, body) = server.get("/api/v1/reports/first-response").await.unwrap();
    assert_eq!(status, 501, "{body}");
    assert!(body["error"]["message"].as_str().unwrap().contains("`analytics.path` is empty"));
    let output = setup.run_failing(&["sql", "SELECT 1"], &["--analytics-path", ""], 1);
    assert!(output.contains("`analytics.path` is empty"), "{output}");
    assert!(!setup.place.path().join("headwater-data/analytics.duckdb").exists());
}

#[tokio::test]
async fn a_query_is_cancelled_after_the_time_of_the_setting() {
    let setup = Setup::embedded();
    let timeout = ["--analytics-query-timeout", "1s"];
    let endless = "SELECT sum(a.range * b.range) FROM range(1000000000) a, range(1000000000) b";
    let mut server = setup.serve(&timeout);
    server
        .until("/health/ready", |_, body| body["analytics"]["state"] == "ingesting")
        .await
        .unwrap();
    let named = "after 1 s (`analytics.query_timeout`)";
    let output = setup.run_failing(&["sql", endless], &["--url", &server.url("")], 1);
    assert!(output.contains(named), "{output}");
    assert!(server.stop().unwrap().success());
    let output = setup.run_failing(&["sql", endless], &timeout, 1);
    assert!(output.contains(named), "{output}");
}

#[tokio::test]
async fn a_query_result_is_returned_as_csv_and_drawn_if_it_has_a_label_and_numbers() {
    let setup = Setup::embedded();
    let server = setup.serve(&[]);
    server
        .until("/health/ready", |_, body| body["analytics"]["state"] == "ingesting")
        .await
        .unwrap();
    let drawn = "query=SELECT%20%27ann%27%20AS%20who%2C%205%20AS%20n%20UNION%20ALL%20SELECT%20%27bob%2C%20b%27%2C%202%20ORDER%20BY%20who";
    let plain = "query=SELECT%201%20AS%20n";
    let get = async |path: &str| {
        let response = server.client.get(server.url(path)).send().await.unwrap();
        let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
        (response.status().as_u16(), kind, response.text().await.unwrap())
    };
    for (query, has_chart) in [(drawn, true), (plain, false)] {
        let (_, table) = server.get(&format!("/api/v1/sql?{query}")).await.unwrap();
        assert_eq!(table["has_chart"], has_chart, "{table}");
        assert_eq!(table, server.get(&format!("/api/v1/sql?{query}&format=json")).await.unwrap().1);
    }
    for path in ["/api/v1", "/console"] {
        let (status, kind, csv) = get(&format!("{path}/sql?{drawn}&format=csv")).await;
        assert_eq!((status, &*kind), (200, "text/csv; charset=utf-8"));
        assert_eq!(csv, "who,n\nann,5\n\"bob, b\",2\n");
        let (status, kind, svg) = get(&format!("{path}/sql?{drawn}&format=svg")).await;
        assert_eq!((status, &*kind), (200, "image/svg+xml"));
        assert!(svg.starts_with("<svg ") && svg.contains("<title>n by who</title>"), "{svg}");
        assert_eq!(get(&format!("{path}/sql?{plain}&format=svg")).await.0, 400);
    }
    assert_eq!(get(&format!("/api/v1/sql?{plain}&format=pie")).await.0, 400);

    let (_, _, page) = get(&format!("/console/sql?{drawn}")).await;
    assert!(page.contains("Download CSV") && page.contains("&amp;format=csv"), "{page}");
    assert!(page.contains("&amp;format=svg") && page.contains("class=\"chart\""), "{page}");
    let (_, _, page) = get(&format!("/console/sql?{plain}")).await;
    assert!(page.contains("Download CSV") && !page.contains("format=svg"), "{page}");
}
