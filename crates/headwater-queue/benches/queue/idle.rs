//! The cost of idle topics.

use std::time::{Duration, Instant};

use anyhow::Result;
use headwater_queue::{ConsumerConfig, Message};
use headwater_testkit::bench::processor_seconds;

use crate::{BenchServer, Effort, GROUP};

/// Time for the group to become stable.
const STABILIZE: Duration = Duration::from_secs(10);

pub(crate) async fn measure(server: &BenchServer, effort: &Effort) -> Result<()> {
    let mut subscriptions = Vec::new();
    let began = Instant::now();
    for number in 0..effort.idle_topics {
        let topic = server.topic(&format!("idle-{number}"), 1).await?;
        let handler = |_: Message| std::future::ready(());
        let config = ConsumerConfig::default();
        subscriptions.push(server.queue.subscribe(&topic.name, GROUP, handler, config).await?);
    }
    while subscriptions.iter().any(|subscription| subscription.stats().partitions == 0) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let joined = began.elapsed();
    tokio::time::sleep(STABILIZE).await;
    let (start, before) = (Instant::now(), processor_seconds(None)?);
    tokio::time::sleep(effort.idle).await;
    let share = (processor_seconds(None)? - before) / start.elapsed().as_secs_f64();
    println!(
        "  {} idle topics, subscribed in {joined:.1?}: {:.2} % of a core",
        effort.idle_topics,
        share * 100.0
    );
    for subscription in subscriptions {
        subscription.stop().await;
    }
    Ok(())
}
