//! Sends a message and handles it: `cargo run -p headwater-queue --example hello_queue`.

use headwater_queue::{ConsumerConfig, Message, NewMessage, ProducerConfig, Queue};
use headwater_stream::{Options, connect};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let queue = Queue::new(connect("embedded:memory", &Options::default()).await?);
    let producer = queue.producer(ProducerConfig::default())?;
    producer.send("greetings", NewMessage::new("hello, queue")).await?;

    let (heard, mut hear) = tokio::sync::mpsc::channel(1);
    let handler = move |message: Message| {
        let heard = heard.clone();
        async move { heard.send(message.payload).await }
    };
    let config = ConsumerConfig::default();
    let subscription = queue.subscribe("greetings", "listeners", handler, config).await?;
    let payload = hear.recv().await.ok_or("nobody said anything")?;
    println!("heard: {}", String::from_utf8_lossy(&payload));
    subscription.stop().await;
    Ok(())
}
