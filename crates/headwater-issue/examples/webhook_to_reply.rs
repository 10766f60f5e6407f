//! Two events of one issue are processed in one run, and the reply is delivered. In one process, without servers.

use std::sync::Arc;

use headwater_issue::{
    DeliverError, HandlerError, Inbox, InboxConfig, NewEvent, Nudger, Outbox, OutboxConfig,
    OutboxRow, Resolution, Run, StoreOptions, Worker, WorkerConfig, connect,
};
use headwater_queue::Queue;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = connect("sqlite::memory:", &StoreOptions::default()).await?;
    store.ensure_integration("shop", "gitlab").await?;
    let streams = headwater_stream::connect("embedded:memory", &Default::default()).await?;
    let nudger = Nudger::new(Arc::clone(&streams));
    let inbox = Inbox::new(Arc::clone(&store), nudger.clone(), InboxConfig::default())?;
    for text in [r#""My parcel is late.""#, r#""It has come!""#] {
        inbox.record(NewEvent::new("shop", "42", "note", text)).await?;
    }
    let handler = |run: Run| async move {
        let answer = format!(r#""You wrote {} times.""#, run.events().len());
        Ok::<_, HandlerError>(Resolution::new().reply(answer))
    };
    let worker = Worker::new(Arc::clone(&store), nudger, handler, WorkerConfig::default())?;
    worker.run(&Queue::new(streams), store.outbox_wake(std::time::Duration::from_secs(10))).await;

    let print = |row: OutboxRow| async move {
        println!("issue {}: {} ({})", row.external_issue_id, row.payload, row.idempotency_key);
        Ok::<_, DeliverError>(())
    };
    assert_eq!(Outbox::new(store, print, OutboxConfig::default())?.run_once().await?, 1);
    Ok(())
}

#[test]
fn the_reply_is_delivered() {
    main().expect("one reply for two events");
}
