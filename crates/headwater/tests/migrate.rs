//! Which commands change the schema of the database: `migrate`, `serve` and `worker`, and no other.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use headwater_testkit::{Database, Postgres};
use sqlx::{Connection, PgConnection};
use support::cli::CliFixture;
use support::{ServerDir, text};

/// The number of tables, and those of functions.
async fn objects(database: &Database) -> (i64, i64) {
    let mut connection = PgConnection::connect(&database.url()).await.unwrap();
    let count = "SELECT (SELECT count(*) FROM pg_tables WHERE schemaname = 'public'),
        (SELECT count(*) FROM pg_proc WHERE proname LIKE 'headwater%')";
    sqlx::query_as(count).fetch_one(&mut connection).await.unwrap()
}

#[tokio::test]
async fn commands_that_look_or_change_data_leave_the_schema_alone() {
    let database = Postgres::shared().unwrap().database().unwrap();
    let dir = ServerDir::new().unwrap();
    let to = ["--database-url", &database.url(), "--stream-url", "embedded:memory"];
    let run = |verb: &[&str]| dir.run(&[verb, &to].concat()).unwrap();
    for verb in [
        &["issue", "list"][..],
        &["ticket", "list"],
        &["ticket", "new", "--user", "ann", "--title", "t", "--content", "c"],
        &["outbox", "list"],
        &["audit", "log"],
        &["session", "list"],
        &["doctor"],
        &["migrate", "--dry-run"],
    ] {
        let output = run(verb);
        let said = [text(&output.stdout), text(&output.stderr)].concat();
        assert_eq!(output.status.code(), Some(1), "{verb:?}: {said}");
        assert!(
            said.contains("no tables of this program") && said.contains("`headwater migrate`"),
            "{said}"
        );
        assert_eq!(objects(&database).await, (0, 0), "{verb:?}");
    }

    let output = run(&["migrate"]);
    assert!(text(&output.stdout).contains("was migrated"), "{}", text(&output.stderr));
    let after = objects(&database).await;
    assert!(after.0 > 10 && after.1 > 10, "{after:?}");
    for again in [&["migrate"][..], &["migrate", "--dry-run"]] {
        assert!(text(&run(again).stdout).contains("is up to date"));
    }
    assert!(run(&["ticket", "list"]).status.success());

    // As if an older version had created it.
    let mut connection = PgConnection::connect(&database.url()).await.unwrap();
    let older = "UPDATE headwater_functions SET revision = 0";
    sqlx::query(older).execute(&mut connection).await.unwrap();
    let output = run(&["issue", "list"]);
    assert!(text(&output.stderr).contains("functions are older"), "{}", text(&output.stderr));
    assert_eq!(objects(&database).await, after);
    assert!(text(&run(&["migrate"]).stdout).contains("was migrated"));
    assert!(run(&["issue", "list"]).status.success());
}

#[test]
fn a_sqlite_file_is_created_by_a_change_and_migrated_by_no_command_that_looks() {
    let cli = CliFixture::embedded();
    let output = cli.run(&["migrate", "--dry-run"], "");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("does not exist yet"), "{}", text(&output.stderr));
    assert!(cli.stdout(&["migrate"]).contains("was migrated"));
    assert!(cli.stdout(&["migrate"]).contains("is up to date"));
    // A file without tables.
    std::fs::write(cli.dir.path().join("headwater.db"), "").unwrap();
    let error = cli.fails(&["issue", "list"], 1);
    assert!(error.contains("no tables of this program"), "{error}");
    assert_eq!(std::fs::metadata(cli.dir.path().join("headwater.db")).unwrap().len(), 0);
}

#[test]
fn a_command_without_a_server_prints_the_cause_of_an_internal_error() {
    let cli = CliFixture::redis();
    let redis = cli.redis.as_ref().unwrap();
    redis.command(&["SET", "orders", "a string"]).unwrap().ok().unwrap();
    let error = cli.fails(&["tail", "orders", "--from", "beginning"], 1);
    assert!(error.contains("WRONGTYPE") || error.contains("`orders`"), "{error}");
    assert!(!error.contains("see the server log"), "{error}");
}

/// Tables as a program of the issue document has them before its last migration.
const OLD_TABLES: &str = "
    CREATE TABLE integrations (id bigserial PRIMARY KEY, provider text NOT NULL);
    CREATE TABLE issues (
        id bigserial PRIMARY KEY, integration_id bigint NOT NULL REFERENCES integrations (id),
        external_issue_id text NOT NULL, processing_status text NOT NULL DEFAULT 'idle',
        discussions jsonb, spec text, last_processed_at timestamptz, created_at timestamptz NOT NULL DEFAULT now(),
        UNIQUE (integration_id, external_issue_id));
    CREATE TABLE event_logs (
        id bigserial PRIMARY KEY, issue_id bigint NOT NULL REFERENCES issues (id), event_type text NOT NULL,
        payload jsonb NOT NULL, processed_at timestamptz, processing_error text,
        created_at timestamptz NOT NULL DEFAULT now());";

/// The statements of the document.
const DOCUMENT: &str = "
ALTER TABLE issues
ADD COLUMN processing_started_at timestamptz;
ALTER TABLE issues
ADD CONSTRAINT chk_issues_processing_status
CHECK (processing_status IN ('idle', 'queued', 'processing'));
CREATE INDEX idx_issues_status_id 
ON issues (processing_status, id) 
WHERE processing_status != 'idle';";

/// Issue 1 is done, 2 waits, 3 was interrupted, 4 is idle although an event is unprocessed.
const OLD_ROWS: &str = r#"
    INSERT INTO integrations (provider) VALUES ('github'), ('other');
    INSERT INTO issues (integration_id, external_issue_id, processing_status, discussions) VALUES
        (1, '41', 'idle', '[{"by": "ann"}]'), (1, '42', 'queued', NULL), (1, '43', 'processing', NULL), (2, '41', 'idle', NULL);
    INSERT INTO event_logs (issue_id, event_type, payload, processed_at, created_at) VALUES
        (1, 'issue_created', '{"content": "old"}', now(), now() - interval '2 days'),
        (2, 'issue_created', '{"content": "Where is my parcel?"}', NULL, now() - interval '1 day'),
        (2, 'comment', '{"content": "Hello?"}', NULL, now()),
        (3, 'issue_created', '{"content": "Is anybody there?"}', NULL, now()),
        (4, 'issue_created', '{"content": "Me too"}', NULL, now());"#;

/// Everything that `pg_dump` would write, as text to compare.
fn snapshot(database: &Database) -> String {
    let relations = "SELECT n.nspname, c.relname, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname NOT LIKE 'pg_%' AND n.nspname <> 'information_schema' ORDER BY 1, 2";
    let rows = "SELECT (SELECT jsonb_agg(i ORDER BY id) FROM issues i), (SELECT jsonb_agg(e ORDER BY id) FROM event_logs e)";
    database.query(relations).unwrap() + &database.query(rows).unwrap()
}

#[tokio::test]
async fn tables_of_the_issue_document_are_adopted_and_a_server_works_on_them() {
    let database = Postgres::shared().unwrap().database().unwrap();
    for statements in [OLD_TABLES, DOCUMENT, OLD_ROWS] {
        database.query(statements).unwrap();
    }
    let (receiver, url) = support::receivers::Receiver::start().await.unwrap();
    let integration = |id: &str| {
        format!(
            "[[integration]]\nid = \"{id}\"\nprovider = \"standard\"\nsecret = \"c2VjcmV0\"\nbase_url = \"{url}/{id}\"\n"
        )
    };
    let dir =
        ServerDir::new().unwrap().settings(&(integration("shop") + &integration("other"))).unwrap();
    let to = ["--database-url", &database.url(), "--stream-url", "embedded:memory"];
    let run = |verb: &[&str]| {
        let output = dir.run(&[&["migrate", "--adopt"], verb, &to].concat()).unwrap();
        let said = text(&output.stdout) + &text(&output.stderr);
        (output.status.code(), said)
    };
    let before = snapshot(&database);
    // Without names for the integrations it is refused, and the message says which are missing.
    let (code, said) = run(&["--integration", "1=shop/app"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("nothing was changed")
            && said.contains("--integration ID=NAME/PROJECT` for each: 2"),
        "{said}"
    );
    for (wrong, part) in
        [("1=shop", "has no `/`"), ("x=shop/app", "a number"), ("1=nobody/app", "[[integration]]")]
    {
        let (code, said) = run(&["--integration", wrong]);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(part), "{said}");
    }
    let all = ["--integration", "1=shop/app", "--integration", "2=other/app"];
    let (code, said) = run(&[&all[..], &["--dry-run"]].concat());
    assert_eq!(code, Some(0), "{said}");
    let numbers = "4 issues (3 queued, 1 interrupted) with 5 events (4 unprocessed)";
    assert!(said.contains("would adopt") && said.contains(numbers), "{said}");
    assert_eq!(snapshot(&database), before, "a refusal and a dry run change nothing");

    let (code, said) = run(&all);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains(numbers) && said.contains("`issues`, `event_logs`, `integrations`"),
        "{said}"
    );
    assert_eq!(database.query("SELECT count(*) FROM before_headwater.issues").unwrap(), "4");
    assert_eq!(database.query("SELECT count(*) FROM before_headwater.event_logs").unwrap(), "5");
    let (code, said) = run(&all);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("has the tables of this program already"), "{said}");

    // A server processes what was not processed, once, and stores new events after the old ones.
    let server = dir
        .serve(
            &[
                &to[..],
                &["--issue-quiet", "10ms", "--sweep-every", "200ms", "--analytics-path", ""],
            ]
            .concat(),
        )
        .unwrap();
    let unprocessed = "SELECT count(*) FROM event_logs WHERE processed_at IS NULL";
    support::eventually("all events to be processed", || {
        database.query(unprocessed).unwrap() == "0"
    })
    .await
    .unwrap();
    support::eventually("three replies", || receiver.accepted().len() == 3).await.unwrap();
    let issues: std::collections::BTreeSet<String> =
        receiver.accepted().iter().map(|one| one.body["data"]["issue_id"].to_string()).collect();
    assert!(issues.iter().eq(["2", "3", "4"]), "{issues:?}");
    assert_eq!(
        database
            .query("SELECT processing_status, discussions->0->>'by' FROM issues WHERE id = 1")
            .unwrap(),
        "idle|ann"
    );
    let (status, opened) =
        server.post("/api/v1/tickets", &support::desk::new_ticket("Hello")).await.unwrap();
    assert_eq!((status, &opened["issue_id"]), (201, &serde_json::json!(5)), "{opened}");
    let output = dir.run(&[&["audit", "books"][..], &["--url", &server.url("")]].concat()).unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn tables_that_cannot_be_adopted_are_refused_with_the_reason() {
    let dir = ServerDir::new().unwrap();
    let postgres = Postgres::shared().unwrap();
    let refused = |statements: &[&str]| {
        let database = postgres.database().unwrap();
        statements.iter().for_each(|one| drop(database.query(one).unwrap()));
        let to = ["--database-url", &database.url(), "--stream-url", "embedded:memory"];
        let output = dir.run(&[&["migrate", "--adopt"][..], &to].concat()).unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
        let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'before_headwater'";
        assert_eq!(database.query(schemas).unwrap(), "0");
        text(&output.stderr)
    };
    for (statements, part) in [
        (&[][..], "there is no table `issues`; there is no table `event_logs`"),
        (
            &["CREATE TABLE issues (id uuid); CREATE TABLE event_logs (id bigint)"],
            "`issues.id` has the type `uuid`; needed: `bigint` or `integer`; `issues` has no column `integration_id`",
        ),
        (&[OLD_TABLES, "CREATE TABLE outbox (id bigint)"], "the names `outbox` are in use"),
        (
            &[
                OLD_TABLES,
                "INSERT INTO integrations (provider) VALUES ('x'); INSERT INTO issues (integration_id, external_issue_id, processing_status) VALUES (1, '1', 'busy')",
            ],
            "these values of `issues.processing_status` are unknown: busy",
        ),
    ] {
        let said = refused(statements);
        assert!(said.contains(part) && said.contains("nothing was changed"), "{said}");
    }
    let output = dir.run(&["migrate", "--adopt", "--database-url", "sqlite:x.db"]).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("PostgreSQL"), "{}", text(&output.stderr));
}
