//! Keyspace notification flags of the server are respected, and fail-over works with any of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use headwater_assignment::{AssignmentConfig, OnExpired};
use headwater_testkit::Redis;
use tokio::time::{Instant, sleep};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, span};

use crate::fixture::{QUIET, SLACK, ServiceFixture, quick};

/// A sweep that is too slow to help.
fn by_hints_alone() -> AssignmentConfig {
    AssignmentConfig { sweep_every: Duration::from_secs(60), ..quick() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_flags_are_set() {
    let redis = Redis::builder().notify("").start().unwrap();
    fails_over(&ServiceFixture::at(redis.url()), by_hints_alone()).await;
    assert_eq!(flags(&redis), sorted("xE"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sufficient_flags_are_not_changed() {
    let redis = Redis::builder().notify("Ex").start().unwrap();
    fails_over(&ServiceFixture::at(redis.url()), by_hints_alone()).await;
    assert_eq!(flags(&redis), sorted("xE"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_flags_are_kept() {
    let redis = Redis::builder().notify("Kgs").start().unwrap();
    fails_over(&ServiceFixture::at(redis.url()), by_hints_alone()).await;
    assert_eq!(flags(&redis), sorted("KgsxE"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notifications_work_on_another_database() {
    let redis = Redis::start().unwrap();
    let fixture = ServiceFixture::at(format!("{}7", redis.url()));
    fails_over(&fixture, by_hints_alone()).await;
}

/// On one thread, so that the test sees what is logged.
#[tokio::test]
async fn without_permission_to_set_flags_the_sweep_is_used_and_logged_once() {
    let redis = Redis::builder().user("app", "secret", "~* &* +@all -config").start().unwrap();
    let warnings = Warnings::default();
    let fixture = ServiceFixture::at(redis.url());
    {
        let _guard = tracing::subscriber::set_default(warnings.clone());
        let _consumer = fixture.consumer("c", quick()).await;
        sleep(3 * quick().sweep_every).await;
    }
    assert_eq!(warnings.0.load(Ordering::Relaxed), 1);

    // And it works without notifications, at any phase of the sweeps.
    let heartbeat_every = quick().heartbeat_every;
    let config = AssignmentConfig { sweep_every: heartbeat_every, ..quick() };
    let places = [(); 3].map(|()| ServiceFixture::at(redis.url()));
    let rounds = places.iter().zip(0..).map(|(fixture, round)| {
        let config = config.clone();
        async move {
            sleep(heartbeat_every * round / 3).await;
            fails_over(fixture, config).await;
        }
    });
    futures_util::future::join_all(rounds).await;
    assert_eq!(flags(&redis), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_notifications_a_lease_key_of_another_type_blocks_fail_over_of_its_own_stream_only()
{
    let redis = Redis::builder().user("app", "secret", "~* &* +@all -config").start().unwrap();
    let fixture = ServiceFixture::at(redis.url());
    let mut owner = fixture.consumer("owner", quick()).await;
    let names = ["s0", "s1", "s2", "s3", "s4", "bad"];
    let mut streams = fixture.add(&names).await;
    owner.added_many(names.len()).await;
    let bad = streams.pop().unwrap();
    owner.die();
    let key = fixture.lease(&bad);
    redis.command(&["DEL", key.as_str()]).unwrap();
    redis.command(&["RPUSH", key.as_str(), "foreign"]).unwrap();

    let config = AssignmentConfig { on_expired: OnExpired::Claim, ..quick() };
    let mut survivor = fixture.consumer("survivor", config).await;

    let mut acquired = survivor.added_many(streams.len()).await;
    acquired.sort_by_key(|owned| owned.stream().clone());
    assert!(acquired.iter().map(|owned| owned.stream()).eq(&streams), "{acquired:?}");
    // A new stream with such a key does not block other streams either.
    let fresh = fixture.lease(&fixture.stream("fresh-bad"));
    redis.command(&["HSET", fresh.as_str(), "foreign", "1"]).unwrap();
    fixture.add(&["fresh-bad", "fresh"]).await;
    assert_eq!(survivor.added().await.stream(), &fixture.stream("fresh"));

    // When an operator has deleted the key, the stream is acquired like any other.
    redis.command(&["DEL", key.as_str()]).unwrap();
    assert_eq!(survivor.added().await.stream(), &bad);
    redis.command(&["DEL", fresh.as_str()]).unwrap();
    assert_eq!(survivor.added().await.stream(), &fixture.stream("fresh-bad"));
}

/// Kills an owner and expects a survivor to own its stream soon after the lease has expired.
async fn fails_over(fixture: &ServiceFixture, config: AssignmentConfig) {
    let mut owner = fixture.consumer("owner", config.clone()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    owner.added().await;
    // Half an interval apart, so that no sweep coincides with the expiration of the lease.
    sleep(config.heartbeat_every / 2).await;
    let mut survivor = fixture.consumer("survivor", config.clone()).await;
    sleep(QUIET).await;

    owner.die();
    let died = Instant::now();
    let lease = fixture.connect().await.leases(&[fixture.lease(&stream)]).await.unwrap().remove(0);
    assert_eq!(survivor.expired().await, stream);
    survivor.assignment.claim(&stream).await.unwrap();
    let limit = lease.unwrap().remaining + SLACK;
    assert!(died.elapsed() < limit, "after {:?}, not {limit:?}", died.elapsed());
}

fn flags(redis: &Redis) -> String {
    let reply = redis.command(&["CONFIG", "GET", "notify-keyspace-events"]).unwrap();
    sorted(&reply.items()[1].text())
}

fn sorted(flags: &str) -> String {
    let mut flags: Vec<char> = flags.chars().collect();
    flags.sort_unstable();
    flags.into_iter().collect()
}

/// Counts warnings about the sweep.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Message(String);
        impl Visit for Message {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        if message.0.contains("sweep") {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
