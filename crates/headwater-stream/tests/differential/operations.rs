//! Operations of a sequence: calls that refer to objects by small numbers.
//!
//! An entry, epoch or delayed entry is referred to by its index among those seen so far, so a sequence keeps
//! its meaning when calls are removed from it.

use proptest::prelude::*;
use proptest::sample::select;

/// Number of objects of each type; the number after the last is the name shared by all types.
pub(crate) const STREAMS: u8 = 3;
pub(crate) const GROUPS: u8 = 2;
pub(crate) const CONSUMERS: u8 = 3;
pub(crate) const DELAYS: u8 = 2;
pub(crate) const LEASES: u8 = 2;
pub(crate) const MAPS: u8 = 2;
pub(crate) const SETS: u8 = 2;

/// An object seen before, by its index modulo the number of objects.
pub(crate) type Nth = u8;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Start {
    Beginning,
    End,
    After(Nth),
}

/// Times that do not pass during a test.
#[derive(Clone, Copy, Debug)]
pub(crate) enum When {
    Past(u8),
    AtOnce,
    InAnHour,
    FarFuture(u8),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum From {
    Anyone,
    Others,
    Consumer(u8),
    Ids([Nth; 3]),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Done,
    Delete,
    Append(u8),
    Schedule(u8, u8, When),
    Release,
}

/// The fence to present: a lease and the nth epoch seen; `None` presents none.
pub(crate) type Guard = Option<(u8, Nth)>;

#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Append {
        stream: u8,
        count: u8,
    },
    AppendOnce {
        stream: u8,
        ids: Vec<u8>,
    },
    Appended {
        stream: u8,
        ids: Vec<u8>,
    },
    EnsureGroup {
        stream: u8,
        group: u8,
        start: Start,
    },
    RemoveGroup {
        stream: u8,
        group: u8,
    },
    ResetGroup {
        stream: u8,
        group: u8,
        start: Start,
    },
    Read {
        streams: Vec<u8>,
        group: u8,
        consumer: u8,
        count: u8,
    },
    Tail {
        stream: u8,
        after: Option<Nth>,
        count: u8,
    },
    Settle {
        stream: u8,
        group: u8,
        consumer: u8,
        guard: Guard,
        entries: Vec<(Nth, End)>,
    },
    KeepAlive {
        stream: u8,
        group: u8,
        consumer: u8,
        ids: Vec<Nth>,
    },
    Reclaim {
        stream: u8,
        group: u8,
        consumer: u8,
        guard: Guard,
        from: From,
        long_idle: bool,
        after: Option<Nth>,
        count: u8,
    },
    Pending {
        stream: u8,
        group: u8,
        consumer: Option<u8>,
        long_idle: bool,
        after: Option<Nth>,
        count: u8,
    },
    Range {
        stream: u8,
        from: Option<Nth>,
        to: Option<Nth>,
        backward: bool,
        count: u8,
    },
    Trim {
        stream: u8,
        len: u8,
        force: bool,
    },
    DeleteEntries {
        stream: u8,
        ids: Vec<Nth>,
    },
    DeleteStream {
        stream: u8,
    },
    Stats {
        stream: u8,
    },
    RemoveIdle {
        stream: u8,
        group: u8,
        long_idle: bool,
    },
    Schedule {
        delays: u8,
        items: Vec<(u8, When)>,
    },
    Cancel {
        delays: u8,
        id: Nth,
    },
    TakeDue {
        delays: u8,
        count: u8,
    },
    WaitDue {
        delays: u8,
    },
    DelayStats {
        delays: u8,
    },
    Delayed {
        delays: u8,
        offset: u8,
        count: u8,
    },
    DeleteDelays {
        delays: u8,
    },
    Acquire {
        lease: u8,
        holder: u8,
    },
    Renew {
        holder: u8,
        leases: Vec<(u8, Nth)>,
    },
    Release {
        holder: u8,
        leases: Vec<(u8, Nth)>,
    },
    Leases,
    SetAdd {
        set: u8,
        members: Vec<u8>,
    },
    SetRemove {
        set: u8,
        members: Vec<u8>,
    },
    SetMembers {
        set: u8,
    },
    SetContains {
        set: u8,
        members: Vec<u8>,
    },
    MapCreate {
        map: u8,
        fields: Vec<(u8, u8)>,
    },
    MapUpdate {
        map: u8,
        expect: Option<(u8, u8)>,
        fields: Vec<(u8, u8)>,
    },
    MapGet {
        map: u8,
    },
    MapDelete {
        map: u8,
    },
    Begin {
        ids: Vec<u8>,
    },
    Finish {
        ids: Vec<(u8, u8)>,
    },
    Abandon {
        ids: Vec<u8>,
    },
}

/// The number of an object: mostly of its own type, sometimes the name shared by all types.
fn name(own: u8) -> impl Strategy<Value = u8> {
    prop_oneof![30 => 0..own, 1 => Just(own)]
}

fn nth() -> impl Strategy<Value = Nth> {
    any::<Nth>()
}

fn few<T: Strategy>(of: T) -> impl Strategy<Value = Vec<T::Value>> {
    prop::collection::vec(of, 0..4)
}

fn when() -> impl Strategy<Value = When> {
    prop_oneof![
        2 => (0..3u8).prop_map(When::Past),
        2 => Just(When::AtOnce),
        1 => Just(When::InAnHour),
        1 => (0..3u8).prop_map(When::FarFuture),
    ]
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![
        4 => Just(End::Done),
        1 => Just(End::Delete),
        2 => name(STREAMS).prop_map(End::Append),
        2 => (name(DELAYS), name(STREAMS), when()).prop_map(|(d, s, w)| End::Schedule(d, s, w)),
        2 => Just(End::Release),
    ]
}

fn guard() -> impl Strategy<Value = Guard> {
    prop_oneof![5 => Just(None), 2 => (name(LEASES), nth()).prop_map(Some)]
}

fn from() -> impl Strategy<Value = From> {
    prop_oneof![
        2 => Just(From::Anyone),
        2 => Just(From::Others),
        2 => (0..CONSUMERS).prop_map(From::Consumer),
        1 => any::<[Nth; 3]>().prop_map(From::Ids),
    ]
}

fn count() -> impl Strategy<Value = u8> {
    select(vec![1, 2, 3, 5, 100])
}

fn on_streams() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let start = || {
        prop_oneof![
            3 => Just(Start::Beginning),
            1 => Just(Start::End),
            1 => nth().prop_map(Start::After)
        ]
    };
    let at = || (name(STREAMS), 0..GROUPS);
    let hand = || (name(STREAMS), 0..GROUPS, 0..CONSUMERS);
    let streams = prop_oneof![4 => Just(vec![0]), 2 => Just(vec![1, 0]), 1 => Just(vec![2, 0, 1]), 1 => name(STREAMS).prop_map(|s| vec![s])];
    let settlements = prop::collection::vec((nth(), end()), 0..6);
    prop_oneof![
        8 => (name(STREAMS), 1..5u8).prop_map(|(stream, count)| Append { stream, count }),
        3 => (name(STREAMS), few(0..6u8)).prop_map(|(stream, ids)| AppendOnce { stream, ids }),
        1 => (0..STREAMS, few(0..6u8)).prop_map(|(stream, ids)| Appended { stream, ids }),
        3 => (at(), start()).prop_map(|((stream, group), start)| EnsureGroup { stream, group, start }),
        1 => at().prop_map(|(stream, group)| RemoveGroup { stream, group }),
        1 => (at(), start()).prop_map(|((stream, group), start)| ResetGroup { stream, group, start }),
        10 => (streams, 0..GROUPS, 0..CONSUMERS, count())
            .prop_map(|(streams, group, consumer, count)| Read { streams, group, consumer, count }),
        1 => (name(STREAMS), prop::option::of(nth()), count())
            .prop_map(|(stream, after, count)| Tail { stream, after, count }),
        10 => (hand(), guard(), settlements).prop_map(|((stream, group, consumer), guard, entries)|
            Settle { stream, group, consumer, guard, entries }),
        2 => (hand(), few(nth())).prop_map(|((stream, group, consumer), ids)|
            KeepAlive { stream, group, consumer, ids }),
        6 => (hand(), guard(), from(), any::<bool>(), prop::option::weighted(0.3, nth()), count())
            .prop_map(|((stream, group, consumer), guard, from, long_idle, after, count)|
                Reclaim { stream, group, consumer, guard, from, long_idle, after, count }),
        2 => (at(), prop::option::of(0..CONSUMERS), any::<bool>(), prop::option::of(nth()), count())
            .prop_map(|((stream, group), consumer, long_idle, after, count)|
                Pending { stream, group, consumer, long_idle, after, count }),
        1 => (name(STREAMS), prop::option::of(nth()), prop::option::of(nth()), any::<bool>(), count())
            .prop_map(|(stream, from, to, backward, count)|
                Range { stream, from, to, backward, count }),
        2 => (name(STREAMS), 0..10u8, prop::bool::weighted(0.3))
            .prop_map(|(stream, len, force)| Trim { stream, len, force }),
        2 => (name(STREAMS), few(nth())).prop_map(|(stream, ids)| DeleteEntries { stream, ids }),
        1 => name(STREAMS).prop_map(|stream| DeleteStream { stream }),
        1 => name(STREAMS).prop_map(|stream| Stats { stream }),
        1 => (at(), any::<bool>())
            .prop_map(|((stream, group), long_idle)| RemoveIdle { stream, group, long_idle }),
    ]
}

fn on_delays() -> impl Strategy<Value = Operation> {
    use Operation::*;
    prop_oneof![
        4 => (name(DELAYS), few((name(STREAMS), when())))
            .prop_map(|(delays, items)| Schedule { delays, items }),
        1 => (name(DELAYS), nth()).prop_map(|(delays, id)| Cancel { delays, id }),
        3 => (name(DELAYS), count()).prop_map(|(delays, count)| TakeDue { delays, count }),
        1 => name(DELAYS).prop_map(|delays| WaitDue { delays }),
        1 => name(DELAYS).prop_map(|delays| DelayStats { delays }),
        1 => (name(DELAYS), 0..3u8, count())
            .prop_map(|(delays, offset, count)| Delayed { delays, offset, count }),
        1 => name(DELAYS).prop_map(|delays| DeleteDelays { delays }),
    ]
}

fn on_the_rest() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let fields = || few((0..3u8, 0..3u8));
    let fences = || few((name(LEASES), nth()));
    let members = || few(0..4u8);
    prop_oneof![
        4 => (name(LEASES), 0..3u8).prop_map(|(lease, holder)| Acquire { lease, holder }),
        1 => (0..3u8, fences()).prop_map(|(holder, leases)| Renew { holder, leases }),
        2 => (0..3u8, fences()).prop_map(|(holder, leases)| Release { holder, leases }),
        1 => Just(Leases),
        2 => (name(SETS), members()).prop_map(|(set, members)| SetAdd { set, members }),
        1 => (name(SETS), members()).prop_map(|(set, members)| SetRemove { set, members }),
        1 => name(SETS).prop_map(|set| SetMembers { set }),
        1 => (name(SETS), members()).prop_map(|(set, members)| SetContains { set, members }),
        2 => (name(MAPS), fields()).prop_map(|(map, fields)| MapCreate { map, fields }),
        2 => (name(MAPS), prop::option::of((0..3u8, 0..3u8)), fields())
            .prop_map(|(map, expect, fields)| MapUpdate { map, expect, fields }),
        1 => name(MAPS).prop_map(|map| MapGet { map }),
        1 => name(MAPS).prop_map(|map| MapDelete { map }),
        1 => few(0..4u8).prop_map(|ids| Begin { ids }),
        1 => few((0..4u8, 0..3u8)).prop_map(|ids| Finish { ids }),
        1 => few(0..4u8).prop_map(|ids| Abandon { ids }),
    ]
}

/// A sequence of calls.
pub(crate) fn sequences() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![6 => on_streams(), 2 => on_delays(), 2 => on_the_rest()];
    prop::collection::vec(operation, 1..50)
}
