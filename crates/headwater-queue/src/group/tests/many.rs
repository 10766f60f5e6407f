//! The cost of many idle topics.

use std::fs;
use std::time::Duration;

use futures_util::stream::{StreamExt, iter};
use headwater_testkit::Redis;
use tokio::time::{Instant, sleep};

use super::fixture::{Callback, GroupFixture, Member, wait_until};
use crate::config::Mode;
use crate::queue::Queue;

const TOPICS: usize = 1000;
/// Idle time while costs are measured: a few polls and renewals with default settings.
const IDLE: Duration = Duration::from_secs(10);
/// Limit for one member: renewals, polls and topic refreshes, with some margin.
const REQUESTS_PER_SECOND_MAX: u64 = 100;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_idle_topics_cost_one_member_few_requests() {
    let redis = Redis::start().unwrap();
    let fixture = GroupFixture::with_server(redis.url());
    let queue = Queue::new(fixture.connect().await);
    let began = Instant::now();
    let members = join_all(&fixture, &queue).await;
    println!("{TOPICS} topics joined after {:?}", began.elapsed());
    wait_until("everything to be owned", || async {
        members.iter().all(|member| member.owns().len() == 1)
    })
    .await;
    println!("and owned after {:?}", began.elapsed());

    let (requests, cpu_time) = (requests(&redis), cpu_time());
    sleep(IDLE).await;
    let requests = self::requests(&redis) - requests;
    let share = (self::cpu_time() - cpu_time).as_secs_f64() / IDLE.as_secs_f64();
    println!("idle: {requests} requests in {IDLE:?}, {:.2} % of a core", share * 100.0);
    assert!(requests < REQUESTS_PER_SECOND_MAX * IDLE.as_secs(), "{requests} requests");

    // A second process joins; it takes over when the first one leaves.
    let other = Queue::new(fixture.connect().await);
    let began = Instant::now();
    let others = join_all(&fixture, &other).await;
    println!("another process joined after {:?}", began.elapsed());
    sleep(Duration::from_secs(1)).await;
    // One partition per topic: nothing moves.
    assert!(
        members
            .iter()
            .all(|member| member.count(|callback| matches!(callback, Callback::Revoke(_))) == 0)
    );
    let began = Instant::now();
    let leaving = members.into_iter().map(Member::leave);
    iter(leaving).buffer_unordered(64).for_each(|()| async {}).await;
    wait_until("everything to be handed over", || async {
        others.iter().all(|member| member.owns().len() == 1)
    })
    .await;
    println!("and had everything {:?} after the first began to leave", began.elapsed());
}

async fn join_all(fixture: &GroupFixture, queue: &Queue) -> Vec<Member> {
    let names: Vec<String> = (0..TOPICS).map(|at| format!("{}:{at}", fixture.topic)).collect();
    let request =
        names.iter().map(|name| Member::join(queue.clone(), name, fixture, Mode::Owned, None));
    let joined: Vec<_> = iter(request).buffer_unordered(64).collect().await;
    joined.into_iter().map(Result::unwrap).collect()
}

/// Requests processed by the server so far.
fn requests(redis: &Redis) -> u64 {
    let stats = redis.command(&["INFO", "stats"]).unwrap().text();
    let count = stats.lines().find_map(|line| line.strip_prefix("total_reads_processed:"));
    count.unwrap().trim().parse().unwrap()
}

/// CPU time of this process so far.
fn cpu_time() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    // A tick is 10 ms on Linux.
    Duration::from_millis(ticks * 10)
}
