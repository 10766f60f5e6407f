//! Defines every key of the queue. No other module builds key names.
//!
//! Guarantees: keys that one atomic step touches share a hash slot of a Redis Cluster: the stream of a partition, its
//! leases and its delay set. The dead letters of a topic are one stream for all partitions, so on a cluster they may be
//! in another slot; `settle` appends there first.

use headwater_stream::{
    Backend, ConsumerName, DelayName, GroupName, HolderName, LeaseName, MapName, SetName,
    StreamName,
};

use crate::topic::{Partition, Topic, TopicName};

/// Key layout of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The topic was not created: one stream, named like the topic.
    Plain,
    /// The same on a Redis Cluster: keys that belong to the stream have its name as a hash tag.
    PlainClustered,
    /// One stream per partition: `stream:topic:T:p:I`.
    Partitioned,
    /// The same names on a Redis Cluster, where another program created the topic: keys that belong to a partition have
    /// the name of its stream as a hash tag.
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

    /// Whether the topic was not created explicitly.
    pub fn is_plain(self) -> bool {
        matches!(self, Self::Plain | Self::PlainClustered)
    }

    /// Whether the partitions may be on several servers.
    pub(crate) fn is_spread(self) -> bool {
        matches!(self, Self::PlainClustered | Self::PartitionedClustered | Self::Clustered)
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        [Self::Partitioned, Self::Clustered].into_iter().find(|layout| layout.as_str() == text)
    }
}

/// Prefix of all leases of groups. Watching it reports changes of leases and members.
pub(crate) const LEASE_PREFIX: &str = "streaming:mq:lease:";

fn valid<T>(name: headwater_stream::Result<T>) -> T {
    name.expect("names are validated, and limits.rs ensures that keys fit")
}

/// Set of all created topics.
pub(crate) fn registry() -> SetName {
    valid(SetName::new("streaming:mq:topics:registry"))
}

/// Set of the topics that were created by a message: one stream each, without metadata.
pub(crate) fn plain_registry() -> SetName {
    valid(SetName::new("streaming:mq:topics:plain"))
}

/// Metadata of a topic.
pub(crate) fn meta(topic: &TopicName) -> MapName {
    valid(MapName::new(format!("streaming:mq:topic:{topic}:meta")))
}

/// Set of the streams of a topic, for other programs.
pub(crate) fn partitions(topic: &TopicName) -> SetName {
    valid(SetName::new(format!("streaming:mq:topic:{topic}:partitions")))
}

/// The stream of a partition.
pub(crate) fn stream(topic: &Topic, partition: Partition) -> StreamName {
    let name = &topic.name;
    valid(match topic.layout {
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
    valid(match topic.layout {
        Layout::Plain | Layout::PlainClustered => StreamName::new(format!("{name}:dlq")),
        Layout::Partitioned | Layout::PartitionedClustered | Layout::Clustered => {
            StreamName::new(format!("stream:topic:{name}:dlq"))
        }
    })
}

/// The delay set of a partition; without a cluster, one set per topic.
pub(crate) fn delays(topic: &Topic, partition: Partition) -> DelayName {
    let name = &topic.name;
    valid(match topic.layout {
        Layout::Plain | Layout::Partitioned => DelayName::new(format!("streaming:mq:retry:{name}")),
        // The hash slot of the tag is that of the stream with the same name.
        Layout::PlainClustered => DelayName::new(format!("streaming:mq:retry:{{{name}}}")),
        Layout::PartitionedClustered => {
            DelayName::new(format!("streaming:mq:retry:{{{}}}", stream(topic, partition)))
        }
        Layout::Clustered => DelayName::new(format!("streaming:mq:retry:{{{name}:{partition}}}")),
    })
}

/// The data epoch, which detects that the server lost the data of a partition; without a cluster, one key for all.
pub(crate) fn data_epoch(topic: &Topic, partition: Partition) -> MapName {
    let name = &topic.name;
    valid(match topic.layout {
        Layout::Plain | Layout::Partitioned => MapName::new("streaming:mq:witness"),
        Layout::PlainClustered => MapName::new(format!("streaming:mq:witness:{{{name}}}")),
        Layout::PartitionedClustered => {
            MapName::new(format!("streaming:mq:witness:{{{}}}", stream(topic, partition)))
        }
        Layout::Clustered => MapName::new(format!("streaming:mq:witness:{{{name}:{partition}}}")),
    })
}

/// The data epochs that belong to this topic alone.
pub(crate) fn own_data_epochs(topic: &Topic) -> Vec<MapName> {
    let own = match topic.layout {
        Layout::Plain | Layout::Partitioned => 0,
        Layout::PlainClustered | Layout::PartitionedClustered | Layout::Clustered => {
            topic.partitions
        }
    };
    (0..own).map(|partition| data_epoch(topic, partition)).collect()
}

/// All delay sets of a topic.
pub(crate) fn all_delays(topic: &Topic) -> Vec<DelayName> {
    let sets = match topic.layout {
        Layout::Plain | Layout::PlainClustered | Layout::Partitioned => 1,
        Layout::PartitionedClustered | Layout::Clustered => topic.partitions,
    };
    (0..sets).map(|partition| delays(topic, partition)).collect()
}

/// The lease of the owner of a partition within a group.
pub(crate) fn lease(topic: &Topic, group: &GroupName, partition: Partition) -> LeaseName {
    let name = &topic.name;
    let group = escape(group.as_str());
    valid(match topic.layout {
        Layout::Plain | Layout::Partitioned => {
            LeaseName::new(format!("{LEASE_PREFIX}{name}:{group}:{partition}"))
        }
        Layout::PlainClustered => {
            LeaseName::new(format!("{LEASE_PREFIX}{{{name}}}:{group}:{partition}"))
        }
        Layout::PartitionedClustered => {
            LeaseName::new(format!("{LEASE_PREFIX}{{{}}}:{group}", stream(topic, partition)))
        }
        Layout::Clustered => {
            LeaseName::new(format!("{LEASE_PREFIX}{{{name}:{partition}}}:{group}"))
        }
    })
}

/// The keys of a group's membership. On a cluster it has three copies, of which a majority counts.
#[derive(Clone, Debug)]
pub(crate) struct MembershipKeys {
    group: String,
    copies: &'static [&'static str],
}

/// The hash tags of the copies. Their slots (2291, 7752, 13213) are a third of all slots apart: in a cluster whose servers
/// have equal ranges, and at least three of them, they are on different servers.
const MEMBERSHIP_TAGS: [&str; 3] = ["{l7}:", "{p2}:", "{br}:"];

impl MembershipKeys {
    pub(crate) fn new(backend: &dyn Backend, group: &GroupName) -> Self {
        let is_cluster = backend.cluster_slot("").is_some();
        let copies: &[&str] = if is_cluster { &MEMBERSHIP_TAGS } else { &[""] };
        Self { group: escape(group.as_str()), copies }
    }

    /// The members of the group; `group/members.rs` defines the format.
    pub(crate) fn members(&self) -> Vec<SetName> {
        self.each(|tag, group| SetName::new(format!("streaming:mq:members:{tag}{group}")))
    }

    /// The liveness lease of a member. It has the prefix of partition leases, so that one watch reports both.
    pub(crate) fn member(&self, member: &str) -> Vec<LeaseName> {
        self.each(|tag, group| {
            LeaseName::new(format!("{LEASE_PREFIX}~member:{tag}{group}:{member}"))
        })
    }

    /// The lease that reserves the partitions of a stopped static member. It is not renewed.
    pub(crate) fn reservation(&self, member: &str) -> Vec<LeaseName> {
        self.each(|tag, group| {
            LeaseName::new(format!("{LEASE_PREFIX}~resting:{tag}{group}:{member}"))
        })
    }

    fn each<T>(&self, name: impl Fn(&str, &str) -> headwater_stream::Result<T>) -> Vec<T> {
        self.copies.iter().map(|tag| valid(name(tag, &self.group))).collect()
    }
}

/// Acquired and released at once to notify watchers: a member joined the group.
pub(crate) fn group_notification(group: &GroupName) -> LeaseName {
    valid(LeaseName::new(format!("{LEASE_PREFIX}~bell:{}", escape(group.as_str()))))
}

/// Acquired and released at once to notify watchers: a member joined the group for this topic.
pub(crate) fn join_notification(group: &GroupName, topic: &TopicName) -> LeaseName {
    valid(LeaseName::new(format!("{LEASE_PREFIX}~join:{}:{topic}", escape(group.as_str()))))
}

/// Acquired and released at once to notify watchers: the topic was created, resized or deleted.
pub(crate) fn topic_notification(topic: &TopicName) -> LeaseName {
    valid(LeaseName::new(format!("{LEASE_PREFIX}~topic:{topic}")))
}

/// The lock for resizing or deleting a topic. Consumers do not watch it.
pub(crate) fn topic_lock(topic: &TopicName) -> LeaseName {
    valid(LeaseName::new(format!("streaming:mq:change:{topic}")))
}

/// Bytes of a group's name inside a key.
pub(crate) fn escaped_len(group: &str) -> usize {
    escape(group).len()
}

/// A group's name inside a key, with the separator escaped, so that two groups never share a key.
fn escape(part: &str) -> String {
    part.replace('%', "%25").replace(':', "%3A")
}

/// The consumer name of a lease holder.
pub(crate) fn consumer(holder: &HolderName) -> ConsumerName {
    valid(ConsumerName::new(holder.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topic(layout: Layout) -> Topic {
        Topic { layout, partitions: 3, ..Topic::plain(TopicName::new("orders").unwrap(), layout) }
    }

    #[test]
    fn keys_have_the_documented_names() {
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
    fn on_a_cluster_keys_of_one_atomic_step_share_a_hash_tag() {
        let group = GroupName::new("a:b").unwrap();
        let orders = topic(Layout::Clustered);
        for partition in 0..3 {
            let tag = format!("{{orders:{partition}}}");
            assert!(stream(&orders, partition).as_str().contains(&tag));
            assert!(delays(&orders, partition).as_str().contains(&tag));
            assert!(data_epoch(&orders, partition).as_str().contains(&tag));
            assert!(lease(&orders, &group, partition).as_str().contains(&tag));
        }
        assert_eq!(all_delays(&orders).len(), 3);
        let foreign = topic(Layout::PartitionedClustered);
        assert_eq!(stream(&foreign, 2).as_str(), "stream:topic:orders:p:2");
        assert_eq!(delays(&foreign, 2).as_str(), "streaming:mq:retry:{stream:topic:orders:p:2}");
        assert!(lease(&foreign, &group, 2).as_str().contains("{stream:topic:orders:p:2}"));
        assert!(data_epoch(&foreign, 2).as_str().contains("{stream:topic:orders:p:2}"));
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
