//! Administrative SQL: the queries of the seed, and the consistency check after changes by hand.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{ClaimOptions, Store, StoreOptions};
use headwater_stream::clock::{TestClock, Timestamp};
use headwater_testkit::Postgres;
use sqlx::{Connection, Row};

use super::{File, open, open_with, record};

const QUEUED: &str = "SELECT COUNT(*) FROM issues WHERE processing_status = 'queued';";

const STUCK: &str = "SELECT * FROM issues 
WHERE processing_status = 'processing' 
  AND processing_started_at < now() - interval '10 minutes';";

const UNPROCESSED: &str = "SELECT issue_id, COUNT(*) 
FROM event_logs 
WHERE processed_at IS NULL 
GROUP BY issue_id;";

/// Two queued issues with one and two events, and one in processing.
async fn fill(store: &dyn Store) -> Result<()> {
    record(store, "1", "a").await?;
    record(store, "2", "b").await?;
    record(store, "2", "c").await?;
    let third = record(store, "3", "d").await?.issue_id;
    let claimed = store.claim(&[third], &ClaimOptions::new("worker")).await?;
    assert!(matches!(claimed[0], headwater_issue::Claim::Won(_)));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_three_admin_queries_of_the_seed_are_correct_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    fill(&*open(&database.url()).await?).await?;
    assert_eq!(database.query(QUEUED)?, "2");
    let mut counts: Vec<String> = database.query(UNPROCESSED)?.lines().map(str::to_owned).collect();
    counts.sort();
    assert_eq!(counts, ["1|1", "2|2", "3|1"]);
    assert_eq!(database.query(STUCK)?, "");
    database.query("UPDATE issues SET processing_started_at = now() - interval '11 minutes'")?;
    let stuck = database.query(STUCK)?;
    assert_eq!(stuck.lines().count(), 1);
    assert!(stuck.starts_with("3|"), "{stuck}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_portable_admin_queries_are_correct_on_sqlite() -> Result<()> {
    let file = File::new()?;
    fill(&*open(&file.url).await?).await?;
    let mut connection = sqlx::SqliteConnection::connect(&file.url).await?;
    let queued: i64 = sqlx::query(QUEUED).fetch_one(&mut connection).await?.try_get(0)?;
    assert_eq!(queued, 2);
    let rows = sqlx::query(UNPROCESSED).fetch_all(&mut connection).await?;
    let counts: Vec<i64> = rows.iter().map(|row| row.try_get(1)).collect::<Result<_, _>>()?;
    assert_eq!(counts, [1, 2, 1]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schema_names_of_the_seed_exist_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    open(&database.url()).await?;
    let index = database
        .query("SELECT indexdef FROM pg_indexes WHERE indexname = 'idx_issues_status_id'")?;
    assert!(
        index.contains("(processing_status, id) WHERE (processing_status <> 'idle'"),
        "{index}"
    );
    let rejected = database.query(
        "INSERT INTO issues (integration_id, external_project_id, external_issue_id, processing_status)
         VALUES (1, 'p', '1', 'busy')",
    );
    assert!(rejected.unwrap_err().to_string().contains("chk_issues_processing_status"));
    let types = database.query(
        "SELECT string_agg(data_type, ',' ORDER BY column_name) FROM information_schema.columns
         WHERE (table_name, column_name) IN (('issues', 'discussions'), ('event_logs', 'payload'))",
    )?;
    assert_eq!(types, "jsonb,jsonb");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_consistency_check_reports_every_issue_changed_by_hand() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    let tampering = [
        "UPDATE issues SET pending_events = 7 WHERE external_issue_id = '1'",
        "UPDATE issues SET processing_status = 'idle' WHERE external_issue_id = '2'",
        "DELETE FROM event_logs WHERE dedup_key = 'd'",
    ];
    let mut sqlite = None;
    for url in [file.url.clone(), database.url()] {
        let store = open(&url).await?;
        fill(&*store).await?;
        for statement in tampering {
            if url == file.url {
                let connection = match &mut sqlite {
                    Some(connection) => connection,
                    none => none.insert(sqlx::SqliteConnection::connect(&url).await?),
                };
                sqlx::query(statement).execute(connection).await?;
            } else {
                database.query(statement)?;
            }
        }
        let report = store.check_consistency(2).await?;
        assert_eq!((report.discrepancies.len(), report.discrepancies_total), (2, 3));
        let report = store.check_consistency(10).await?;
        let problems: Vec<&str> =
            report.discrepancies.iter().map(|one| one.problem.as_str()).collect();
        assert_eq!(
            problems,
            [
                "pending_events is 7, but 1 event logs are unprocessed",
                "it is idle with unprocessed event logs",
                "pending_events is 1, but 0 event logs are unprocessed",
            ]
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clock_of_a_process_has_no_effect_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let behind = Arc::new(TestClock::at(Timestamp::from_millis(1_000)));
    let options = StoreOptions { clock: behind, ..StoreOptions::default() };
    let slow = open_with(&database.url(), &options).await?;
    let right = open(&database.url()).await?;
    let issue = record(&*slow, "1", "a").await?.issue_id;
    let claims = slow.claim(&[issue], &ClaimOptions::new("slow")).await?;
    let headwater_issue::Claim::Won(claimed) = &claims[0] else { panic!("{claims:?}") };
    let now = right.issue_facts(issue).await?.unwrap().now;
    assert!(claimed.expires_at > now && claimed.expires_at <= now.after(Duration::from_secs(60)));
    let taken = right.claim(&[issue], &ClaimOptions::new("right")).await?;
    assert!(matches!(taken[0], headwater_issue::Claim::Taken { .. }), "{taken:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_without_expiry_written_by_another_program_is_expired() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    for url in [file.url.clone(), database.url()] {
        let store = open(&url).await?;
        let swept = record(&*store, "1", "a").await?.issue_id;
        let claimed = record(&*store, "2", "b").await?.issue_id;
        let forever = "UPDATE issues SET processing_status = 'processing', claim_epoch = 1,
                 claim_owner = 'stranger', claim_expires_at = NULL";
        if url == file.url {
            let mut connection = sqlx::SqliteConnection::connect(&url).await?;
            sqlx::query(forever).execute(&mut connection).await?;
        } else {
            database.query(forever)?;
        }
        assert_eq!(store.check_consistency(10).await?.discrepancies, []);
        let diagnosis = headwater_issue::explain(&*store, swept).await?;
        assert!(
            matches!(diagnosis.reason, headwater_issue::DiagnosisReason::ClaimExpired { .. }),
            "{diagnosis:?}"
        );
        let claims = store.claim(&[claimed], &ClaimOptions::new("worker")).await?;
        assert!(matches!(claims[0], headwater_issue::Claim::Won(_)), "{claims:?}");
        let found = store.sweep(&headwater_issue::SweepOptions::default()).await?;
        assert_eq!((found.requeued, found.nudges[0].issue_id), (1, swept));
        assert_eq!(store.issue(swept).await?.unwrap().crashes, 1);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn only_one_row_of_an_issue_can_be_taken() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    for url in [file.url.clone(), database.url()] {
        let store = open(&url).await?;
        for issue in ["1", "2"] {
            let issue = record(&*store, issue, issue).await?.issue_id;
            let claims = store.claim(&[issue], &ClaimOptions::new("worker")).await?;
            let headwater_issue::Claim::Won(claimed) = &claims[0] else { panic!("{claims:?}") };
            let (kind, target) = (headwater_issue::OutboxKind::Reply, String::new());
            let row = headwater_issue::NewOutboxRow { kind, target, payload: "1".into() };
            let run = headwater_issue::RunCompletion {
                issue_id: issue,
                epoch: claimed.epoch,
                outbox: vec![row; 50],
                ..Default::default()
            };
            store.complete(&[run]).await?;
        }
        let seen = "SELECT count(*) FROM outbox WHERE status IN ('pending', 'taken')";
        let count: i64 = match store.read_connection().await?.connection() {
            headwater_issue::StoreConnection::Postgres(connection) => {
                sqlx::query(seen).fetch_one(connection).await?.try_get(0)?
            }
            headwater_issue::StoreConnection::Sqlite(connection) => {
                sqlx::query(seen).fetch_one(connection).await?.try_get(0)?
            }
            other => panic!("{other:?}"),
        };
        assert_eq!((count, store.backlog().await?.outbox_pending), (2, 100));
    }
    Ok(())
}
