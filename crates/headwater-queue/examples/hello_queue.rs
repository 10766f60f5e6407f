//! Sends a message and handles it: `cargo run -p headwater-queue --example hello_queue`.

use headwater_queue::{ConsumerConfig, Message, NewMessage, ProducerConfig, Queue};
use headwater_stream::{Options, connect};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let queue = Queue::new(connect("embedded:memory", &Options::default()).await?);
    let producer = queue.producer(ProducerConfig::default())?;
    producer.send("greetings", NewMessage::new("hello, queue")).await?;

    let (handled, mut payloads) = tokio::sync::mpsc::channel(1);
    let handler = move |message: Message| {
        let handled = handled.clone();
        async move { handled.send(message.payload).await }
    };
    let config = ConsumerConfig::default();
    let subscription = queue.subscribe("greetings", "printers", handler, config).await?;
    let payload = payloads.recv().await.ok_or("the handler was dropped")?;
    println!("received: {}", String::from_utf8_lossy(&payload));
    subscription.stop().await;
    Ok(())
}
