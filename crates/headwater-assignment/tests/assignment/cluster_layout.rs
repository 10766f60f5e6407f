//! What a cluster asks of the names of a service.

use std::time::Duration;

use headwater_assignment::{Assignment, AssignmentConfig};
use headwater_stream::StreamError;
use headwater_testkit::{Cluster, unique};
use tokio::time::Instant;

use crate::place::{Place, quick};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_without_a_hash_tag_is_refused_at_the_start() {
    let place = Place::cluster();
    let service = unique("untagged");
    let started = Assignment::start(place.connect().await, &service, "c", quick()).await;
    match started {
        Err(StreamError::Invalid { what, problem }) => {
            assert_eq!(what, format!("the service name `{service}`"));
            assert!(problem.contains(&format!("`{{{service}}}`")), "{problem}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiry_is_heard_from_every_primary() {
    // Given three services whose leases live on three nodes, and a sweep that is too slow to help.
    let cluster = Cluster::start().unwrap();
    let config = AssignmentConfig { sweep_every: Duration::from_secs(60), ..quick() };
    let mut nodes = std::collections::BTreeMap::new();
    while nodes.len() < 3 {
        let place = Place::in_cluster(&cluster);
        let slot = cluster.slot_of(place.input().as_str()).unwrap();
        nodes.entry(cluster.primary_of_slot(slot).unwrap().port()).or_insert(place);
    }
    let hears = async |place: &Place| {
        let mut owner = place.consumer("owner", config.clone()).await;
        let stream = place.add(&["s"]).await.remove(0);
        owner.added().await;
        let mut survivor = place.consumer("survivor", config.clone()).await;
        tokio::time::sleep(Duration::from_millis(300)).await;

        owner.die();
        let died = Instant::now();
        assert_eq!(survivor.expired().await, stream);
        survivor.assignment.claim(&stream).await.unwrap();
        assert!(died.elapsed() < config.sweep_every, "after {:?}", died.elapsed());
    };
    futures_util::future::join_all(nodes.values().map(hears)).await;
}
