//! Failures of the database do not count as attempts or crashes of an issue.
#![cfg(all(feature = "sqlite", feature = "postgres"))]

mod support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    HandlerError, InboxConfig, Resolution, Run, StoreOptions, WorkerConfig, connect,
};
use headwater_stream::clock::{Clock, SystemClock};
use headwater_testkit::{Postgres, Proxy};
use support::{Backends, System, wait_until};
use tokio::sync::watch;

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_lapses_while_the_database_is_unavailable_is_not_a_crash() -> Result<()> {
    let server = Postgres::shared()?;
    let database = server.database()?;
    let direct = Backends::named(&database.url(), "embedded:memory").store().await?;
    let proxy = Proxy::start(server.addr())?;
    let streams = Backends::named("", "embedded:memory").streams().await?;
    let options = StoreOptions { call_deadline: Duration::from_secs(1), ..StoreOptions::default() };
    let store = connect(&database.url_at(proxy.addr()), &options).await?;
    let system = System::on(store, streams, InboxConfig::default())?;

    // The first run ends when its claim is lost.
    let attempts: Arc<Mutex<Vec<u32>>> = Arc::default();
    let runs = watch::Sender::new(0);
    let handler = {
        let (attempts, runs) = (Arc::clone(&attempts), runs.clone());
        move |run: Run| {
            let (attempts, runs) = (Arc::clone(&attempts), runs.clone());
            async move {
                let is_first = {
                    let mut attempts = attempts.lock().expect("not poisoned");
                    attempts.push(run.attempt());
                    attempts.len() == 1
                };
                runs.send_modify(|runs| *runs += 1);
                if is_first {
                    std::future::pending::<()>().await;
                }
                Ok::<_, HandlerError>(Resolution::new())
            }
        }
    };
    let config = WorkerConfig {
        claim_ttl: Duration::from_secs(3),
        heartbeat_every: Duration::from_millis(500),
        ..WorkerConfig::default()
    };
    // There is no sweeper: only the worker can release the claim.
    let worker = system.start(handler, config)?;
    let issue_id = system.record("1", "a").await?.issue_id;
    runs.subscribe().wait_for(|runs| *runs == 1).await?;

    proxy.stall()?;
    wait_until("the end of the claim", || async {
        let issue = direct.issue(issue_id).await.expect("the store replies").expect("it exists");
        issue.claim_expires_at.is_some_and(|end| end < SystemClock.now())
    })
    .await?;
    proxy.heal()?;

    wait_until("the second run", || async {
        let issue = direct.issue(issue_id).await.expect("the store replies").expect("it exists");
        issue.pending_events == 0
    })
    .await?;
    assert_eq!(*attempts.lock().expect("not poisoned"), [1, 1]);
    worker.stop().await
}
