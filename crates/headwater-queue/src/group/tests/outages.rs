//! The backend is unavailable, loses its data, or its replies are lost.

use std::time::Duration;

use headwater_stream::StreamError;
use headwater_testkit::{Proxy, Redis};
use tokio::time::sleep;

use super::fixture::{Callback, GroupFixture, Member, QUIET, fast_config, wait_until};
use crate::config::Mode;
use crate::error::QueueError;
use crate::keys::MembershipKeys;

fn is_lost(callback: &Callback) -> bool {
    matches!(callback, Callback::Lost(_))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_longer_than_the_lease_evicts_and_the_member_rejoins_afterwards() {
    let redis = Redis::start().unwrap();
    let fixture = GroupFixture::with_server(redis.url());
    fixture.create(3).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 3).await;
    let (first, lease) = (member.consumer(), member.listener.lease(0));

    redis.pause().unwrap();
    wait_until("the lease to expire", || async {
        member.count(|callback| *callback == Callback::Evicted) == 1
    })
    .await;
    assert_eq!(member.count(is_lost), 3);
    lease.lost().await;
    redis.resume().unwrap();

    fixture.wait_until_balanced(&[&member], 3).await;
    assert_ne!(member.consumer(), first, "a consumer name that lost a lease is never reused");
    wait_until("the old name to be removed", || async { fixture.member_list().await.len() == 1 })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_outage_does_not_cause_a_rebalance() {
    let redis = Redis::start().unwrap();
    let fixture = GroupFixture::with_server(redis.url());
    fixture.create(3).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 3).await;
    member.clear_callbacks();
    redis.pause().unwrap();
    sleep(fast_config().lease.renew_every * 2).await;
    redis.resume().unwrap();
    sleep(fast_config().lease.ttl).await;
    assert_eq!(member.callbacks(), []);
    assert_eq!(member.owns().len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_rejoin_after_the_server_lost_all_data() {
    let redis = Redis::start().unwrap();
    let fixture = GroupFixture::with_server(redis.url());
    fixture.create(4).await;
    let proxy = Proxy::start(redis.addr()).unwrap();
    let slow = fixture.with_url(redis.url_at(proxy.addr()));
    let members = [fixture.member().await, slow.member().await];
    fixture.wait_until_balanced(&[&members[0], &members[1]], 4).await;

    // The second notices later, and the first takes its partitions meanwhile.
    proxy.delay(Duration::from_millis(100)).unwrap();
    fixture.forget_owners();
    redis.command(&["FLUSHALL"]).unwrap();
    wait_until("all members to be evicted", || async {
        members.iter().all(|member| member.count(|callback| *callback == Callback::Evicted) > 0)
    })
    .await;
    proxy.heal().unwrap();
    fixture.create(4).await;
    fixture.wait_until_balanced(&[&members[0], &members[1]], 4).await;
    wait_until("two to be listed", || async { fixture.member_list().await.len() == 2 }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_member_list_is_written_again() {
    let redis = Redis::start().unwrap();
    let fixture = GroupFixture::with_server(redis.url());
    fixture.create(4).await;
    let members = fixture.members(2).await;
    fixture.wait_until_balanced(&[&members[0], &members[1]], 4).await;
    let lists = MembershipKeys::new(&*fixture.connect().await, &fixture.group).members();
    redis.command(&["DEL", lists[0].as_str()]).unwrap();
    wait_until("the member list to be complete", || async {
        fixture.member_list().await.len() == 2
    })
    .await;
    fixture.wait_until_balanced(&[&members[0], &members[1]], 4).await;
    assert!(
        members.iter().all(|member| member.count(|callback| *callback == Callback::Evicted) == 0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joining_while_the_backend_is_unavailable_fails_and_leaves_nothing_behind() {
    let redis = Redis::start().unwrap();
    let fixture = GroupFixture::with_server(redis.url());
    fixture.create(1).await;
    let queue = fixture.queue().await;
    let topic =
        queue.read_topic(&crate::topic::TopicName::new(&fixture.topic).unwrap()).await.unwrap();
    redis.pause().unwrap();
    let joined =
        Member::join_topic(queue.clone(), topic.clone(), &fixture, Mode::Owned, None).await;
    let Err(error) = joined else { panic!("it joined") };
    assert!(matches!(error, QueueError::Backend(StreamError::Unavailable { .. })), "{error}");
    redis.resume().unwrap();
    let member = Member::join_topic(queue, topic, &fixture, Mode::Owned, None).await.unwrap();
    fixture.wait_until_balanced(&[&member], 1).await;
}

/// Requests take effect but their replies are lost, repeatedly: acquires, releases and renewals among them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_replies_leave_no_partition_unowned() {
    let redis = Redis::start().unwrap();
    let direct = GroupFixture::with_server(redis.url());
    direct.create(6).await;
    let proxy = Proxy::start(redis.addr()).unwrap();
    let fixture = direct.with_url(redis.url_at(proxy.addr()));
    let (stays, comes) = (direct.member().await, fixture.member().await);
    direct.wait_until_balanced(&[&stays, &comes], 6).await;
    for _ in 0..12 {
        // A member that joins and leaves makes the others acquire and release.
        let guest = direct.member().await;
        proxy.drop_reply().unwrap();
        sleep(Duration::from_millis(30)).await;
        guest.leave().await;
        proxy.drop_reply().unwrap();
        sleep(Duration::from_millis(30)).await;
    }
    direct.wait_until_balanced(&[&stays, &comes], 6).await;
    sleep(QUIET).await;
    direct.wait_until_balanced(&[&stays, &comes], 6).await;
    assert_eq!(stays.count(is_lost), 0);
}

/// A write was rejected because another owner has a newer epoch.
async fn a_fenced_signal_evicts_the_member_and_it_rejoins(fixture: &GroupFixture) {
    fixture.create(3).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 3).await;
    let first = member.consumer();
    member.clear_callbacks();

    member.listener.lock().owned[&1].fenced.signal();
    wait_until("all partitions to be lost", || async { member.count(is_lost) == 3 }).await;
    fixture.wait_until_balanced(&[&member], 3).await;

    assert_ne!(member.consumer(), first);
    let callbacks = member.callbacks();
    let evicted = callbacks.iter().position(|callback| *callback == Callback::Evicted).unwrap();
    assert!(callbacks[..evicted].iter().all(is_lost), "{callbacks:?}");
    assert_eq!(callbacks[evicted + 1], Callback::Joined(member.consumer()));
    wait_until("the old name to be removed", || async { fixture.member_list().await.len() == 1 })
        .await;
}

/// An operator releases a lease.
async fn a_lease_released_by_an_operator_evicts_the_member(fixture: &GroupFixture) {
    fixture.create(2).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 2).await;
    let (fence, holder) = (member.listener.lease(1).fence().clone(), member.consumer());
    let holder = headwater_stream::HolderName::new(holder.as_str()).unwrap();
    assert_eq!(fixture.connect().await.release(&holder, &[fence]).await.unwrap(), 1);
    wait_until("all partitions to be lost", || async { member.count(is_lost) == 2 }).await;
    fixture.wait_until_balanced(&[&member], 2).await;
}

async fn leaving_completes_when_the_member_is_evicted_meanwhile(fixture: &GroupFixture) {
    fixture.create(2).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 2).await;
    member.listener.block_revoke();
    let fenced = member.listener.lock().owned[&0].fenced.clone();
    let listener = member.listener.clone();
    let leaving = tokio::spawn(member.leave());
    wait_until("both revokes to start", || async {
        listener
            .lock()
            .callbacks
            .iter()
            .filter(|(_, callback)| matches!(callback, Callback::Revoke(_)))
            .count()
            == 2
    })
    .await;
    fenced.signal();
    leaving.await.unwrap();
    wait_until("all members and leases to be gone", || async {
        fixture.member_list().await.is_empty()
            && fixture.holders().await.iter().all(Option::is_none)
    })
    .await;
}

/// The same on a cluster, where the leases of other partitions are on other servers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_member_that_loses_one_lease_keeps_the_other_partitions() {
    let fixture = &GroupFixture::cluster();
    fixture.create(3).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 3).await;
    let (first, lease) = (member.consumer(), member.listener.lease(1));
    member.clear_callbacks();

    let holder = headwater_stream::HolderName::new(first.as_str()).unwrap();
    let fence = lease.fence().clone();
    assert_eq!(fixture.connect().await.release(&holder, &[fence]).await.unwrap(), 1);
    wait_until("the partition to be lost", || async { member.count(is_lost) == 1 }).await;
    fixture.wait_until_balanced(&[&member], 3).await;
    let acquired_again = member.listener.lease(1);
    assert!(acquired_again.fence().epoch > lease.fence().epoch);

    let fenced = member.listener.lock().owned[&2].fenced.clone();
    fenced.signal();
    wait_until("the second to be lost", || async { member.count(is_lost) == 2 }).await;
    fixture.wait_until_balanced(&[&member], 3).await;
    // A late rejection of the old epoch does not concern the new one.
    fenced.signal();
    sleep(QUIET).await;

    assert_eq!(member.callbacks().iter().filter(|one| is_lost(one)).count(), 2);
    assert_eq!(member.consumer(), first, "it stayed a member");
}

on_one_server!(
    a_fenced_signal_evicts_the_member_and_it_rejoins,
    a_lease_released_by_an_operator_evicts_the_member,
    leaving_completes_when_the_member_is_evicted_meanwhile,
);
