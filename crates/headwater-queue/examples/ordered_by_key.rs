//! Messages of one key are handled in the order they were sent, even if one of them fails; other keys continue.
//!
//! `cargo run -p headwater-queue --example ordered_by_key`

use std::collections::BTreeMap;
use std::time::Duration;

use headwater_queue::{
    Backoff, ConsumerConfig, Message, MessageOrder, NewMessage, Outcome, Policies, ProducerConfig,
    Queue, RetryPolicy,
};
use headwater_stream::{Options, connect};
use tokio::sync::mpsc;

const CUSTOMERS: [&str; 4] = ["ada", "bob", "cleo", "dan"];
const STEPS: [&str; 3] = ["ordered", "paid", "shipped"];

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let queue = Queue::new(connect("embedded:memory", &Options::default()).await?);
    queue.topics().create("orders", 2, Policies::default()).await?;

    let producer = queue.producer(ProducerConfig::default())?;
    for step in STEPS {
        for customer in CUSTOMERS {
            producer.send("orders", NewMessage::keyed(customer, step)).await?;
        }
    }

    // Bob's card is declined at the first attempt: his later messages wait for the retry, other customers do not.
    let (done, mut progress) = mpsc::unbounded_channel();
    let handler = move |message: Message| {
        let step = String::from_utf8_lossy(&message.payload).into_owned();
        let customer = message.key.clone().unwrap_or_default();
        let declined = customer == "bob" && step == "paid" && message.attempt == 1;
        let outcome = if declined { Outcome::retry("card declined") } else { Outcome::Done };
        let step = if declined { "declined".to_owned() } else { step };
        // The receiver may be dropped.
        let _ = done.send((customer, step));
        std::future::ready(outcome)
    };
    let backoff = Backoff::Fixed(Duration::from_millis(50));
    let config = ConsumerConfig {
        order: MessageOrder::PerKey,
        concurrency: 4,
        retry: RetryPolicy { backoff, ..Default::default() },
        ..Default::default()
    };
    let subscription = queue.subscribe("orders", "shop", handler, config).await?;

    let mut history: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for _ in 0..CUSTOMERS.len() * STEPS.len() + 1 {
        let (customer, step) = progress.recv().await.ok_or("the handler was dropped")?;
        history.entry(customer).or_default().push(step);
    }
    for (customer, steps) in history {
        println!("{customer}: {}", steps.join(", "));
    }
    subscription.stop().await;
    Ok(())
}
