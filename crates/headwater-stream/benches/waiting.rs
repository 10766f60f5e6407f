//! Cost of idle waiting: a thousand delay sets and a thousand streams without entries.
//!
//! Run it with `cargo xtask bench`. The relevant figures are the CPU use of one core and the number of connections.

use std::time::{Duration, Instant};

use anyhow::Result;
use headwater_stream::{ConsumerName, DelayName, GroupName, Options, StreamName, connect};
use headwater_testkit::Redis;
use headwater_testkit::bench::{Request, processor_seconds};

const SETS: usize = 1000;
const STREAMS: usize = 1000;
/// How long each call blocks before it is repeated.
const WAIT: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> Result<()> {
    let time = Duration::from_secs(if Request::from_arguments().quick { 10 } else { 30 });
    let redis = Redis::start()?;
    println!("\n## Waiting on {SETS} idle delay sets and {STREAMS} idle streams\n");
    for url in ["embedded:memory".to_owned(), redis.url()] {
        let name = url.split(':').next().unwrap_or_default().to_owned();
        let backend = connect(&url, &Options::default()).await?;
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..SETS {
            let backend = backend.clone();
            let delays = DelayName::new(format!("later-{number}"))?;
            tasks.spawn(async move {
                loop {
                    backend.wait_until_due(&delays, WAIT).await?;
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
        let of_server = Some(redis.pid()?);
        let (ours, server, start) =
            (processor_seconds(None)?, processor_seconds(of_server)?, Instant::now());
        tokio::time::sleep(time).await;
        let percent = |seconds: f64| 100.0 * seconds / start.elapsed().as_secs_f64();
        let ours = percent(processor_seconds(None)? - ours);
        let server = percent(processor_seconds(of_server)? - server);
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
