//! Killed servers, lost replies and foreign locks: typed errors, and no partial effect.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    Claim, ClaimOptions, CompletionOutcome, DebounceWindow, IssueError, NewOutboxRow, OutboxKind,
    RunCompletion, Store, StoreOptions,
};
use headwater_testkit::{Postgres, Proxy};
use sqlx::{Connection, PgConnection, SqliteConnection};

use super::{File, event, open, open_with, record};

/// A short timeout, for calls that cannot succeed.
fn short_timeout() -> StoreOptions {
    StoreOptions {
        call_deadline: Duration::from_secs(5),
        connections_max: 2,
        ..StoreOptions::default()
    }
}

/// Applies the migrations with the default timeout first.
async fn store_with_short_timeout(url: &str) -> Result<Arc<dyn Store>> {
    open(url).await?.close().await;
    open_with(url, &short_timeout()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_whose_reply_was_lost_is_a_duplicate_when_repeated() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let direct = open(&database.url()).await?;
    let proxy = Proxy::start(Postgres::shared()?.addr())?;
    let store = open(&database.url_at(proxy.addr())).await?;

    // The lost reply may be that of a ping or a prepare; the event is new when repeated then.
    let mut duplicates = 0;
    let mut rounds = 0;
    while duplicates < 3 {
        let key = rounds.to_string();
        rounds += 1;
        assert!(rounds < 200, "a reply was lost after its effect");
        proxy.drop_reply()?;
        let lost = record(&*store, "1", &key).await;
        assert!(lost.is_ok() || lost.as_ref().is_err_and(IssueError::is_transient), "{lost:?}");
        let again = repeat(async || record(&*store, "1", &key).await).await?;
        duplicates += u32::from(lost.is_err() && again.duplicate);
        assert_eq!(direct.issue(again.issue_id).await?.unwrap().pending_events, rounds);
    }
    Ok(())
}

/// Repeats a call that failed because its connection was lost.
async fn repeat<T>(
    call: impl AsyncFn() -> headwater_issue::Result<T>,
) -> headwater_issue::Result<T> {
    let mut result = call().await;
    for _ in 0..20 {
        if result.as_ref().is_err_and(IssueError::is_transient) {
            result = call().await;
        }
    }
    result
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_whose_reply_was_lost_takes_effect_once() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let proxy = Proxy::start(Postgres::shared()?.addr())?;
    let store = open(&database.url_at(proxy.addr())).await?;
    let direct = open(&database.url()).await?;
    let (mut repeated, mut rounds) = (0, 0);
    while repeated < 3 {
        rounds += 1;
        assert!(rounds < 200, "a reply was lost after its effect");
        let issue = record(&*direct, "1", &rounds.to_string()).await?.issue_id;
        let claims = direct.claim(&[issue], &ClaimOptions::new("w")).await?;
        let Claim::Won(claimed) = &claims[0] else { panic!("{claims:?}") };
        let (target, payload) = (String::new(), "{}".to_owned());
        let run = RunCompletion {
            issue_id: issue,
            epoch: claimed.epoch,
            event_log_ids: claimed.events.iter().map(|event| event.id).collect(),
            outbox: vec![NewOutboxRow { kind: OutboxKind::Reply, target, payload }],
            ..RunCompletion::default()
        };
        proxy.drop_reply()?;
        let lost = store.complete(std::slice::from_ref(&run)).await;
        assert!(lost.is_ok() || lost.as_ref().is_err_and(IssueError::is_transient), "{lost:?}");
        let again = repeat(async || store.complete(std::slice::from_ref(&run)).await).await?;
        let CompletionOutcome::Committed { repeated: before, .. } = again[0] else {
            panic!("{again:?}")
        };
        repeated += u32::from(lost.is_err() && before);
        let rows = database.query("SELECT count(*) FROM outbox")?;
        assert_eq!(rows, rounds.to_string(), "one reply for each run");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_is_an_error_and_calls_succeed_after_its_restart() -> Result<()> {
    let postgres = Postgres::start()?;
    let database = postgres.database()?;
    let store = open(&database.url()).await?;
    record(&*store, "1", "a").await?;
    postgres.kill9()?;
    for _ in 0..3 {
        let dead = record(&*store, "1", "b").await;
        assert!(dead.as_ref().is_err_and(IssueError::is_transient), "{dead:?}");
    }
    postgres.restart()?;
    // Each connection from before the crash may fail once.
    let mut recorded = record(&*store, "1", "b").await;
    for _ in 0..StoreOptions::default().connections_max {
        if recorded.is_ok() {
            break;
        }
        recorded = record(&*store, "1", "b").await;
    }
    assert_eq!(store.issue(recorded?.issue_id).await?.unwrap().pending_events, 2);
    assert_eq!(store.check_consistency(10).await?.discrepancies, []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_blocked_by_a_lock_time_out_and_lose_nothing() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let store = store_with_short_timeout(&database.url()).await?;
    let issue = record(&*store, "1", "a").await?.issue_id;
    let mut connection = PgConnection::connect(&database.url()).await?;
    let mut holder = connection.begin().await?;
    sqlx::query("SELECT 1 FROM issues FOR UPDATE").execute(&mut *holder).await?;

    // More callers than connections: some wait for the lock, others for a connection.
    let mut callers = tokio::task::JoinSet::new();
    for n in 0..6 {
        let store = Arc::clone(&store);
        callers.spawn(async move { record(&*store, "1", &format!("b-{n}")).await });
    }
    while let Some(result) = callers.join_next().await {
        let result = result?;
        assert!(result.as_ref().is_err_and(IssueError::is_transient), "{result:?}");
    }
    holder.rollback().await?;

    let patient = open(&database.url()).await?;
    for n in 0..6 {
        record(&*patient, "1", &format!("b-{n}")).await?;
    }
    assert_eq!(patient.issue(issue).await?.unwrap().pending_events, 7);
    assert_eq!(patient.check_consistency(10).await?.discrepancies, []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_on_a_locked_sqlite_file_time_out_and_lose_nothing() -> Result<()> {
    let file = File::new()?;
    let store = store_with_short_timeout(&file.url).await?;
    let issue = record(&*store, "1", "a").await?.issue_id;
    let mut connection = SqliteConnection::connect(&file.url).await?;
    let holder = connection.begin_with("BEGIN IMMEDIATE").await?;
    let busy = record(&*store, "1", "b").await;
    assert!(busy.as_ref().is_err_and(IssueError::is_transient), "{busy:?}");
    // Reads are not blocked.
    assert_eq!(store.issue(issue).await?.unwrap().pending_events, 1);
    holder.rollback().await?;

    let patient = open(&file.url).await?;
    record(&*patient, "1", "b").await?;
    assert_eq!(patient.issue(issue).await?.unwrap().pending_events, 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_call_takes_effect_completely_or_not_at_all() -> Result<()> {
    let (file, database) = (File::new()?, Postgres::shared()?.database()?);
    for url in [file.url.clone(), database.url()] {
        let store = open(&url).await?;
        for n in 0..40_u64 {
            let events = [event("1", &format!("{n}-a")), event("2", &format!("{n}-b"))];
            let debounce = DebounceWindow::default();
            let call = store.record(&events, &debounce);
            // A different moment each time, from immediately to after the end.
            let _ = tokio::time::timeout(Duration::from_micros(n * 150), call).await;
        }
        record(&*store, "3", "last").await?;
        let report = store.check_consistency(10).await?;
        assert_eq!(report.discrepancies, []);
        assert_eq!(report.recorded % 2, 1, "both events of a batch, or none");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_with_another_default_isolation_level_works() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    database.query(&format!(
        "ALTER DATABASE {} SET default_transaction_isolation = 'serializable'",
        database.name()
    ))?;
    let store = open(&database.url()).await?;
    for round in 0..10 {
        let mut callers = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let store = Arc::clone(&store);
            let key = round.to_string();
            callers.spawn(async move { record(&*store, "1", &key).await });
        }
        let mut new = 0;
        while let Some(recorded) = callers.join_next().await {
            new += usize::from(!recorded??.duplicate);
        }
        assert_eq!(new, 1);
    }
    assert_eq!(store.check_consistency(10).await?.discrepancies, []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outbox_row_of_another_process_wakes_a_waiting_deliverer_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let (waiter, other) = (open(&database.url()).await?, open(&database.url()).await?);
    // The first wait completes when LISTEN has started; later wake-ups have a cause.
    waiter.outbox_wake(Duration::from_secs(60)).await;
    let waiting = tokio::spawn(async move {
        let started = tokio::time::Instant::now();
        waiter.outbox_wake(Duration::from_secs(60)).await;
        started.elapsed()
    });
    let issue = record(&*other, "1", "a").await?.issue_id;
    let claims = other.claim(&[issue], &ClaimOptions::new("w")).await?;
    let Claim::Won(claimed) = &claims[0] else { panic!("{claims:?}") };
    let reply =
        NewOutboxRow { kind: OutboxKind::Event, target: String::new(), payload: "{}".into() };
    let (epoch, outbox) = (claimed.epoch, vec![reply]);
    other
        .complete(&[RunCompletion { issue_id: issue, epoch, outbox, ..RunCompletion::default() }])
        .await?;
    assert!(waiting.await? < Duration::from_secs(30));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_aborted_by_a_deadlock_is_retried() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    // The store's connections detect deadlocks early, so their call is aborted and not the other.
    let name = database.name();
    database.query(&format!("ALTER DATABASE {name} SET deadlock_timeout = '300ms'"))?;
    let store = open(&database.url()).await?;
    let mut connection = PgConnection::connect(&database.url()).await?;
    sqlx::query("SET deadlock_timeout = '60s'").execute(&mut connection).await?;
    let found = format!("SELECT deadlocks FROM pg_stat_database WHERE datname = '{name}'");
    // One deadlock is enough; on a slow machine the detection may run before there is one.
    for round in 0.. {
        let first = record(&*store, "1", &format!("{round}-a")).await?.issue_id;
        let second = record(&*store, "2", &format!("{round}-b")).await?.issue_id;
        let mut other = connection.begin().await?;
        let lock = "SELECT 1 FROM issues WHERE id = $1 FOR UPDATE";
        sqlx::query(lock).bind(second.0).execute(&mut *other).await?;
        let claiming = tokio::spawn({
            let store = Arc::clone(&store);
            async move { store.claim(&[first, second], &ClaimOptions::new("w")).await }
        });
        // Wait until the claim has locked the first issue and waits for the second.
        let waits = "SELECT count(*) FROM pg_stat_activity
                     WHERE wait_event_type = 'Lock' AND datname = current_database()";
        while database.query(waits)? != "1" && !claiming.is_finished() {}
        sqlx::query(lock).bind(first.0).execute(&mut *other).await?;
        other.commit().await?;
        match claiming.await? {
            Ok(claims) => {
                for claim in claims {
                    let Claim::Won(claimed) = claim else { panic!("{claim:?}") };
                    let (issue_id, epoch) = (claimed.issue.id, claimed.epoch);
                    let event_log_ids = claimed.events.iter().map(|event| event.id).collect();
                    let run = RunCompletion {
                        issue_id,
                        epoch,
                        event_log_ids,
                        ..RunCompletion::default()
                    };
                    store.complete(&[run]).await?;
                }
            }
            Err(error) => assert!(error.to_string().contains("lock timeout"), "{error}"),
        }
        if database.query(&found)? != "0" {
            return Ok(());
        }
        assert!(round < 100, "there was a deadlock");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_consistency_check_resumes_after_its_last_page() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let store = store_with_short_timeout(&database.url()).await?;
    for issue in ["1", "2", "3"] {
        record(&*store, issue, issue).await?;
    }
    let first = store.check_consistency_page(None, 2).await?;
    let mut connection = PgConnection::connect(&database.url()).await?;
    let mut holder = connection.begin().await?;
    sqlx::query("LOCK TABLE event_logs").execute(&mut *holder).await?;
    let failed = store.check_consistency_page(first.resume_after, 2).await;
    assert!(failed.as_ref().is_err_and(IssueError::is_transient), "{failed:?}");
    holder.rollback().await?;
    // Another process resumes it, and finds what is inconsistent in the rest.
    database.query("UPDATE issues SET pending_events = 7 WHERE external_issue_id = '3'")?;
    let rest = open(&database.url()).await?.check_consistency_page(first.resume_after, 2).await?;
    assert_eq!((rest.issues, rest.discrepancies_total, rest.resume_after), (1, 1, None));
    Ok(())
}

/// Reading one event log takes 10 ms, so 300 issues take longer than a call may, and ten do not.
#[tokio::test(flavor = "multi_thread")]
async fn a_consistency_check_that_takes_too_long_goes_on_in_smaller_pages() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let store = store_with_short_timeout(&database.url()).await?;
    for issue in 0..300 {
        record(&*store, &issue.to_string(), &issue.to_string()).await?;
    }
    database.query("ALTER TABLE event_logs RENAME TO fast_event_logs")?;
    database.query(
        "CREATE VIEW event_logs AS SELECT * FROM fast_event_logs WHERE pg_sleep(0.01) IS NOT NULL",
    )?;
    let page = store.check_consistency_page(None, 300).await;
    assert!(page.as_ref().is_err_and(IssueError::is_transient), "{page:?}");

    let fitting = store.check_fitting_page(None, 300).await?;
    assert!((1..300).contains(&fitting.issues) && fitting.resume_after.is_some(), "{fitting:?}");
    let all = headwater_issue::check_consistency(store.as_ref()).await?;
    assert_eq!((all.issues, all.recorded, all.is_consistent()), (300, 300, true));
    Ok(())
}
