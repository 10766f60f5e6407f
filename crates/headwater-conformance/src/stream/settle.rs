//! Settle: acknowledgement and follow-up in one step.

use std::time::Duration;

use bytes::Bytes;
use headwater_stream::limits::{BATCH_MAX, ENTRY_BYTES_MAX, FOLLOW_UP_FIELDS_MAX};
use headwater_stream::{
    DueTime, EntryId, Fields, GroupStart, ReclaimFrom, ReclaimRequest, Retention, SettleAction,
    SettleBatch, Settlement, StreamError, StreamName,
};

use super::env::{StreamTestEnv, consumer, group};
use super::steps::{
    ALL, HOUR, contents, done, fields_in, ids_of, numbered, numbers, settled, sleep_ms,
};
use crate::failure::TestResult;

fn append_to(to: &StreamName, fields: Fields) -> SettleAction {
    SettleAction::Append { to: to.clone(), fields }
}

fn schedule(env: &StreamTestEnv, due: DueTime, fields: Fields) -> SettleAction {
    SettleAction::Reschedule { delays: env.delays("later"), to: env.stream("orders"), due, fields }
}

fn awkward() -> Fields {
    let bytes: Bytes = (0..=u8::MAX).rev().collect();
    Fields::new([
        (bytes.clone(), Bytes::new()),
        (Bytes::new(), bytes.clone()),
        (bytes.clone(), bytes),
    ])
}

pub async fn done_acknowledges_the_delivery_and_keeps_the_entry(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;

    assert_eq!(flow.settle("ann", &done(&ids[..2])).await?, settled(2, 0));

    assert_eq!(flow.pending_ids().await?, ids[2..]);
    assert_eq!(flow.ids().await?, ids, "the entries stay in the stream");
    assert_eq!(flow.deliver("ann", ALL).await?, [], "and do not come again");
    Ok(())
}

pub async fn done_is_idempotent(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    let audit = group("audit");
    env.second.ensure_group(&flow.stream, &audit, GroupStart::Beginning).await?;
    flow.deliver_to(&audit, "ann", ALL).await?;

    for _ in 0..3 {
        let answer = flow.settle("ann", &done(&ids[1..])).await?;
        assert_eq!(answer.applied + answer.stale, 2, "one answer for each entry, {answer:?}");
    }

    assert_eq!(flow.pending_ids().await?, ids[..1]);
    let query = headwater_stream::PendingDeliveryQuery { group: &audit, ..flow.pending_query() };
    assert_eq!(env.second.pending(query).await?.len(), 3, "another group goes by its own");
    Ok(())
}

pub async fn delete_removes_the_entry_for_every_group(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let audit = group("audit");
    env.second.ensure_group(&flow.stream, &audit, GroupStart::Beginning).await?;

    let answer = flow.settle_one("ann", ids[0], SettleAction::Delete).await?;

    assert!(answer == settled(1, 0) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.pending_ids().await?, ids[1..]);
    assert_eq!(flow.ids().await?, ids[1..]);
    assert_eq!(ids_of(&flow.deliver_to(&audit, "ann", ALL).await?), ids[1..]);
    Ok(())
}

pub async fn append_writes_the_follow_up_and_acknowledges_the_delivery(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let dead = env.stream("dead");

    let answer = flow.settle_one("ann", ids[0], append_to(&dead, numbered(42))).await?;

    assert!(answer == settled(1, 0) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.pending_ids().await?, ids[1..]);
    assert_eq!(fields_in(&*env.second, &dead).await?, [numbered(42)]);
    Ok(())
}

pub async fn a_follow_up_may_target_the_same_stream(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;

    flow.settle_one("ann", ids[0], append_to(&flow.stream, numbered(42))).await?;

    let again = flow.deliver("bob", ALL).await?;
    assert_eq!(again.len(), 1, "{again:?}");
    assert_eq!((&again[0].fields, again[0].deliveries), (&numbered(42), 1));
    assert!(again[0].id > ids[1], "it is at the end");
    Ok(())
}

pub async fn follow_ups_are_written_in_the_order_of_their_entries(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(50).await?;
    let dead = env.stream("dead");
    let entries: Vec<Settlement> = (ids.iter().enumerate())
        .map(|(number, id)| Settlement { id: *id, action: append_to(&dead, numbered(number)) })
        .collect();

    flow.settle("ann", &entries).await?;

    assert_eq!(fields_in(&*env.second, &dead).await?, numbers(50));
    Ok(())
}

pub async fn a_rescheduled_entry_is_promoted_when_it_is_due(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let due = DueTime::After(Duration::from_millis(80));

    let answer = flow.settle_one("ann", ids[0], schedule(&env, due, awkward())).await?;

    assert!(answer == settled(1, 0) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.pending_ids().await?, ids[1..]);
    let delays = env.delays("later");
    let waiting = env.second.delayed(&delays, 0, 10).await?;
    assert_eq!(waiting.len(), 1, "{waiting:?}");
    assert_eq!((&waiting[0].to, &waiting[0].fields), (&flow.stream, &awkward()));

    sleep_ms(120).await;
    let returned = env.second.promote_due(&delays, 10).await?;
    assert_eq!(returned.len(), 1, "{returned:?}");
    let again = flow.deliver("bob", ALL).await?;
    assert_eq!(again.len(), 1, "{again:?}");
    assert_eq!((again[0].id, &again[0].fields), (returned[0].id, &awkward()));
    Ok(())
}

pub async fn follow_ups_are_preserved_byte_for_byte(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    let dead = env.stream("dead");
    flow.settle_one("ann", ids[0], append_to(&dead, awkward())).await?;
    assert_eq!(fields_in(&*env.second, &dead).await?, [awkward()]);
    Ok(())
}

pub async fn a_follow_up_of_one_mebibyte_is_preserved(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let value: Vec<u8> =
        (0..headwater_stream::limits::PAYLOAD_BYTES_MAX).map(|at| ((at * 7) >> 4) as u8).collect();
    let large = Fields::new([(Bytes::from_static(b"payload"), Bytes::from(value))]);
    let dead = env.stream("dead");

    flow.settle_one("ann", ids[0], append_to(&dead, large.clone())).await?;
    flow.settle_one("ann", ids[1], schedule(&env, DueTime::After(HOUR), large.clone())).await?;

    let found = fields_in(&*env.second, &dead).await?;
    assert!(found == [large.clone()], "expected the payload once and unchanged in the stream");
    let found = env.second.delayed(&env.delays("later"), 0, 2).await?;
    assert!(found.len() == 1 && found[0].fields == large, "expected it unchanged among the delays");
    Ok(())
}

pub async fn a_released_entry_is_pending_without_a_consumer(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;

    let answer = flow.settle_one("ann", ids[0], SettleAction::Release).await?;

    assert!(answer == settled(1, 0) || env.is_faulty(), "{answer:?}");
    let found: Vec<_> =
        flow.pending_owners().await?.into_iter().map(|(id, consumer, _)| (id, consumer)).collect();
    assert_eq!(found, [(ids[0], SettleAction::RELEASED.to_owned()), (ids[1], "ann".to_owned())]);
    assert_eq!(flow.deliver("bob", ALL).await?, [], "it is no new entry");
    Ok(())
}

pub async fn a_released_entry_can_be_reclaimed_at_once_and_its_delivery_does_not_count(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    flow.settle("ann", &[Settlement { id: ids[0], action: SettleAction::Release }]).await?;

    let bob = consumer("bob");
    let reclaim =
        ReclaimRequest { min_idle: HOUR, from: ReclaimFrom::Others, ..flow.reclaim_any(&bob) };
    let found = env.second.reclaim(reclaim).await?;

    assert_eq!(ids_of(&found.entries), ids[..1], "whatever the idle time asked for");
    assert_eq!(found.entries[0].deliveries, 1, "the released delivery did not count");
    assert_eq!(found.entries[0].fields, numbered(0));
    Ok(())
}

pub async fn entries_settled_before_are_stale(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    let dead = env.stream("dead");
    flow.settle("ann", &done(&ids)).await?;

    let again = [
        Settlement::ack(ids[0]),
        Settlement { id: ids[1], action: SettleAction::Delete },
        Settlement { id: ids[2], action: append_to(&dead, numbered(1)) },
        Settlement { id: ids[0], action: schedule(&env, DueTime::After(HOUR), numbered(1)) },
        Settlement { id: ids[1], action: SettleAction::Release },
    ];
    assert_eq!(flow.settle("ann", &again).await?, settled(0, 5));

    assert_eq!(flow.ids().await?, ids, "nothing was deleted");
    assert_eq!(flow.pending_ids().await?, [], "nothing is pending again");
    assert_eq!(env.second.stats(&dead).await?, None, "no follow-up was written");
    assert_eq!(env.second.delay_stats(&env.delays("later")).await?.waiting, 0);
    Ok(())
}

pub async fn entries_never_delivered_are_stale(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    let unread = flow.append(1).await?[0];
    let dead = env.stream("dead");
    let unknown = EntryId::new(1, 1);

    let entries = [
        Settlement::ack(unread),
        Settlement { id: unread, action: SettleAction::Delete },
        Settlement { id: unknown, action: append_to(&dead, numbered(1)) },
        Settlement { id: unread, action: append_to(&dead, numbered(1)) },
        Settlement { id: unknown, action: SettleAction::Release },
        Settlement::ack(EntryId::MAX),
    ];
    assert_eq!(flow.settle("ann", &entries).await?, settled(0, 6));

    assert_eq!(flow.pending_ids().await?, ids);
    assert_eq!(env.second.stats(&dead).await?, None);
    assert_eq!(ids_of(&flow.deliver("ann", ALL).await?), [unread], "it still comes");
    Ok(())
}

pub async fn an_entry_named_twice_is_settled_once(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let dead = env.stream("dead");
    let entries = [
        Settlement { id: ids[0], action: append_to(&dead, numbered(1)) },
        Settlement { id: ids[0], action: append_to(&dead, numbered(2)) },
        Settlement::ack(ids[1]),
        Settlement::ack(ids[1]),
    ];

    let answer = flow.settle("ann", &entries).await?;

    assert!(answer == settled(2, 2) || env.is_faulty(), "{answer:?}");
    assert_eq!(fields_in(&*env.second, &dead).await?, [numbered(1)]);
    Ok(())
}

pub async fn done_and_delete_apply_for_any_consumer(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    let entries =
        [Settlement::ack(ids[0]), Settlement { id: ids[1], action: SettleAction::Delete }];

    let answer = flow.settle("bob", &entries).await?;

    assert!(answer == settled(2, 0) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.pending_ids().await?, ids[2..]);
    assert_eq!(flow.ids().await?, [ids[0], ids[2]]);
    Ok(())
}

pub async fn a_follow_up_is_written_only_for_the_owning_consumer(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    let before = flow.pending_owners().await?;
    let dead = env.stream("dead");
    let entries = [
        Settlement { id: ids[0], action: append_to(&dead, numbered(1)) },
        Settlement { id: ids[1], action: schedule(&env, DueTime::After(HOUR), numbered(1)) },
        Settlement { id: ids[2], action: SettleAction::Release },
    ];

    assert_eq!(flow.settle("bob", &entries).await?, settled(0, 3));

    assert_eq!(flow.pending_owners().await?, before, "they are still in the hands of ann");
    assert_eq!(env.second.stats(&dead).await?, None);
    assert_eq!(env.second.delay_stats(&env.delays("later")).await?.waiting, 0);
    Ok(())
}

pub async fn a_consumer_whose_entries_were_reclaimed_writes_no_follow_up(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let dead = env.stream("dead");
    let bob = consumer("bob");
    env.second.reclaim(flow.reclaim_any(&bob)).await?;

    let zombie = flow.settle_one("ann", ids[0], append_to(&dead, numbered(1))).await?;
    assert_eq!(zombie, settled(0, 1));
    let owner = flow.settle_one("bob", ids[0], append_to(&dead, numbered(2))).await?;
    assert!(owner == settled(1, 0) || env.is_faulty(), "{owner:?}");

    assert_eq!(fields_in(&*env.second, &dead).await?, [numbered(2)]);
    Ok(())
}

pub async fn a_mixed_batch_applies_each_settlement_once(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(6).await?;
    let dead = env.stream("dead");
    flow.settle("ann", &done(&ids[5..])).await?;
    let entries = [
        Settlement::ack(ids[0]),
        Settlement { id: ids[1], action: SettleAction::Delete },
        Settlement { id: ids[2], action: append_to(&dead, numbered(2)) },
        Settlement { id: ids[3], action: schedule(&env, DueTime::After(HOUR), numbered(3)) },
        Settlement { id: ids[4], action: SettleAction::Release },
        Settlement { id: ids[5], action: append_to(&dead, numbered(5)) },
    ];

    let answer = flow.settle("ann", &entries).await?;

    assert!(answer == settled(5, 1) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.pending_ids().await?, ids[4..5], "only the released one");
    let kept: Vec<EntryId> = ids.iter().copied().filter(|id| *id != ids[1]).collect();
    assert_eq!(flow.ids().await?, kept);
    assert_eq!(fields_in(&*env.second, &dead).await?, [numbered(2)]);
    let waiting = env.second.delayed(&env.delays("later"), 0, 10).await?;
    assert_eq!(waiting.iter().map(|d| d.fields.clone()).collect::<Vec<_>>(), [numbered(3)]);
    Ok(())
}

pub async fn a_settle_that_cannot_write_its_follow_up_changes_nothing(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(4).await?;
    let before = flow.pending_owners().await?;
    env.second.set_add(&env.set("foreign"), &["x"], None).await?;
    let foreign = env.set("foreign").to_string();
    let dead = env.stream("dead");
    let to_foreign = SettleAction::Append { to: StreamName::new(&foreign)?, fields: numbered(3) };
    let aside_into_foreign = SettleAction::Reschedule {
        delays: headwater_stream::DelayName::new(&foreign)?,
        to: flow.stream.clone(),
        due: DueTime::After(HOUR),
        fields: numbered(3),
    };

    for impossible in [to_foreign, aside_into_foreign] {
        let entries = [
            Settlement::ack(ids[0]),
            Settlement { id: ids[1], action: SettleAction::Delete },
            Settlement { id: ids[2], action: append_to(&dead, numbered(2)) },
            Settlement { id: ids[3], action: impossible },
        ];
        let answer = flow.settle("ann", &entries).await;
        assert!(matches!(answer, Err(StreamError::WrongType { .. })), "found {answer:?}");

        assert_eq!(flow.pending_owners().await?, before);
        assert_eq!(flow.ids().await?, ids);
        assert_eq!(env.second.stats(&dead).await?, None);
    }
    Ok(())
}

/// Whichever came first would create it, and the other one would fail.
pub async fn a_settle_that_names_a_stream_and_a_delay_set_alike_changes_nothing(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let name = env.stream("both");
    let aside = SettleAction::Reschedule {
        delays: headwater_stream::DelayName::new(name.as_str())?,
        to: flow.stream.clone(),
        due: DueTime::After(HOUR),
        fields: numbered(1),
    };
    let append = append_to(&name, numbered(2));

    for actions in [[aside.clone(), append.clone()], [append, aside]] {
        let entries: Vec<Settlement> =
            ids.iter().zip(actions).map(|(id, action)| Settlement { id: *id, action }).collect();
        let answer = flow.settle("ann", &entries).await;
        assert!(matches!(answer, Err(StreamError::Invalid { .. })), "found {answer:?}");
        assert_eq!(flow.pending_ids().await?, ids);
        assert_eq!(env.second.stats(&name).await?, None);
    }
    Ok(())
}

pub async fn a_follow_up_may_be_larger_than_an_entry(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let dead = env.stream("dead");
    let large = Fields::new([("x", vec![7_u8; 2 * ENTRY_BYTES_MAX])]);
    let crowded = Fields::new((0..FOLLOW_UP_FIELDS_MAX).map(|n| (format!("f{n}"), n.to_string())));

    flow.settle_one("ann", ids[0], append_to(&dead, large.clone())).await?;
    flow.settle_one("ann", ids[1], append_to(&dead, crowded.clone())).await?;

    assert_eq!(fields_in(&*env.second, &dead).await?, [large, crowded]);
    assert!(flow.pending_ids().await?.is_empty());
    Ok(())
}

pub async fn a_dead_letter_may_be_in_another_slot(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(40).await?;
    let dead: Vec<StreamName> = (0..4).map(|n| env.stream_elsewhere(&n.to_string())).collect();
    let entries: Vec<Settlement> = (ids.iter().enumerate())
        .map(|(n, id)| Settlement { id: *id, action: append_to(&dead[n % 4], numbered(n)) })
        .collect();

    let answer = flow.settle("ann", &entries).await?;

    assert!(answer == settled(40, 0) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.pending_ids().await?, []);
    for (first, dead) in dead.iter().enumerate() {
        let expected: Vec<Fields> = (first..40).step_by(4).map(numbered).collect();
        assert_eq!(fields_in(&*env.second, dead).await?, expected, "{dead}");
    }
    Ok(())
}

pub async fn a_stale_dead_letter_is_not_written_to_another_slot(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let dead = env.stream_elsewhere("dead");
    flow.settle("ann", &done(&ids[..1])).await?;

    let settled_before = flow.settle_one("ann", ids[0], append_to(&dead, numbered(1))).await?;
    let not_in_hand = flow.settle_one("bob", ids[1], append_to(&dead, numbered(2))).await?;

    assert_eq!((settled_before, not_in_hand), (settled(0, 1), settled(0, 1)));
    assert_eq!(env.second.stats(&dead).await?, None);
    Ok(())
}

pub async fn the_maximum_number_of_entries_is_settled_in_one_call(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(BATCH_MAX).await?;
    let dead = env.stream("dead");
    let then = |number: usize| match number % 4 {
        0 => SettleAction::Ack,
        1 => SettleAction::Delete,
        2 => append_to(&dead, numbered(number)),
        _ => schedule(&env, DueTime::After(HOUR), numbered(number)),
    };
    let entries: Vec<Settlement> =
        ids.iter().enumerate().map(|(n, id)| Settlement { id: *id, action: then(n) }).collect();

    let answer = flow.settle("ann", &entries).await?;

    assert!(answer == settled(BATCH_MAX, 0) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.pending_ids().await?, []);
    assert_eq!(contents(&*env.second, &dead).await?.len(), BATCH_MAX / 4);
    assert_eq!(flow.ids().await?.len(), BATCH_MAX - BATCH_MAX / 4);
    let waiting = env.second.delay_stats(&env.delays("later")).await?.waiting;
    assert_eq!(waiting as usize, BATCH_MAX / 4);
    Ok(())
}

pub async fn an_empty_settle_does_nothing(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    assert_eq!(flow.settle("ann", &[]).await?, settled(0, 0));
    assert_eq!(flow.pending_ids().await?, ids);
    Ok(())
}

pub async fn everything_is_stale_in_a_deleted_stream(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let dead = env.stream("dead");
    env.second.delete_stream(&flow.stream).await?;

    let entries =
        [Settlement::ack(ids[0]), Settlement { id: ids[1], action: append_to(&dead, numbered(1)) }];
    assert_eq!(flow.settle("ann", &entries).await?, settled(0, 2));

    assert_eq!(env.second.stats(&flow.stream).await?, None, "no stream was created");
    assert_eq!(env.second.stats(&dead).await?, None, "no follow-up was written");
    Ok(())
}

pub async fn everything_is_stale_in_a_removed_group(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let (group, consumer) = (group("unknown"), consumer("ann"));
    let entries = done(&ids);
    let settle = SettleBatch {
        stream: &flow.stream,
        group: &group,
        consumer: &consumer,
        fence: None,
        entries: &entries,
    };

    assert_eq!(env.backend.settle(settle).await?, settled(0, 2));

    assert_eq!(flow.pending_ids().await?, ids);
    Ok(())
}

pub async fn an_entry_deleted_meanwhile_can_still_be_settled(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    let dead = env.stream("dead");
    env.second.delete_entries(&flow.stream, &ids).await?;
    let entries = [
        Settlement::ack(ids[0]),
        Settlement { id: ids[1], action: SettleAction::Delete },
        Settlement { id: ids[2], action: append_to(&dead, numbered(2)) },
    ];

    let answer = flow.settle("ann", &entries).await?;

    assert!(answer == settled(3, 0) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.pending_ids().await?, []);
    assert_eq!(fields_in(&*env.second, &dead).await?, [numbered(2)]);
    let keep = Retention::KEEP_ALL;
    env.second.append(&flow.stream, &numbers(1), &keep).await?;
    assert_eq!(flow.deliver("ann", ALL).await?.len(), 1, "the group continues");
    Ok(())
}
