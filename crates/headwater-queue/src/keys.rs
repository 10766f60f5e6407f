//! Every key of the queue is spelled here, and nowhere else.
//!
//! Upstream: everybody who touches the backend. Promises: two things that one atomic step touches share a slot of a Redis
//! Cluster: the stream of a partition, its leases and its delayed entries. The dead letters of a topic are one stream
//! for all partitions, so on a cluster they may lie in another slot; `settle` appends there first.

use headwater_stream::{
    ConsumerName, DelayName, GroupName, HolderName, LeaseName, MapName, SetName, StreamName,
};

use crate::topic::{Partition, Topic, TopicName};

/// How the keys of a topic are spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Nobody created the topic: one stream, which has its name.
    Plain,
    /// The same on a Redis Cluster: what belongs to the stream carries its name as a hash tag.
    PlainClustered,
    /// One stream per partition, the seed's names.
    Partitioned,
    /// The seed's names on a Redis Cluster, where another program created the topic: what belongs to a partition
    /// carries the name of its stream as a hash tag.
    PartitionedClustered,
    /// One hash tag per partition, for a Redis Cluster.
    Clustered,
}

impl Layout {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::PlainClustered => "plain, clustered",
            Self::Partitioned => "partitioned",
            Self::PartitionedClustered => "partitioned, clustered",
            Self::Clustered => "clustered",
        }
    }

    /// Whether nobody created the topic.
    pub fn is_plain(self) -> bool {
        matches!(self, Self::Plain | Self::PlainClustered)
    }

    /// Whether the partitions lie on several servers.
    pub(crate) fn is_spread(self) -> bool {
        matches!(self, Self::PlainClustered | Self::PartitionedClustered | Self::Clustered)
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        [Self::Partitioned, Self::Clustered].into_iter().find(|layout| layout.as_str() == text)
    }
}

/// Hints about leases and members come from keys that begin so.
pub(crate) const WATCHED: &str = "streaming:mq:lease:";

fn fits<T>(name: headwater_stream::Result<T>) -> T {
    name.expect("topic, group and member names are checked, and limits.rs sees that keys fit")
}

/// All topics that were created.
pub(crate) fn registry() -> SetName {
    fits(SetName::new("streaming:mq:topics:registry"))
}

/// What is known of a topic.
pub(crate) fn meta(topic: &TopicName) -> MapName {
    fits(MapName::new(format!("streaming:mq:topic:{topic}:meta")))
}

/// The streams of a topic, for programs that look for them.
pub(crate) fn partitions(topic: &TopicName) -> SetName {
    fits(SetName::new(format!("streaming:mq:topic:{topic}:partitions")))
}

/// The stream of a partition.
pub(crate) fn stream(topic: &Topic, partition: Partition) -> StreamName {
    let name = &topic.name;
    fits(match topic.layout {
        Layout::Plain | Layout::PlainClustered => StreamName::new(name.as_str()),
        Layout::Partitioned | Layout::PartitionedClustered => {
            StreamName::new(format!("stream:topic:{name}:p:{partition}"))
        }
        Layout::Clustered => StreamName::new(format!("stream:topic:{{{name}:{partition}}}")),
    })
}

/// The dead letters of a topic.
pub(crate) fn dead_letters(topic: &Topic) -> StreamName {
    let name = &topic.name;
    fits(match topic.layout {
        Layout::Plain | Layout::PlainClustered => StreamName::new(format!("{name}:dlq")),
        Layout::Partitioned | Layout::PartitionedClustered | Layout::Clustered => {
            StreamName::new(format!("stream:topic:{name}:dlq"))
        }
    })
}

/// The delayed messages of a partition; without a cluster, one set serves the whole topic.
pub(crate) fn delays(topic: &Topic, partition: Partition) -> DelayName {
    let name = &topic.name;
    fits(match topic.layout {
        Layout::Plain | Layout::Partitioned => DelayName::new(format!("streaming:mq:retry:{name}")),
        // The slot of a tag is that of the stream that has the same name.
        Layout::PlainClustered => DelayName::new(format!("streaming:mq:retry:{{{name}}}")),
        Layout::PartitionedClustered => {
            DelayName::new(format!("streaming:mq:retry:{{{}}}", stream(topic, partition)))
        }
        Layout::Clustered => DelayName::new(format!("streaming:mq:retry:{{{name}:{partition}}}")),
    })
}

/// What tells whether the server still has the data of a partition; without a cluster, one serves all.
pub(crate) fn witness(topic: &Topic, partition: Partition) -> MapName {
    let name = &topic.name;
    fits(match topic.layout {
        Layout::Plain | Layout::Partitioned => MapName::new("streaming:mq:witness"),
        Layout::PlainClustered => MapName::new(format!("streaming:mq:witness:{{{name}}}")),
        Layout::PartitionedClustered => {
            MapName::new(format!("streaming:mq:witness:{{{}}}", stream(topic, partition)))
        }
        Layout::Clustered => MapName::new(format!("streaming:mq:witness:{{{name}:{partition}}}")),
    })
}

/// The witnesses that are a topic's own.
pub(crate) fn own_witnesses(topic: &Topic) -> Vec<MapName> {
    let own = match topic.layout {
        Layout::Plain | Layout::Partitioned => 0,
        Layout::PlainClustered | Layout::PartitionedClustered | Layout::Clustered => {
            topic.partitions
        }
    };
    (0..own).map(|partition| witness(topic, partition)).collect()
}

/// All sets of delayed messages of a topic.
pub(crate) fn all_delays(topic: &Topic) -> Vec<DelayName> {
    let sets = match topic.layout {
        Layout::Plain | Layout::PlainClustered | Layout::Partitioned => 1,
        Layout::PartitionedClustered | Layout::Clustered => topic.partitions,
    };
    (0..sets).map(|partition| delays(topic, partition)).collect()
}

/// The right of one member of a group to work on a partition.
pub(crate) fn lease(topic: &Topic, group: &GroupName, partition: Partition) -> LeaseName {
    let name = &topic.name;
    let group = escape(group.as_str());
    fits(match topic.layout {
        Layout::Plain | Layout::Partitioned => {
            LeaseName::new(format!("{WATCHED}{name}:{group}:{partition}"))
        }
        Layout::PlainClustered => {
            LeaseName::new(format!("{WATCHED}{{{name}}}:{group}:{partition}"))
        }
        Layout::PartitionedClustered => {
            LeaseName::new(format!("{WATCHED}{{{}}}:{group}", stream(topic, partition)))
        }
        Layout::Clustered => LeaseName::new(format!("{WATCHED}{{{name}:{partition}}}:{group}")),
    })
}

/// Who belongs to a group; `group/members.rs` says how they are written.
pub(crate) fn members(group: &GroupName) -> SetName {
    fits(SetName::new(format!("streaming:mq:members:{}", escape(group.as_str()))))
}

/// The lease that shows that a member lives. Its name begins like those of partitions, so one watch hears both.
pub(crate) fn member(group: &GroupName, member: &str) -> LeaseName {
    fits(LeaseName::new(format!("{WATCHED}~member:{}:{member}", escape(group.as_str()))))
}

/// The lease that keeps the partitions of a member that stopped and will be back. Nobody renews it.
pub(crate) fn resting(group: &GroupName, member: &str) -> LeaseName {
    fits(LeaseName::new(format!("{WATCHED}~resting:{}:{member}", escape(group.as_str()))))
}

/// A lease that is taken and released at once, to be heard by those who watch: somebody joined the group.
pub(crate) fn bell(group: &GroupName) -> LeaseName {
    fits(LeaseName::new(format!("{WATCHED}~bell:{}", escape(group.as_str()))))
}

/// The same, for one topic.
pub(crate) fn join_bell(group: &GroupName, topic: &TopicName) -> LeaseName {
    fits(LeaseName::new(format!("{WATCHED}~join:{}:{topic}", escape(group.as_str()))))
}

/// The same for a topic: it was created, grown or deleted.
pub(crate) fn topic_bell(topic: &TopicName) -> LeaseName {
    fits(LeaseName::new(format!("{WATCHED}~topic:{topic}")))
}

/// The right to grow or delete a topic. No consumer watches it.
pub(crate) fn change(topic: &TopicName) -> LeaseName {
    fits(LeaseName::new(format!("streaming:mq:change:{topic}")))
}

/// How many bytes a group's name has inside a key.
pub(crate) fn escaped_len(group: &str) -> usize {
    escape(group).len()
}

/// A group's name inside a key: without the colon that separates the parts, so that no two keys are spelled alike.
fn escape(part: &str) -> String {
    part.replace('%', "%25").replace(':', "%3A")
}

/// The consumer that a holder of leases is in its groups.
pub(crate) fn consumer(holder: &HolderName) -> ConsumerName {
    fits(ConsumerName::new(holder.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topic(layout: Layout) -> Topic {
        Topic { layout, partitions: 3, ..Topic::plain(TopicName::new("orders").unwrap(), layout) }
    }

    #[test]
    fn keys_are_spelled_as_other_programs_know_them() {
        let group = GroupName::new("billing").unwrap();
        let orders = topic(Layout::Partitioned);
        assert_eq!(registry().as_str(), "streaming:mq:topics:registry");
        assert_eq!(meta(&orders.name).as_str(), "streaming:mq:topic:orders:meta");
        assert_eq!(partitions(&orders.name).as_str(), "streaming:mq:topic:orders:partitions");
        assert_eq!(stream(&orders, 2).as_str(), "stream:topic:orders:p:2");
        assert_eq!(dead_letters(&orders).as_str(), "stream:topic:orders:dlq");
        assert_eq!(delays(&orders, 2).as_str(), "streaming:mq:retry:orders");
        assert_eq!(lease(&orders, &group, 2).as_str(), "streaming:mq:lease:orders:billing:2");
        let plain = topic(Layout::Plain);
        assert_eq!(stream(&plain, 0).as_str(), "orders");
        assert_eq!(dead_letters(&plain).as_str(), "orders:dlq");
    }

    #[test]
    fn on_a_cluster_what_one_step_touches_has_one_hash_tag() {
        let group = GroupName::new("a:b").unwrap();
        let orders = topic(Layout::Clustered);
        for partition in 0..3 {
            let tag = format!("{{orders:{partition}}}");
            assert!(stream(&orders, partition).as_str().contains(&tag));
            assert!(delays(&orders, partition).as_str().contains(&tag));
            assert!(witness(&orders, partition).as_str().contains(&tag));
            assert!(lease(&orders, &group, partition).as_str().contains(&tag));
        }
        assert_eq!(all_delays(&orders).len(), 3);
        let foreign = topic(Layout::PartitionedClustered);
        assert_eq!(stream(&foreign, 2).as_str(), "stream:topic:orders:p:2");
        assert_eq!(delays(&foreign, 2).as_str(), "streaming:mq:retry:{stream:topic:orders:p:2}");
        assert!(lease(&foreign, &group, 2).as_str().contains("{stream:topic:orders:p:2}"));
        assert!(witness(&foreign, 2).as_str().contains("{stream:topic:orders:p:2}"));
        assert_eq!(all_delays(&foreign).len(), 3);
    }

    #[test]
    fn no_two_groups_share_a_lease() {
        let lease = |topic: &str, group: &str| {
            let topic = Topic::plain(TopicName::new(topic).unwrap(), Layout::Partitioned);
            lease(&topic, &GroupName::new(group).unwrap(), 0)
        };
        assert_ne!(lease("a:b", "c"), lease("a", "b:c"));
        assert_ne!(lease("a", "b%3Ac"), lease("a", "b:c"));
    }
}
