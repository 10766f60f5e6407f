//! One type per name: a call on a name of another type fails with `WrongType` and changes nothing.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::{
    AcquireResult, Backend, DelayId, DelayName, DueTime, EntryId, Fence, GroupStart,
    IdempotentEntry, LeaseName, MapName, PendingDeliveryQuery, Range, ReclaimFrom, ReclaimRequest,
    RegistryMap, Renewal, Result, Retention, ScheduleRequest, SetName, SettleBatch, Settlement,
    StreamError, StreamName, TrimGuard,
};

use super::env::{StreamTestEnv, consumer, group, holder};
use super::steps::{HOUR, contents, numbered, numbers};
use crate::failure::TestResult;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NameType {
    Stream,
    Delays,
    Lease,
    Map,
    Set,
}

impl NameType {
    const ALL: [Self; 5] = [Self::Stream, Self::Delays, Self::Lease, Self::Map, Self::Set];

    /// Creates a value of this type, through the second connection.
    async fn create(self, env: &StreamTestEnv, name: &str) -> Result<()> {
        let backend = &env.second;
        match self {
            Self::Stream => {
                let stream = StreamName::new(name)?;
                backend.append(&stream, &numbers(3), &Retention::KEEP_ALL).await?;
                backend.ensure_group(&stream, &group("workers"), GroupStart::End).await?;
            }
            Self::Delays => {
                let to = env.stream("target");
                let item = ScheduleRequest { to, due: DueTime::After(HOUR), fields: numbered(1) };
                backend.schedule(&DelayName::new(name)?, &[item]).await?;
            }
            Self::Lease => {
                backend.acquire(&LeaseName::new(name)?, &holder("ann"), HOUR).await?;
            }
            Self::Map => {
                let fields = RegistryMap::from([("a".to_owned(), Bytes::from_static(b"1"))]);
                backend.map_create(&MapName::new(name)?, &fields).await?;
            }
            Self::Set => {
                backend.set_add(&SetName::new(name)?, &["a", "b"], None).await?;
            }
        }
        Ok(())
    }

    /// The value as text, without times.
    async fn dump(self, backend: &dyn Backend, name: &str) -> Result<String> {
        Ok(match self {
            Self::Stream => {
                let stream = StreamName::new(name)?;
                let stats = backend.stats(&stream).await?.map(|s| (s.length, s.groups));
                format!("{stats:?} {:?}", contents(backend, &stream).await?)
            }
            Self::Delays => {
                format!("{:?}", backend.delayed(&DelayName::new(name)?, 0, 10).await?)
            }
            Self::Lease => {
                let found = backend.leases(&[LeaseName::new(name)?]).await?.remove(0);
                format!("{:?}", found.map(|info| (info.holder, info.epoch)))
            }
            Self::Map => format!("{:?}", backend.map_get(&MapName::new(name)?).await?),
            Self::Set => format!("{:?}", backend.set_members(&SetName::new(name)?).await?),
        })
    }
}

type Calls = Vec<(&'static str, Result<()>)>;

/// Creates every other type under a name, runs `calls` on it, and expects each to fail and change nothing.
async fn rejects_other_types<'a, F: Future<Output = TestResult<Calls>>>(
    env: &'a StreamTestEnv,
    own: NameType,
    calls: impl Fn(&'a dyn Backend, String) -> F,
) -> TestResult {
    for other in NameType::ALL.into_iter().filter(|kind| *kind != own) {
        let name = env.name("any", &format!("{other:?}"));
        other.create(env, &name).await?;
        let before = other.dump(&*env.second, &name).await?;
        for (call, answer) in calls(&*env.backend, name.clone()).await? {
            assert_wrong_type(call, other, &name, &answer);
        }
        let after = other.dump(&*env.second, &name).await?;
        assert_eq!(after, before, "no call on a {own:?} touches a {other:?}");
    }
    Ok(())
}

fn assert_wrong_type<T: fmt::Debug>(call: &str, other: NameType, name: &str, answer: &Result<T>) {
    match answer {
        Err(StreamError::WrongType { name: found }) => {
            assert!(found.contains(name), "{call}: expected the name {name}, found {found}");
        }
        found => panic!("{call} met {other:?}: expected WrongType, found {found:?}"),
    }
}

pub async fn stream_calls_on_another_type_fail_with_wrong_type(env: StreamTestEnv) -> TestResult {
    rejects_other_types(&env, NameType::Stream, |backend, name| async move {
        let stream = &StreamName::new(name)?;
        let (group, ann) = (&group("workers"), &consumer("ann"));
        let id = [EntryId::new(1, 1)];
        let keep = &Retention::KEEP_ALL;
        let settle = |entries| SettleBatch { stream, group, consumer: ann, fence: None, entries };
        let query = PendingDeliveryQuery {
            stream,
            group,
            consumer: None,
            min_idle: Duration::ZERO,
            after: None,
            count: 10,
        };
        let reclaim = |from| ReclaimRequest {
            stream,
            group,
            consumer: ann,
            fence: None,
            from,
            min_idle: Duration::ZERO,
            after: None,
            count: 10,
        };
        let streams = std::slice::from_ref(stream);
        let position = [(stream.clone(), EntryId::MIN)];
        let once = [IdempotentEntry { id: "1".to_owned(), fields: numbered(1) }];
        let mut reader = backend.reader(group, ann).await?;
        let mut tail = backend.tail().await?;
        Ok(vec![
            ("append", backend.append(stream, &numbers(1), keep).await.map(drop)),
            ("append_once", backend.append_once(stream, &once, HOUR, keep).await.map(drop)),
            (
                "append with retention",
                backend.append(stream, &numbers(1), &Retention::max_len(1)).await.map(drop),
            ),
            (
                "ensure_group",
                backend.ensure_group(stream, group, GroupStart::Beginning).await.map(drop),
            ),
            ("remove_group", backend.remove_group(stream, group).await.map(drop)),
            ("reset_group", backend.reset_group(stream, group, GroupStart::End).await.map(drop)),
            ("read", reader.read(streams, 1, Duration::ZERO).await.map(drop)),
            ("tail", tail.read(&position, 1, Duration::ZERO).await.map(drop)),
            ("settle", backend.settle(settle(&[Settlement::ack(id[0])])).await.map(drop)),
            ("keep_alive", backend.keep_alive(stream, group, ann, &id).await.map(drop)),
            ("reclaim", backend.reclaim(reclaim(ReclaimFrom::Anyone)).await.map(drop)),
            ("reclaim by ids", backend.reclaim(reclaim(ReclaimFrom::Ids(&id))).await.map(drop)),
            ("pending", backend.pending(query).await.map(drop)),
            ("range", backend.range(stream, Range::first(1)).await.map(drop)),
            (
                "safe trim",
                backend.trim(stream, &Retention::max_len(0), TrimGuard::Safe).await.map(drop),
            ),
            (
                "forced trim",
                backend.trim(stream, &Retention::max_len(0), TrimGuard::Force).await.map(drop),
            ),
            ("delete_entries", backend.delete_entries(stream, &id).await.map(drop)),
            ("delete_stream", backend.delete_stream(stream).await.map(drop)),
            ("rename_stream", backend.rename_stream(stream, stream).await.map(drop)),
            ("stats", backend.stats(stream).await.map(drop)),
            (
                "remove_idle_consumers",
                backend.remove_idle_consumers(stream, group, Duration::ZERO).await.map(drop),
            ),
        ])
    })
    .await
}

pub async fn delay_calls_on_another_type_fail_with_wrong_type(env: StreamTestEnv) -> TestResult {
    let target = &env.stream("target");
    rejects_other_types(&env, NameType::Delays, |backend, name| async move {
        let delays = &DelayName::new(name)?;
        let item =
            ScheduleRequest { to: target.clone(), due: DueTime::After(HOUR), fields: numbered(1) };
        Ok(vec![
            ("schedule", backend.schedule(delays, &[item]).await.map(drop)),
            ("cancel", backend.cancel(delays, DelayId(1)).await.map(drop)),
            ("promote_due", backend.promote_due(delays, 1).await.map(drop)),
            ("wait_until_due", backend.wait_until_due(delays, Duration::ZERO).await.map(drop)),
            ("delay_stats", backend.delay_stats(delays).await.map(drop)),
            ("delayed", backend.delayed(delays, 0, 1).await.map(drop)),
            ("delete_delay_set", backend.delete_delay_set(delays).await.map(drop)),
        ])
    })
    .await
}

pub async fn lease_calls_on_another_type_fail_with_wrong_type(env: StreamTestEnv) -> TestResult {
    rejects_other_types(&env, NameType::Lease, |backend, name| async move {
        let lease = LeaseName::new(name)?;
        Ok(vec![("acquire", backend.acquire(&lease, &holder("ann"), HOUR).await.map(drop))])
    })
    .await
}

pub async fn a_value_of_another_type_among_leases_affects_only_its_own_lease(
    env: StreamTestEnv,
) -> TestResult {
    let (mine, ann) = (env.lease("mine"), holder("ann"));
    for other in NameType::ALL.into_iter().filter(|kind| *kind != NameType::Lease) {
        let AcquireResult::Won(epoch) = env.second.acquire(&mine, &ann, HOUR).await? else {
            panic!("expected a free lease");
        };
        let name = env.name("any", &format!("{other:?}"));
        other.create(&env, &name).await?;
        let before = other.dump(&*env.second, &name).await?;
        let foreign = Fence { lease: LeaseName::new(&*name)?, epoch };
        let fences = [foreign.clone(), Fence { lease: mine.clone(), epoch }];

        let renewed = env.backend.renew(&ann, &fences, HOUR).await?;
        assert_eq!(renewed, [Renewal::Lost, Renewal::Kept], "{other:?}");
        let found = env.backend.leases(&[foreign.lease, mine.clone()]).await?;
        let [Some(first), Some(second)] = &found[..] else { panic!("{other:?}: {found:?}") };
        assert!(first.is_wrong_type() && !second.is_wrong_type(), "{other:?}: {found:?}");
        assert_eq!((&second.holder, second.epoch), (&ann, epoch));
        let released = env.backend.release(&ann, &fences).await?;
        assert!(released == 1 || env.is_faulty(), "{other:?}: {released}");

        assert_eq!(env.second.leases(std::slice::from_ref(&mine)).await?, [None]);
        assert_eq!(other.dump(&*env.second, &name).await?, before);
    }
    Ok(())
}

pub async fn map_calls_on_another_type_fail_with_wrong_type(env: StreamTestEnv) -> TestResult {
    rejects_other_types(&env, NameType::Map, |backend, name| async move {
        let map = &MapName::new(name)?;
        let fields = &RegistryMap::from([("x".to_owned(), Bytes::from_static(b"1"))]);
        Ok(vec![
            ("map_create", backend.map_create(map, fields).await.map(drop)),
            ("map_update", backend.map_update(map, None, fields).await.map(drop)),
            (
                "map_update with expectation",
                backend.map_update(map, Some(("x", b"1")), fields).await.map(drop),
            ),
            ("map_get", backend.map_get(map).await.map(drop)),
            ("map_delete", backend.map_delete(map).await.map(drop)),
        ])
    })
    .await
}

pub async fn set_calls_on_another_type_fail_with_wrong_type(env: StreamTestEnv) -> TestResult {
    rejects_other_types(&env, NameType::Set, |backend, name| async move {
        let set = &SetName::new(name)?;
        Ok(vec![
            ("set_add", backend.set_add(set, &["x"], None).await.map(drop)),
            ("set_add with ttl", backend.set_add(set, &["x"], Some(HOUR)).await.map(drop)),
            ("set_remove", backend.set_remove(set, &["x"]).await.map(drop)),
            ("set_members", backend.set_members(set).await.map(drop)),
            ("set_contains", backend.set_contains(set, &["x"]).await.map(drop)),
        ])
    })
    .await
}

pub async fn a_wrong_type_among_several_streams_fails_the_read_and_loses_nothing(
    env: StreamTestEnv,
) -> TestResult {
    let (good, foreign) = (env.stream("good"), env.set("foreign"));
    env.second.append(&good, &numbers(2), &Retention::KEEP_ALL).await?;
    env.second.set_add(&foreign, &["a"], None).await?;
    let streams = [good.clone(), StreamName::new(foreign.as_str())?];
    let mut reader = env.backend.reader(&group("workers"), &consumer("ann")).await?;

    let answer = reader.read(&streams, 10, Duration::ZERO).await;
    assert_wrong_type("read", NameType::Set, foreign.as_str(), &answer);

    let read = super::steps::read_all(&mut *reader, &streams[..1], 2).await?;
    assert_eq!(read[0].entries.len(), 2, "the reader continues without it");
    Ok(())
}
