//! Calls of a pull fail: no other message is affected.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{PullRequest, Puller, Queue};
use headwater_stream::{Fields, SettleAction};

use crate::fixture::{Fixture, GROUP, short_leases};
use crate::lossy_backend::LossyBackend;

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
