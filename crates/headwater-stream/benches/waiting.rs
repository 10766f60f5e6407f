//! What it costs a process to wait for nothing: a thousand delay sets and a thousand streams, idle.
//!
//! Run it with `cargo xtask bench`. The figures that count are the share of one core and the number of connections.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use headwater_stream::{ConsumerName, DelayName, GroupName, Options, StreamName, connect};
use headwater_testkit::Redis;

const SETS: usize = 1000;
const STREAMS: usize = 1000;
/// How long each call waits before it is made anew.
const WAIT: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> Result<()> {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let time = Duration::from_secs(if quick { 10 } else { 30 });
    let redis = Redis::start()?;
    println!("\n## {SETS} delay sets and {STREAMS} streams, waited for and idle\n");
    for url in ["embedded:memory".to_owned(), redis.url()] {
        let name = url.split(':').next().unwrap_or_default().to_owned();
        let backend = connect(&url, &Options::default()).await?;
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..SETS {
            let backend = backend.clone();
            let delays = DelayName::new(format!("later-{number}"))?;
            tasks.spawn(async move {
                loop {
                    backend.wait_due(&delays, WAIT).await?;
                }
            });
        }
        let mut reader =
            backend.reader(&GroupName::new("workers")?, &ConsumerName::new("ann")?).await?;
        let streams = (0..STREAMS).map(|number| StreamName::new(format!("orders-{number}")));
        let streams = streams.collect::<Result<Vec<_>, _>>()?;
        tasks.spawn(async move {
            loop {
                reader.read(&streams, 256, WAIT).await?;
            }
        });
        tokio::time::sleep(Duration::from_secs(3)).await;
        let (ours, server, start) =
            (cpu_ticks("self")?, cpu_ticks(&redis.pid()?.to_string())?, Instant::now());
        tokio::time::sleep(time).await;
        let percent = |ticks: u64| ticks as f64 / start.elapsed().as_secs_f64();
        let ours = percent(cpu_ticks("self")? - ours);
        let server = percent(cpu_ticks(&redis.pid()?.to_string())? - server);
        let clients = redis.command(&["CLIENT", "LIST"])?.text();
        let connections = clients.lines().filter(|line| line.contains("name=headwater")).count();
        println!(
            "{name:10} process {ours:5.2} % of a core, server {server:5.2} %, {connections} connections"
        );
        if let Some(ended) = tasks.try_join_next() {
            let ended: Result<(), headwater_stream::StreamError> = ended?;
            ended?;
        }
        tasks.shutdown().await;
    }
    Ok(())
}

/// The processor time that a process has used, in ticks of 10 ms: so per second it is percent.
fn cpu_ticks(process: &str) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    let (_, rest) = stat.rsplit_once(") ").context("no process name")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}
