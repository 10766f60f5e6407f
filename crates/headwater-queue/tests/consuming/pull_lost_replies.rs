//! Calls of a pull fail: no other message is affected.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{LeaseResult, Outcome, PullRequest, Puller, Queue, metrics};
use headwater_stream::{Fields, SettleAction};

use crate::fixture::{Fixture, GROUP, short_leases};
use crate::lossy_backend::LossyBackend;
use crate::metric_recorder::{counter_value, install_metric_recorder};

fn puller(fixture: &Fixture) -> Result<(Puller, Arc<LossyBackend>)> {
    let lossy = LossyBackend::new(Arc::clone(&fixture.backend));
    let queue = Queue::with_config(lossy.clone(), short_leases())?;
    Ok((queue.puller(), lossy))
}

fn request(max: usize) -> PullRequest {
    PullRequest { max, wait: Duration::from_secs(20), lease: Duration::from_secs(60) }
}

#[tokio::test]
async fn held_messages_are_released_if_a_reader_cannot_be_closed() -> Result<()> {
    let fixture = Fixture::embedded().await?;
    fixture.create(4).await?;
    for partition in 0..4 {
        fixture.send(partition, None, "work").await?;
    }
    let (puller, lossy) = puller(&fixture)?;
    // One message of each partition is read: the others are held for the next caller.
    assert_eq!(puller.pull(&fixture.topic, GROUP, request(1)).await?.len(), 1);
    lossy.fail_closes();
    puller.close().await;
    let mut released = 0;
    for partition in 0..4 {
        let rows = fixture.pending(partition).await?;
        assert_eq!(rows.len(), 1, "{rows:?}");
        released += usize::from(rows[0].consumer.as_str() == SettleAction::RELEASED);
    }
    assert_eq!(released, 3);
    Ok(())
}

#[tokio::test]
async fn a_refused_message_that_cannot_be_settled_fails_no_pull() -> Result<()> {
    let fixture = Fixture::embedded().await?;
    fixture.create(2).await?;
    fixture.append(0, Fields::new([("payload", "odd"), ("retryCount", "many")])).await?;
    fixture.send(1, None, "work").await?;
    let (puller, lossy) = puller(&fixture)?;
    lossy.settles.store(1, Ordering::SeqCst);
    let pulled = puller.pull(&fixture.topic, GROUP, request(10)).await?;
    assert_eq!(pulled.len(), 1);
    assert_eq!(pulled[0].message.payload, "work");
    puller.close().await;
    assert_eq!(lossy.settles.load(Ordering::SeqCst), 0, "settling the refused message was tried");
    Ok(())
}

/// More replies are lost than a message may crash consumers.
async fn lost_replies_of_reassignments_do_not_count_as_crashes(fixture: Fixture) -> Result<()> {
    fixture.create(1).await?;
    fixture.send(0, None, "work").await?;
    let (puller, lossy) = puller(&fixture)?;
    let short = PullRequest { lease: Duration::from_secs(1), ..request(1) };
    let first = puller.pull(&fixture.topic, GROUP, short).await?;
    assert_eq!(first[0].message.deliveries, 1);

    // The caller dies.
    lossy.reclaims.store(7, Ordering::SeqCst);
    let again = loop {
        match puller.pull(&fixture.topic, GROUP, short).await {
            Ok(pulled) if pulled.is_empty() => {}
            Ok(mut pulled) => break pulled.remove(0),
            Err(error) => assert!(error.is_transient(), "{error:?}"),
        }
    };
    assert_eq!(lossy.reclaims.load(Ordering::SeqCst), 0);
    assert_eq!((again.message.payload.as_ref(), again.message.deliveries), (&b"work"[..], 2));
    // The lease is a new one, and valid.
    assert_ne!(again.lease, first[0].lease);
    let settled = puller.settle(&fixture.topic, GROUP, vec![(again.lease, Outcome::Done)]).await?;
    assert_eq!(settled, [LeaseResult::Applied]);
    assert_eq!(fixture.dead_letters().await?, []);
    assert!(fixture.pending(0).await?.is_empty());
    puller.close().await;
    Ok(())
}

async fn a_retry_of_a_message_that_the_server_lost_is_counted(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    fixture.create(1).await?;
    for payload in ["deleted", "lost"] {
        fixture.send(0, None, payload).await?;
    }
    let puller = fixture.queue.puller();
    let mut pulled = Vec::new();
    while pulled.len() < 2 {
        pulled.extend(puller.pull(&fixture.topic, GROUP, request(2)).await?);
    }
    let lost = || counter_value(metrics::ANOMALIES, &fixture.topic, "lost_by_the_server");
    let retry = |at: usize| vec![(pulled[at].lease.clone(), Outcome::retry("again"))];
    let stream = fixture.stream(0).await?;

    let first = pulled[0].lease.to_string();
    let id = first.split('/').nth(1).context("the second part is the id")?.parse()?;
    fixture.backend.delete_entries(&stream, &[id]).await?;
    assert_eq!(puller.settle(&fixture.topic, GROUP, retry(0)).await?, [LeaseResult::Expired]);
    assert_eq!(lost(), 0);

    fixture.backend.delete_stream(&stream).await?;
    assert_eq!(puller.settle(&fixture.topic, GROUP, retry(1)).await?, [LeaseResult::Expired]);
    assert_eq!(lost(), 1);
    puller.close().await;
    Ok(())
}

on_every_backend!(
    lost_replies_of_reassignments_do_not_count_as_crashes,
    a_retry_of_a_message_that_the_server_lost_is_counted,
);
