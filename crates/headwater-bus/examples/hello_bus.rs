//! Publishes typed events; a live handler receives them at once, a durable group handles them at least once.
//!
//! `cargo run -p headwater-bus --example hello_bus`, or with a Redis URL after `--` and `--features redis`.

use headwater_bus::{
    Event, EventBus, EventBusExt, EventRegistry, ReceivedEvent, StreamedBus, StreamedBusConfig,
    SubscribeOptions,
};
use headwater_stream::{Options, connect};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize, JsonSchema)]
struct Greeted {
    name: String,
}

impl Event for Greeted {
    const TYPE: &'static str = "hello.Greeted";
}

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Result {
    let url = std::env::args().nth(1);
    run(url.as_deref().unwrap_or("embedded:memory")).await.map(drop)
}

async fn run(url: &str) -> Result<Vec<String>> {
    let backend = connect(url, &Options::default()).await?;
    let registry = EventRegistry::builtin().with::<Greeted>()?;
    let bus = StreamedBus::open(backend, registry, StreamedBusConfig::default()).await?;

    // Every subscribed process receives every event ...
    let live =
        |event: ReceivedEvent<Greeted>| async move { println!("{} was greeted", event.name) };
    bus.subscribe::<Greeted>(SubscribeOptions::live(), live).await?;

    // ... and one process of the group handles it, with retries.
    let (letters, mut sent) = mpsc::channel(10);
    let durable = move |event: ReceivedEvent<Greeted>| {
        let letters = letters.clone();
        async move { letters.send(format!("Dear {}", event.name)).await }
    };
    bus.subscribe::<Greeted>(SubscribeOptions::durable("letters"), durable).await?;

    let mut lines = Vec::new();
    for name in ["Ada", "Grace"] {
        let result = bus.publish(Greeted { name: name.to_owned() }).await?.into_result()?;
        println!("stored as {:?} for {} live handler", result.stored, result.handlers_invoked);
        lines.extend(sent.recv().await);
    }
    println!("sent: {}", lines.join(", "));
    bus.close().await?;
    Ok(lines)
}

#[tokio::test]
async fn it_says_hello() -> Result {
    assert_eq!(run("embedded:memory").await?, ["Dear Ada", "Dear Grace"]);
    Ok(())
}
