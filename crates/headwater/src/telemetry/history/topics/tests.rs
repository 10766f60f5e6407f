//! Tests of the history of topics.

use super::*;

const BEGIN: u64 = 170_000_000;

fn at(slot: u64) -> Timestamp {
    Timestamp::from_millis((BEGIN + slot) * SAMPLE_MS + 3)
}

fn topic(added: u64, groups: &[(&str, u64, u64)]) -> TopicMeasure {
    let group = |(name, lag, pending): &(&str, u64, u64)| {
        ((*name).to_owned(), GroupMeasure { pending: *pending, lag: Some(*lag) })
    };
    let groups = groups.iter().map(group).collect();
    TopicMeasure { partitions: 2, is_created: true, added: Some(added), groups }
}

fn topics(all: &[(&str, TopicMeasure)]) -> BTreeMap<String, TopicMeasure> {
    all.iter().map(|(name, measure)| ((*name).to_owned(), measure.clone())).collect()
}

fn record(history: &TopicHistory, slot: u64, measure: TopicMeasure) {
    history.record(at(slot), &topics(&[("orders", measure)]), true).unwrap();
}

fn all() -> HistoryRange {
    let ms = |slot: u64| (BEGIN + slot) * SAMPLE_MS;
    HistoryRange { from_ms: ms(0), to_ms: ms(1000), step_ms: SAMPLE_MS }
}

/// The slot, what was added and settled, and the lag of `billing`.
type Shown = (u64, Option<u64>, Option<u64>, Option<u64>);

fn shown(history: &TopicHistory) -> Vec<Shown> {
    let points = history.points("orders", all()).unwrap();
    let row = |(at, point): (u64, TopicPoint)| {
        let group = point.groups.get("billing").copied().unwrap_or_default();
        (at / SAMPLE_MS - BEGIN, point.added, group.settled, group.lag)
    };
    points.into_iter().map(row).collect()
}

#[test]
fn a_sample_has_what_was_added_and_settled_since_the_last_one() {
    let history = TopicHistory::default();
    record(&history, 1, topic(100, &[("billing", 10, 0)]));
    record(&history, 2, topic(130, &[("billing", 12, 3)]));
    assert!(history.record(at(2), &topics(&[]), true).is_none(), "once in ten seconds");
    // 18 were read and settled; three are in progress, of which two are settled in the next step.
    record(&history, 3, topic(130, &[("billing", 12, 1), ("audit", 0, 0)]));
    // After a pause it is unknown when they were added.
    record(&history, 9, topic(500, &[("billing", 400, 0)]));
    record(&history, 10, topic(500, &[("billing", 0, 0)]));
    let expected = [
        (0, None, None, Some(10)),
        (1, Some(30), Some(25), Some(12)),
        (2, Some(0), Some(2), Some(12)),
        (8, None, None, Some(400)),
        (9, Some(0), Some(400), Some(0)),
    ];
    assert_eq!(shown(&history), expected);
    let points = history.points("orders", all()).unwrap();
    let audit = points[&((BEGIN + 2) * SAMPLE_MS)].groups["audit"];
    assert_eq!(audit.settled, None, "a group that begins at the end has settled nothing");
    // In steps of a minute, counts are added, and the lag is the largest.
    let minute = HistoryRange { step_ms: 6 * SAMPLE_MS, ..all() };
    let points = history.points("orders", minute).unwrap();
    let first = points.values().next().unwrap();
    assert_eq!((first.samples, first.added), (3, Some(30)));
    assert_eq!(
        (first.groups["billing"].settled, first.groups["billing"].lag),
        (Some(27), Some(12))
    );
    assert_eq!(history.points("other", all()), None);
}

#[test]
fn a_new_topic_counts_from_its_first_message_and_a_failed_one_does_not() {
    let history = TopicHistory::default();
    history.record(at(1), &topics(&[]), true).unwrap();
    record(&history, 2, topic(6, &[("billing", 2, 0)]));
    assert_eq!(shown(&history), [(1, Some(6), Some(4), Some(2))]);
    // It could not be measured, so its next count is not an increase.
    history.record(at(3), &topics(&[]), false).unwrap();
    record(&history, 4, topic(50, &[("billing", 2, 0)]));
    assert_eq!(shown(&history)[1], (3, None, None, Some(2)));
    // The clock is set back: later samples are forgotten.
    record(&history, 3, topic(60, &[("billing", 2, 0)]));
    assert_eq!(shown(&history), [(1, Some(6), Some(4), Some(2)), (2, None, None, Some(2))]);
}

#[test]
fn memory_is_bounded_and_the_busiest_topics_are_kept() {
    let history = TopicHistory::default();
    let groups: Vec<String> = (0..10).map(|number| format!("g{number}")).collect();
    for round in 0..400_u64 {
        let measured = (0..60_u64).map(|number| {
            let groups: Vec<_> = groups.iter().map(|name| (name.as_str(), number, 0)).collect();
            (format!("t{number:03}"), topic(1000 + round * number, &groups))
        });
        history.record(at(round), &measured.collect(), true).unwrap();
    }
    let state = history.state();
    let names: Vec<_> = state.series.keys().cloned().collect();
    let busiest: Vec<_> = (10..60).map(|number| format!("t{number:03}")).collect();
    assert_eq!(names, busiest);
    for series in state.series.values() {
        assert_eq!((series.added.len(), series.groups.len()), (SAMPLES_MAX, GROUPS_MAX));
        assert!(series.groups.values().all(|samples| samples.len() == SAMPLES_MAX));
    }
    assert!(!state.is_all_watched);
}

#[test]
fn rates_are_of_the_last_minute_and_the_curve_of_the_last_hour() {
    let history = TopicHistory::default();
    assert_eq!(history.rates("orders", at(1)), None);
    // 0 to 5 per ten seconds, then 20.
    let mut added = 0;
    for slot in 0..400 {
        added += if slot < 390 { 5 } else { 20 };
        record(&history, slot, topic(added, &[("a", 0, 0), ("b", added, 0)]));
    }
    let rates = history.rates("orders", at(400)).unwrap();
    assert_eq!((rates.added_per_second, rates.settled_per_second), (Some(2.0), Some(2.0)));
    assert_eq!(rates.curve.len(), CURVE_STEPS);
    assert_eq!(rates.curve[10], 60, "{:?}", rates.curve);
    assert!(rates.curve[CURVE_STEPS - 1] > 60, "{:?}", rates.curve);
    let later = history.rates("orders", at(500)).unwrap();
    assert_eq!((later.added_per_second, later.settled_per_second), (None, None));
}

#[test]
fn a_group_that_is_new_on_a_topic_without_messages_counts_from_its_first_one() {
    let history = TopicHistory::default();
    // Between the creation of the topic and that of the group.
    record(&history, 1, topic(0, &[]));
    record(&history, 2, topic(40, &[("billing", 38, 1)]));
    record(&history, 3, topic(40, &[("billing", 0, 0), ("late", 40, 0), ("end", 0, 0)]));
    let expected =
        [(0, None, None, None), (1, Some(40), Some(1), Some(38)), (2, Some(0), Some(39), Some(0))];
    assert_eq!(shown(&history), expected);
    let points = history.points("orders", all()).unwrap();
    let groups = &points[&((BEGIN + 2) * SAMPLE_MS)].groups;
    assert_eq!((groups["late"].settled, groups["end"].settled), (Some(0), None));
}

fn owner(holder: &str, epoch: u64) -> Option<OwnerView> {
    let time = Duration::from_secs(1);
    Some(OwnerView { holder: holder.to_owned(), epoch, heartbeat_age: time, remaining: time })
}

fn watch(history: &TopicHistory, slot: u64, is_new: bool, owners: [Option<OwnerView>; 2]) {
    let (topic, group) = ("orders".to_owned(), "billing".to_owned());
    let watched = vec![WatchedGroup { topic, group, is_new }];
    history.note_owners(at(slot), watched, vec![owners.into()]);
}

#[test]
fn a_new_owner_is_a_move_and_the_first_look_is_not() {
    let history = TopicHistory::default();
    watch(&history, 1, false, [owner("ann", 3), None]);
    // One partition gets its first owner.
    watch(&history, 2, false, [owner("ann", 3), owner("bob", 1)]);
    // A server that does not answer says nothing, and neither does a lease that has ended.
    watch(&history, 3, false, [owner(LeaseInfo::UNKNOWN, 0), None]);
    assert_eq!(history.moves(at(3)).0.len(), 1);
    watch(&history, 4, false, [owner("bob", 4), owner("bob", 1)]);
    watch(&history, 5, false, [owner("cid", 5), owner("cid", 2)]);
    let (moves, since, is_complete) = history.moves(at(5));
    let shown = |one: &PartitionMove| {
        (one.at, one.partition, one.from.clone().unwrap_or_default(), one.to.clone(), one.epoch)
    };
    let expected = [
        (at(5), 1, "bob".to_owned(), "cid".to_owned(), 2),
        (at(5), 0, "bob".to_owned(), "cid".to_owned(), 5),
        (at(4), 0, "ann".to_owned(), "bob".to_owned(), 4),
        (at(2), 1, String::new(), "bob".to_owned(), 1),
    ];
    assert_eq!(moves.iter().map(shown).collect::<Vec<_>>(), expected);
    assert_eq!((since, is_complete), (Some(at(1)), false), "nothing was recorded yet");
    let rebalances = history.rebalances(all());
    let counts: Vec<_> = rebalances.iter().map(|one| (one.at, one.partitions)).collect();
    assert_eq!(counts, [(at(2), 1), (at(4), 1), (at(5), 2)]);

    // Moves are forgotten after an hour, and if there are too many.
    for epoch in 10..10 + MOVES_MAX as u64 {
        watch(&history, 6, false, [owner("ann", epoch), owner("ann", epoch)]);
    }
    assert_eq!(history.moves(at(6)).0.len(), MOVES_MAX);
    watch(&history, 400, false, [owner("zoe", 5000), None]);
    assert_eq!(history.moves(at(400)).0.len(), 1);
}

#[test]
fn the_first_owners_of_a_new_group_are_moves() {
    let history = TopicHistory::default();
    history.record(at(1), &topics(&[]), true).unwrap();
    let measured = topics(&[("orders", topic(6, &[("billing", 2, 0)]))]);
    let watched = history.record(at(2), &measured, true).unwrap();
    assert!(watched.len() == 1 && watched[0].is_new && history.state().is_all_watched);
    history.note_owners(at(2), watched, vec![vec![owner("ann", 1), owner("ann", 1)]]);
    assert_eq!(history.moves(at(2)).0.len(), 2);
    let watched = history.record(at(3), &measured, true).unwrap();
    assert!(!watched[0].is_new);
    // Also after a pause, for which rates are unknown.
    let measured = topics(&[("orders", topic(6, &[("billing", 2, 0), ("shipping", 6, 0)]))]);
    let watched = history.record(at(9), &measured, true).unwrap();
    let new: Vec<_> = watched.iter().map(|one| (one.group.as_str(), one.is_new)).collect();
    assert_eq!(new, [("shipping", true), ("billing", false)]);
}

#[test]
fn a_plain_stream_that_is_listed_later_has_not_got_all_its_messages_now() {
    let history = TopicHistory::default();
    history.record(at(1), &topics(&[]), true).unwrap();
    let plain = |added| TopicMeasure { is_created: false, ..topic(added, &[("billing", 2, 0)]) };
    let watched = history.record(at(2), &topics(&[("orders", plain(900))]), true).unwrap();
    assert!(!watched[0].is_new, "its owners are not new");
    record(&history, 3, plain(907));
    let expected = [(1, None, None, Some(2)), (2, Some(7), Some(7), Some(2))];
    assert_eq!(shown(&history), expected);
}

#[test]
fn the_history_of_a_topic_that_is_not_measured_ends_while_another_one_fails() {
    let history = TopicHistory::default();
    record(&history, 1, topic(6, &[("billing", 2, 0)]));
    record(&history, 2, topic(8, &[("billing", 2, 0)]));
    let other = topics(&[("refunds", topic(1, &[]))]);
    history.record(at(360), &other, false).unwrap();
    assert_eq!(shown(&history).len(), 2);
    history.record(at(361), &other, false).unwrap();
    assert_eq!(shown(&history), [(1, Some(2), Some(2), Some(2))]);
    history.record(at(362), &other, false).unwrap();
    assert_eq!(history.points("orders", all()), None);
}

#[test]
fn moves_are_those_of_the_last_hour_and_say_if_some_are_missing() {
    let history = TopicHistory::default();
    let measured = topics(&[("orders", topic(6, &[("billing", 2, 0)]))]);
    history.record(at(1), &measured, true).unwrap();
    watch(&history, 1, true, [owner("ann", 1), owner("ann", 1)]);
    assert_eq!(history.moves(at(2)).1, Some(at(1)));
    // Also if owners cannot be read any more.
    let (moves, since, is_complete) = history.moves(at(362));
    assert_eq!((moves.len(), since, is_complete), (0, Some(at(2)), true));

    for epoch in 2..2 + MOVES_MAX as u64 {
        watch(&history, 400, false, [owner("bob", epoch), owner("bob", epoch)]);
    }
    let (moves, _, is_complete) = history.moves(at(401));
    assert_eq!((moves.len(), is_complete), (MOVES_MAX, false), "others were forgotten");
    assert!(history.moves(at(761)).2);
}
