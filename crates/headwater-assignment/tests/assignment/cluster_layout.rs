//! Requirements of a Redis Cluster on service names.

use std::time::Duration;

use headwater_assignment::{Assignment, AssignmentConfig};
use headwater_stream::StreamError;
use headwater_testkit::{Cluster, unique};
use tokio::time::Instant;

use crate::fixture::{ServiceFixture, quick};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_without_a_hash_tag_is_rejected_at_the_start() {
    let fixture = ServiceFixture::cluster();
    let service = unique("untagged");
    let started = Assignment::start(fixture.connect().await, &service, "c", quick()).await;
    match started {
        Err(StreamError::Invalid { what, problem }) => {
            assert_eq!(what, format!("the service name `{service}`"));
            assert!(problem.contains(&format!("`{{{service}}}`")), "{problem}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expirations_are_reported_by_every_primary() {
    // Given three services whose leases are on three nodes, and a sweep that is too slow to help.
    let cluster = Cluster::start().unwrap();
    let config = AssignmentConfig { sweep_every: Duration::from_secs(60), ..quick() };
    let mut nodes = std::collections::BTreeMap::new();
    while nodes.len() < 3 {
        let fixture = ServiceFixture::in_cluster(&cluster);
        let slot = cluster.slot_of(fixture.input().as_str()).unwrap();
        nodes.entry(cluster.primary_of_slot(slot).unwrap().port()).or_insert(fixture);
    }
    let fails_over = async |fixture: &ServiceFixture| {
        let mut owner = fixture.consumer("owner", config.clone()).await;
        let stream = fixture.add(&["s"]).await.remove(0);
        owner.added().await;
        let mut survivor = fixture.consumer("survivor", config.clone()).await;
        tokio::time::sleep(Duration::from_millis(300)).await;

        owner.die();
        let died = Instant::now();
        assert_eq!(survivor.expired().await, stream);
        survivor.assignment.claim(&stream).await.unwrap();
        assert!(died.elapsed() < config.sweep_every, "after {:?}", died.elapsed());
    };
    futures_util::future::join_all(nodes.values().map(fails_over)).await;
}
