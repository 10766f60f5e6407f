//! The sequence "Rebalance with Leases", step by step, with two real processes.

use std::time::Duration;

use headwater_queue::Message;
use headwater_stream::{Backend, LeaseInfo, LeaseName, Options, connect};
use headwater_testkit::{Child, Cluster, Redis};
use tokio::time::{Instant, sleep};

use crate::fixture::{GROUP, LIMIT, QueueFixture, fast_config, ordered, wait_until};

/// Consumer A: its handler never completes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started as a child process by other tests of this file"]
async fn role_consumer_a() {
    let mut fixture = QueueFixture::with_server(std::env::var("URL").unwrap());
    fixture.topic = std::env::var("TOPIC").unwrap();
    let handler = |message: Message| {
        println!("HANDLING {}", String::from_utf8_lossy(&message.payload));
        std::future::pending::<()>()
    };
    let queue = fixture.queue().await;
    let _subscription = queue.subscribe(&fixture.topic, GROUP, handler, ordered()).await.unwrap();
    println!("SUBSCRIBED");
    std::future::pending::<()>().await;
}

/// participant L as Lease Keys
struct Leases {
    backend: std::sync::Arc<dyn Backend>,
    names: [LeaseName; 2],
}

impl Leases {
    async fn of(fixture: &QueueFixture) -> Self {
        let topic = &fixture.topic;
        let name = |partition: u16| match fixture.url.starts_with("redis-cluster") {
            true => format!("streaming:mq:lease:{{{topic}:{partition}}}:{GROUP}"),
            false => format!("streaming:mq:lease:{topic}:{GROUP}:{partition}"),
        };
        let names = [0, 1].map(|partition| LeaseName::new(name(partition)).unwrap());
        Self { backend: connect(&fixture.url, &Options::default()).await.unwrap(), names }
    }

    async fn now(&self) -> [Option<LeaseInfo>; 2] {
        self.backend.leases(&self.names).await.unwrap().try_into().unwrap()
    }

    /// Waits until both leases are held by this number of holders.
    async fn until_held_by(&self, holders: usize) -> [LeaseInfo; 2] {
        let until = Instant::now() + LIMIT;
        loop {
            if let [Some(p0), Some(p1)] = self.now().await
                && (p0.holder != p1.holder) == (holders == 2)
            {
                return [p0, p1];
            }
            assert!(Instant::now() < until, "the leases never had {holders} holders");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn rebalance_with_leases(fixture: QueueFixture) {
    fixture.create(2).await;
    let leases = Leases::of(&fixture).await;

    // CA->>L: SETNX lease(p0), EX=15s
    let environment = [("URL", fixture.url.as_str()), ("TOPIC", &fixture.topic)];
    let a = Child::spawn_self("sequence::role_consumer_a", &environment).unwrap();
    a.line_after("SUBSCRIBED", LIMIT).unwrap();
    let [alone, _] = leases.until_held_by(1).await;
    // CB->>L: SETNX lease(p1), EX=15s
    let (handled, mut is_handled) = tokio::sync::mpsc::unbounded_channel();
    let handler = move |message: Message| {
        let _ = handled.send((message.partition, message.deliveries));
        async {}
    };
    let b = fixture.queue().await;
    let b = b.subscribe(&fixture.topic, GROUP, handler, ordered()).await.unwrap();
    let shared = leases.until_held_by(2).await;
    let of_a = usize::from(shared[1].holder == alone.holder);
    assert_eq!(shared[of_a].holder, alone.holder);
    wait_until("B to own its partition", || b.stats().partitions == 1).await;

    // loop renew: CA->>L: EXPIRE lease(p0), CB->>L: EXPIRE lease(p1)
    sleep(fast_config().lease.ttl + fast_config().lease.renew_every).await;
    let renewed = leases.until_held_by(2).await;
    for (before, after) in shared.iter().zip(&renewed) {
        assert_eq!((&before.holder, before.epoch), (&after.holder, after.epoch));
    }

    // note over CA: A crashes
    let keys: Vec<String> = (0..16).map(|n| format!("k{n}")).collect();
    for key in &keys {
        fixture.send(key, 0..1).await;
    }
    a.line_after("HANDLING 0", LIMIT).unwrap();
    let mut of_b = Vec::new();
    while let Ok(next) = tokio::time::timeout(Duration::from_secs(3), is_handled.recv()).await {
        of_b.push(next.unwrap());
    }
    assert!(of_b.iter().all(|(partition, _)| usize::from(*partition) != of_a), "{of_b:?}");
    a.kill9().unwrap();
    let crashed = Instant::now();

    // ... 15s later ...
    // CB->>L: SETNX lease(p0)
    let taken = leases.until_held_by(1).await;
    println!(
        "taken {:?} after the crash; a lease is {:?}",
        crashed.elapsed(),
        fast_config().lease.ttl
    );
    assert_eq!(taken[of_a].holder, shared[1 - of_a].holder);
    assert!(taken[of_a].epoch > shared[of_a].epoch, "a stale owner would be fenced");
    // CB->>P: XAUTOCLAIM(p0, idle>threshold); without waiting for idle time, because the epoch fences A.
    let mut again = Vec::new();
    while again.len() + of_b.len() < keys.len() {
        again.push(tokio::time::timeout(LIMIT, is_handled.recv()).await.unwrap().unwrap());
    }
    assert!(again.iter().all(|(partition, _)| usize::from(*partition) == of_a), "{again:?}");
    assert!(again.iter().any(|(_, deliveries)| *deliveries == 2), "one was in flight at A");
    b.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebalance_with_leases_on_redis() {
    rebalance_with_leases(QueueFixture::with_server(Redis::shared().unwrap().url())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebalance_with_leases_on_a_cluster() {
    rebalance_with_leases(QueueFixture::with_server(Cluster::shared().unwrap().url())).await;
}
