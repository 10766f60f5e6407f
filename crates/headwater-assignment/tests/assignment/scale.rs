//! Many streams and consumers, some of which die.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_assignment::{Assignment, AssignmentConfig, Disowned, Notification, OnExpired};
use headwater_stream::{Retention, StreamName};

use crate::fixture::{Consumer, ServiceFixture, eventually};

const STREAMS: usize = 2000;
const CONSUMERS: usize = 10;
const KILLED: usize = 2;

everywhere!(two_thousand_streams_survive_the_death_of_two_of_ten_consumers);

async fn two_thousand_streams_survive_the_death_of_two_of_ten_consumers(fixture: &ServiceFixture) {
    let config = AssignmentConfig {
        // A slow machine needs time for so many; a consumer that renews late loses them all.
        heartbeat_every: Duration::from_secs(10),
        sweep_every: Duration::from_secs(1),
        on_expired: OnExpired::Claim,
        ..Default::default()
    };
    let mut consumers = Vec::new();
    for _ in 0..CONSUMERS {
        consumers.push(ListeningConsumer::new(fixture.consumer("c", config.clone()).await));
    }
    add_many(fixture).await;
    eventually("all streams to have an owner", || async { count(&consumers) == STREAMS }).await;
    // Those with the most streams die: the worst case.
    consumers.sort_by_key(|consumer| std::cmp::Reverse(consumer.assignment.owned().len()));

    // When two die, then the others own all streams, each once.
    let epochs = owners(&consumers);
    let orphans: Vec<StreamName> =
        consumers.drain(..KILLED).flat_map(|killed| killed.die()).collect();
    assert!(!orphans.is_empty());
    eventually("the survivors to own them all", || async { count(&consumers) == STREAMS }).await;

    // No other consumer was disowned.
    for consumer in &consumers {
        assert_eq!(consumer.received.lock().unwrap().disowned, []);
    }
    let after = owners(&consumers);
    assert_eq!(after.len(), STREAMS, "each has one owner");
    for (stream, epoch) in &after {
        if orphans.contains(stream) {
            assert!(*epoch > epochs[stream], "a new owner has a new epoch");
        } else {
            assert_eq!(*epoch, epochs[stream], "a live owner keeps its streams");
        }
    }
    // Every consumer was notified of each of its streams exactly once.
    for consumer in &consumers {
        let added = || consumer.received.lock().unwrap().added;
        let owned = consumer.assignment.owned().len();
        eventually("the last notification", || async { added() == owned }).await;
    }
}

struct ListeningConsumer {
    assignment: Assignment,
    received: Arc<Mutex<ReceivedCounts>>,
}

#[derive(Default)]
struct ReceivedCounts {
    added: usize,
    disowned: Vec<Disowned>,
}

impl ListeningConsumer {
    fn new(consumer: Consumer) -> Self {
        let Consumer { assignment, mut notifications } = consumer;
        let received: Arc<Mutex<ReceivedCounts>> = Arc::default();
        let shared = Arc::clone(&received);
        tokio::spawn(async move {
            while let Some(notification) = notifications.recv().await {
                let mut received = shared.lock().unwrap();
                match notification {
                    Notification::Added(_) => received.added += 1,
                    Notification::Disowned { reason, .. } => received.disowned.push(reason),
                    _ => {}
                }
            }
        });
        Self { assignment, received }
    }

    fn die(self) -> Vec<StreamName> {
        self.assignment.owned().iter().map(|owned| owned.stream().clone()).collect()
    }
}

fn count(consumers: &[ListeningConsumer]) -> usize {
    consumers.iter().map(|consumer| consumer.assignment.owned().len()).sum()
}

/// The owned streams and their epochs; two owners of one stream are a failure.
fn owners(consumers: &[ListeningConsumer]) -> HashMap<StreamName, headwater_stream::Epoch> {
    let mut owners = HashMap::new();
    for owned in consumers.iter().flat_map(|consumer| consumer.assignment.owned()) {
        let before = owners.insert(owned.stream().clone(), owned.epoch());
        assert_eq!(before, None, "{} has two owners", owned.stream());
    }
    owners
}

async fn add_many(fixture: &ServiceFixture) {
    let backend = fixture.connect().await;
    let entries: Vec<_> = (0..STREAMS)
        .map(|i| {
            let json = format!(r#"{{"DataStreamName": "{}"}}"#, fixture.stream(&i.to_string()));
            headwater_stream::Fields::new([("lbs-input", json)])
        })
        .collect();
    backend.append(&fixture.input(), &entries, &Retention::KEEP_ALL).await.unwrap();
}
