//! The backend is away, forgets everything, or answers into the void.

use std::time::Duration;

use headwater_stream::StreamError;
use headwater_testkit::{Proxy, Redis};
use tokio::time::sleep;

use super::place::{Member, Place, QUIET, Told, eventually, quick};
use crate::config::Mode;
use crate::error::QueueError;
use crate::keys;

fn is_lost(told: &Told) -> bool {
    matches!(told, Told::Lost(_))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_backend_is_away_trust_runs_out_and_everything_comes_back_with_it() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    place.create(3).await;
    let member = place.member().await;
    place.balanced(&[&member], 3).await;
    let (first, lease) = (member.consumer(), member.desk.lease(0));

    redis.pause().unwrap();
    eventually("trust to run out", || async { member.count(|told| *told == Told::Expelled) == 1 })
        .await;
    assert_eq!(member.count(is_lost), 3);
    lease.lost().await;
    redis.resume().unwrap();

    place.balanced(&[&member], 3).await;
    assert_ne!(member.consumer(), first, "a name that lost a lease is never used again");
    eventually("the old name to be forgotten", || async { place.listed().await.len() == 1 }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_outage_moves_nothing() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    place.create(3).await;
    let member = place.member().await;
    place.balanced(&[&member], 3).await;
    member.forget_told();
    redis.pause().unwrap();
    sleep(quick().lease.renew_every * 2).await;
    redis.resume().unwrap();
    sleep(quick().lease.ttl).await;
    assert_eq!(member.told(), []);
    assert_eq!(member.owns().len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_forgets_everything_is_joined_again() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    place.create(4).await;
    let members = place.members(2).await;
    place.balanced(&[&members[0], &members[1]], 4).await;

    redis.command(&["FLUSHALL"]).unwrap();
    eventually("everybody to notice", || async {
        members.iter().all(|member| member.count(|told| *told == Told::Expelled) > 0)
    })
    .await;
    place.create(4).await;
    place.balanced(&[&members[0], &members[1]], 4).await;
    eventually("two to be listed", || async { place.listed().await.len() == 2 }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_of_members_that_was_removed_is_written_again() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    place.create(4).await;
    let members = place.members(2).await;
    place.balanced(&[&members[0], &members[1]], 4).await;
    redis.command(&["DEL", keys::members(&place.group).as_str()]).unwrap();
    eventually("the list to be whole", || async { place.listed().await.len() == 2 }).await;
    place.balanced(&[&members[0], &members[1]], 4).await;
    assert!(members.iter().all(|member| member.count(|told| *told == Told::Expelled) == 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joining_a_backend_that_is_away_fails_and_leaves_nothing() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    place.create(1).await;
    let queue = place.queue().await;
    let topic =
        queue.read_topic(&crate::topic::TopicName::new(&place.topic).unwrap()).await.unwrap();
    redis.pause().unwrap();
    let joined = Member::join_topic(queue.clone(), topic.clone(), &place, Mode::Owned, None).await;
    let Err(error) = joined else { panic!("it joined") };
    assert!(matches!(error, QueueError::Backend(StreamError::Unavailable { .. })), "{error}");
    redis.resume().unwrap();
    let member = Member::join_topic(queue, topic, &place, Mode::Owned, None).await.unwrap();
    place.balanced(&[&member], 1).await;
}

/// Requests take effect and their replies are lost, again and again: acquires, releases and renewals among them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_replies_lose_no_partition() {
    let redis = Redis::start().unwrap();
    let direct = Place::at(redis.url());
    direct.create(6).await;
    let proxy = Proxy::start(redis.addr()).unwrap();
    let place = direct.through(redis.url_at(proxy.addr()));
    let (stays, comes) = (direct.member().await, place.member().await);
    direct.balanced(&[&stays, &comes], 6).await;
    for _ in 0..12 {
        // One that comes and goes makes the others take and release.
        let guest = direct.member().await;
        proxy.drop_reply().unwrap();
        sleep(Duration::from_millis(30)).await;
        guest.leave().await;
        proxy.drop_reply().unwrap();
        sleep(Duration::from_millis(30)).await;
    }
    direct.balanced(&[&stays, &comes], 6).await;
    sleep(QUIET).await;
    direct.balanced(&[&stays, &comes], 6).await;
    assert_eq!(stays.count(is_lost), 0);
}

/// Somebody else's effect came in between: the fence said no.
async fn an_alarm_ends_the_session_and_a_new_one_begins(place: &Place) {
    place.create(3).await;
    let member = place.member().await;
    place.balanced(&[&member], 3).await;
    let first = member.consumer();
    member.forget_told();

    member.desk.lock().owned[&1].alarm.raise();
    eventually("everything to be lost", || async { member.count(is_lost) == 3 }).await;
    place.balanced(&[&member], 3).await;

    assert_ne!(member.consumer(), first);
    let told = member.told();
    let expelled = told.iter().position(|told| *told == Told::Expelled).unwrap();
    assert!(told[..expelled].iter().all(is_lost), "{told:?}");
    assert_eq!(told[expelled + 1], Told::Joined(member.consumer()));
    eventually("the old name to be forgotten", || async { place.listed().await.len() == 1 }).await;
}

/// An operator takes a lease away.
async fn a_lease_that_is_taken_away_ends_the_session(place: &Place) {
    place.create(2).await;
    let member = place.member().await;
    place.balanced(&[&member], 2).await;
    let (fence, holder) = (member.desk.lease(1).fence().clone(), member.consumer());
    let holder = headwater_stream::HolderName::new(holder.as_str()).unwrap();
    assert_eq!(place.connect().await.release(&holder, &[fence]).await.unwrap(), 1);
    eventually("everything to be lost", || async { member.count(is_lost) == 2 }).await;
    place.balanced(&[&member], 2).await;
}

async fn leaving_ends_although_the_session_is_lost_meanwhile(place: &Place) {
    place.create(2).await;
    let member = place.member().await;
    place.balanced(&[&member], 2).await;
    member.desk.hold_on();
    let alarm = member.desk.lock().owned[&0].alarm.clone();
    let desk = member.desk.clone();
    let leaving = tokio::spawn(member.leave());
    eventually("both to be asked for", || async {
        desk.lock().told.iter().filter(|(_, told)| matches!(told, Told::GiveUp(_))).count() == 2
    })
    .await;
    alarm.raise();
    leaving.await.unwrap();
    eventually("nothing to be left", || async {
        place.listed().await.is_empty() && place.holders().await.iter().all(Option::is_none)
    })
    .await;
}

everywhere!(
    an_alarm_ends_the_session_and_a_new_one_begins,
    a_lease_that_is_taken_away_ends_the_session,
    leaving_ends_although_the_session_is_lost_meanwhile,
);
