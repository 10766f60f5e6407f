//! Many streams, many consumers, and some of them die.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_assignment::{Assignment, AssignmentConfig, Disowned, Notification, OnExpired};
use headwater_stream::{Retention, StreamName};

use crate::place::{Consumer, Place, eventually};

const STREAMS: usize = 2000;
const CONSUMERS: usize = 10;
const KILLED: usize = 2;

everywhere!(two_thousand_streams_survive_the_death_of_two_of_ten_consumers);

async fn two_thousand_streams_survive_the_death_of_two_of_ten_consumers(place: &Place) {
    let config = AssignmentConfig {
        // A busy machine needs its time for so many; whoever is late with them all loses them.
        heartbeat_every: Duration::from_secs(10),
        sweep_every: Duration::from_secs(1),
        on_expired: OnExpired::Claim,
        ..Default::default()
    };
    let mut consumers = Vec::new();
    for _ in 0..CONSUMERS {
        consumers.push(Listening::new(place.consumer("c", config.clone()).await));
    }
    add_many(place).await;
    eventually("all streams to have an owner", || async { count(&consumers) == STREAMS }).await;
    // Those with the most die: that is the most there is to lose.
    consumers.sort_by_key(|consumer| std::cmp::Reverse(consumer.assignment.owned().len()));

    // When two die, then the others have it all, and nobody has anything twice.
    let epochs = owners(&consumers);
    let orphans: Vec<StreamName> =
        consumers.drain(..KILLED).flat_map(|killed| killed.die()).collect();
    assert!(!orphans.is_empty());
    eventually("the survivors to own them all", || async { count(&consumers) == STREAMS }).await;

    // Nobody else was disowned.
    for consumer in &consumers {
        assert_eq!(consumer.heard.lock().unwrap().taken_away, []);
    }
    let after = owners(&consumers);
    assert_eq!(after.len(), STREAMS, "none twice");
    for (stream, epoch) in &after {
        if orphans.contains(stream) {
            assert!(*epoch > epochs[stream], "a new owner has a new epoch");
        } else {
            assert_eq!(*epoch, epochs[stream], "what had a living owner stays with it");
        }
    }
    // Everybody heard of every stream it has exactly once.
    for consumer in &consumers {
        let added = || consumer.heard.lock().unwrap().added;
        let owned = consumer.assignment.owned().len();
        eventually("the last to be heard of", || async { added() == owned }).await;
    }
}

struct Listening {
    assignment: Assignment,
    heard: Arc<Mutex<Heard>>,
}

#[derive(Default)]
struct Heard {
    added: usize,
    taken_away: Vec<Disowned>,
}

impl Listening {
    fn new(consumer: Consumer) -> Self {
        let Consumer { assignment, mut notifications } = consumer;
        let heard: Arc<Mutex<Heard>> = Arc::default();
        let ears = Arc::clone(&heard);
        tokio::spawn(async move {
            while let Some(notification) = notifications.recv().await {
                let mut heard = ears.lock().unwrap();
                match notification {
                    Notification::Added(_) => heard.added += 1,
                    Notification::Disowned { reason, .. } => heard.taken_away.push(reason),
                    _ => {}
                }
            }
        });
        Self { assignment, heard }
    }

    fn die(self) -> Vec<StreamName> {
        self.assignment.owned().iter().map(|owned| owned.stream().clone()).collect()
    }
}

fn count(consumers: &[Listening]) -> usize {
    consumers.iter().map(|consumer| consumer.assignment.owned().len()).sum()
}

/// Which stream is owned in which epoch; two owners of one stream are a failure.
fn owners(consumers: &[Listening]) -> HashMap<StreamName, headwater_stream::Epoch> {
    let mut owners = HashMap::new();
    for owned in consumers.iter().flat_map(|consumer| consumer.assignment.owned()) {
        let before = owners.insert(owned.stream().clone(), owned.epoch());
        assert_eq!(before, None, "{} has two owners", owned.stream());
    }
    owners
}

async fn add_many(place: &Place) {
    let backend = place.connect().await;
    let entries: Vec<_> = (0..STREAMS)
        .map(|i| {
            let json = format!(r#"{{"DataStreamName": "{}"}}"#, place.stream(&i.to_string()));
            headwater_stream::Fields::new([("lbs-input", json)])
        })
        .collect();
    backend.append(&place.input(), &entries, &Retention::KEEP_ALL).await.unwrap();
}
