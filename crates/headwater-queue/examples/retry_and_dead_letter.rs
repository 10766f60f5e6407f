//! A failed message is retried; one that keeps failing becomes a dead letter, which can be replayed.
//!
//! `cargo run -p headwater-queue --example retry_and_dead_letter`

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use headwater_queue::{
    Backoff, ConsumerConfig, DeadLetterFilter, DeadLetterQuery, DeadLetterSelection, Message,
    NewMessage, Outcome, ProducerConfig, Queue, ReplayConfig, RetryPolicy,
};
use headwater_stream::{Options, connect};
use tokio::sync::mpsc;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Result {
    let queue = Queue::new(connect("embedded:memory", &Options::default()).await?);
    let producer = queue.producer(ProducerConfig::default())?;

    // Bob's card is declined at the first attempt. Eve's bank is closed until further notice.
    let bank_is_open = Arc::new(AtomicBool::new(false));
    let (payments, mut outcomes) = mpsc::unbounded_channel();
    let handler = {
        let bank_is_open = bank_is_open.clone();
        move |message: Message| {
            let outcome = charge(&message, bank_is_open.load(Ordering::Relaxed));
            let customer = message.key.clone().unwrap_or_default();
            let line = match &outcome {
                Outcome::Done => format!("{customer} paid at attempt {}", message.attempt),
                other => format!("{customer} did not pay: {other:?}"),
            };
            // The receiver may be dropped.
            let _ = payments.send(matches!(outcome, Outcome::Done).then_some(line));
            std::future::ready(outcome)
        }
    };
    let retry = RetryPolicy {
        max_attempts: Some(3),
        backoff: Backoff::Fixed(Duration::from_millis(20)),
        ..Default::default()
    };
    let config = ConsumerConfig { retry, ..Default::default() };
    let subscription = queue.subscribe("payments", "till", handler, config).await?;

    for customer in ["ada", "bob", "eve"] {
        producer.send("payments", NewMessage::keyed(customer, "3.50")).await?;
    }
    let mut paid = 0;
    while paid < 2 {
        if let Some(line) = outcomes.recv().await.ok_or("the handler was dropped")? {
            println!("{line}");
            paid += 1;
        }
    }

    // Eve's payment reached the attempt limit.
    let dead_letters = queue.dead_letters("payments").await?;
    let letter = loop {
        let page = dead_letters.browse(&DeadLetterQuery::default()).await?;
        if let Some(letter) = page.items.into_iter().next() {
            break letter;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    println!("dead letter: {}: {}", letter.key.unwrap_or_default(), letter.reason);

    // The cause is fixed, so the dead letter is replayed unchanged.
    bank_is_open.store(true, Ordering::Relaxed);
    let all = DeadLetterSelection::Matching(DeadLetterFilter::default());
    let report = dead_letters.replay(all, &ReplayConfig::default()).await?;
    println!("replayed: {}", report.replayed);
    let line = loop {
        if let Some(line) = outcomes.recv().await.ok_or("the handler was dropped")? {
            break line;
        }
    };
    println!("{line}");
    subscription.stop().await;
    Ok(())
}

fn charge(payment: &Message, bank_is_open: bool) -> Outcome {
    match payment.key.as_deref() {
        Some("bob") if payment.attempt == 1 => Outcome::retry("the card was declined"),
        Some("eve") if !bank_is_open => Outcome::retry("the bank is closed"),
        _ => Outcome::Done,
    }
}
