//! What topics cost on which nothing happens.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Message};

use crate::{Effort, GROUP, Place};

/// The kernel counts processor time in hundredths of a second, on every Linux there is.
const TICKS_PER_SECOND: f64 = 100.0;
/// Until the last subscription has found its partition.
const SETTLE: Duration = Duration::from_secs(10);

pub(crate) async fn measure(place: &Place, effort: &Effort) -> Result<()> {
    let mut subscriptions = Vec::new();
    let began = Instant::now();
    for number in 0..effort.idle_topics {
        let topic = place.topic(&format!("idle-{number}"), 1).await?;
        let handler = |_: Message| std::future::ready(());
        let config = ConsumerConfig::default();
        subscriptions.push(place.queue.subscribe(&topic.name, GROUP, handler, config).await?);
    }
    while subscriptions.iter().any(|subscription| subscription.stats().partitions == 0) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let joined = began.elapsed();
    tokio::time::sleep(SETTLE).await;
    let (start, before) = (Instant::now(), processor_seconds()?);
    tokio::time::sleep(effort.idle).await;
    let share = (processor_seconds()? - before) / start.elapsed().as_secs_f64();
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

/// The processor time of this process so far, its own and the kernel's for it.
fn processor_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The name may hold anything, so what follows it is counted from its end.
    let (_, after_name) = stat.rsplit_once(')').context("no name")?;
    let ticks = |field: usize| -> Result<f64> {
        Ok(after_name.split_whitespace().nth(field).context("too few fields")?.parse()?)
    };
    Ok((ticks(11)? + ticks(12)?) / TICKS_PER_SECOND)
}
