//! Disconnects the readers of one consumer, in any process, whether blocked on the server or in transit.
//!
//! Every connection of a reader is named after group and consumer (`CLIENT SETNAME`) before its first read. To disconnect
//! them, the server lists the connections with that name and kills them.
//! A reader that is still connecting would be missed. Therefore a tombstone key is set first, and a reader checks for it after
//! it has named its connection and before it sends a read: either its connection is in the list, or it sees the tombstone.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, timeout_at};

use super::RedisBackend;
use super::client::{Idempotency, RedisClient};
use super::command::Commands;
use super::connection::Connection;
use super::error::ReplyError;
use super::node::Node;
use super::pubsub::unavailable;
use super::reply::RespValue;
use super::scripts;
use crate::coalescer::{Coalescer, CoalescerConfig};
use crate::error::{Result, StreamError};
use crate::limits::WAIT_MAX;
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::DisconnectOutcome;

/// Lifetime of a tombstone. A read that started before it and is still connecting fails long before.
const TOMBSTONE_TTL: Duration = Duration::from_secs(60 * 60);
/// Timeout for nodes that most likely do not hold the stream.
const OTHER_NODES_TIMEOUT: Duration = Duration::from_secs(1);

const _: () = assert!(TOMBSTONE_TTL.as_secs() > 10 * WAIT_MAX.as_secs());

impl RedisBackend {
    pub(super) async fn disconnect_consumer(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<DisconnectOutcome> {
        let tombstone = self.keys().reader_tombstone(stream, group, consumer);
        let ms = TOMBSTONE_TTL.as_millis().to_string();
        let commands = Commands::on_key(&["SET"], &tombstone, &["1", "PX", &ms]);
        let mut replies = self.call(stream, commands, Idempotency::Idempotent).await?;
        if matches!(replies.cursor().text(), Err(ReplyError::Server(error)) if error.is_full()) {
            let commands = Commands::run(&scripts::SET_TOMBSTONE, &[tombstone], &[&ms]);
            replies = self.call(stream, commands, Idempotency::Idempotent).await?;
        }
        let tombstone_denied = match replies.cursor().text() {
            Ok(_) => None,
            Err(ReplyError::Server(error)) => Some(error.to_string()),
            Err(error) => return Err(error.into_stream_error(stream)),
        };
        let deadline = self.client.deadline();
        let slot = self.slot(stream);
        let owner = self.client.node_for_slot(slot, deadline).await.map_err(unavailable)?;
        let name = self.keys().reader_name(stream, group, consumer);
        // While a slot is migrated, a reader may be blocked on the importing node.
        let soon = deadline.min(Instant::now() + OTHER_NODES_TIMEOUT);
        let others = self.client.primaries();
        let others = others.iter().filter(|node| !Arc::ptr_eq(node, &owner));
        let others = join_all(others.map(|node| self.disconnect_on(node, &name, soon)));
        let (on_owner, others) = tokio::join!(self.disconnect_on(&owner, &name, deadline), others);
        let on_others: usize = others.into_iter().flatten().flatten().sum();
        Ok(match (on_owner?, tombstone_denied) {
            (Ok(readers), None) => DisconnectOutcome::Disconnected { readers: readers + on_others },
            (Err(reason), _) | (Ok(_), Some(reason)) => DisconnectOutcome::Denied { reason },
        })
    }
}

/// Number of connections that were killed, or the server's reason for denying it.
type DisconnectResult = Result<Result<usize, String>>;

/// One coalescer per node. `CLIENT LIST` is expensive, and a process that takes over many partitions disconnects many
/// consumers at once: concurrent calls share one list, which is requested after the last of them has set its tombstone.
#[derive(Default)]
pub(super) struct NodeDisconnectors(Mutex<Vec<(Arc<Node>, Arc<DisconnectCoalescer>)>>);

type DisconnectCoalescer = Coalescer<String, DisconnectResult>;

impl RedisBackend {
    /// Kills all connections with this name on one node.
    async fn disconnect_on(
        &self,
        node: &Arc<Node>,
        name: &str,
        deadline: Instant,
    ) -> DisconnectResult {
        let disconnector = self.disconnector(node)?;
        let killed = timeout_at(deadline, disconnector.call(name.to_owned())).await;
        match killed {
            Ok(Ok(killed)) => killed,
            Ok(Err(error)) => Err(StreamError::unavailable("a reader was not disconnected", error)),
            Err(late) => Err(StreamError::unavailable(
                "a reader was not disconnected within the deadline",
                late,
            )),
        }
    }

    fn disconnector(&self, node: &Arc<Node>) -> Result<Arc<DisconnectCoalescer>> {
        let mut known =
            self.disconnectors.0.lock().expect("no code panics while it holds the list");
        // A coalescer lives as long as the runtime that created it; a backend may outlive that.
        known.retain(|(_, disconnector)| !disconnector.has_ended());
        if let Some((_, disconnector)) = known.iter().find(|(known, _)| Arc::ptr_eq(known, node)) {
            return Ok(Arc::clone(disconnector));
        }
        let primaries = self.client.primaries();
        known.retain(|(known, _)| primaries.iter().any(|primary| Arc::ptr_eq(primary, known)));
        let (target, call_deadline) = (Arc::clone(node), self.client.call_deadline());
        let disconnector =
            Coalescer::new(CoalescerConfig::default(), move |names: Vec<String>| {
                let node = Arc::clone(&target);
                async move {
                    let killed =
                        kill_connections(&node, &names, Instant::now() + call_deadline).await;
                    let of = |name: &String| match &killed {
                        Ok(Ok(killed)) => Ok(Ok(killed.get(name).copied().unwrap_or(0))),
                        Ok(Err(reason)) => Ok(Err(reason.clone())),
                        Err(error) => Err(error.duplicate()),
                    };
                    names.iter().map(of).collect()
                }
            })?;
        let disconnector = Arc::new(disconnector);
        known.push((Arc::clone(node), Arc::clone(&disconnector)));
        Ok(disconnector)
    }
}

/// Kills all connections with these names. Returns how many there were of each, or the server's reason for denying it.
async fn kill_connections(
    node: &Arc<Node>,
    names: &[String],
    deadline: Instant,
) -> Result<Result<BTreeMap<String, usize>, String>> {
    let mut commands = Commands::new();
    commands.add(&["CLIENT", "GETNAME"]);
    commands.add(&["CLIENT", "LIST", "TYPE", "normal"]);
    let replies = node.request(commands, deadline).await?;
    let mut cursor = replies.cursor();
    let protocol = |error: ReplyError| error.into_stream_error("CLIENT LIST");
    let name = cursor.value().map_err(protocol)?;
    if let RespValue::Nil | RespValue::Text(b"") | RespValue::Error(_) = name {
        return Ok(Err("CLIENT SETNAME is not permitted for this user".to_owned()));
    }
    let found = match cursor.value().map_err(protocol)? {
        RespValue::Text(list) => connections_of(&String::from_utf8_lossy(list), names),
        RespValue::Error(error) => return Ok(Err(String::from_utf8_lossy(error).into_owned())),
        _ => return Err(protocol(ReplyError::unexpected("unexpected reply to CLIENT LIST"))),
    };
    let mut killed = BTreeMap::new();
    if found.is_empty() {
        return Ok(Ok(killed));
    }
    let mut commands = Commands::new();
    found.iter().for_each(|(_, id)| commands.add(&["CLIENT", "KILL", "ID", id]));
    let replies = node.request(commands, deadline).await?;
    let mut cursor = replies.cursor();
    for (name, _) in found {
        match cursor.value().map_err(protocol)? {
            // Zero: the connection was closed meanwhile.
            RespValue::Number(number) => {
                *killed.entry(name).or_insert(0) += usize::from(number > 0);
            }
            RespValue::Error(error) => {
                return Ok(Err(String::from_utf8_lossy(error).into_owned()));
            }
            _ => return Err(protocol(ReplyError::unexpected("unexpected reply to CLIENT KILL"))),
        }
    }
    Ok(Ok(killed))
}

/// Name and id of each connection with one of these names.
fn connections_of(list: &str, names: &[String]) -> Vec<(String, String)> {
    let connection = |line: &str| {
        let word = |key: &str| line.split(' ').find_map(|word| word.strip_prefix(key));
        let name = word("name=").filter(|name| names.iter().any(|wanted| wanted == name))?;
        Some((name.to_owned(), word("id=")?.to_owned()))
    };
    list.lines().filter_map(connection).collect()
}

/// Names a new connection of a reader. Returns whether the consumer may have been disconnected from one of these streams
/// meanwhile.
pub(super) async fn register_reader(
    client: &RedisClient,
    connection: &mut Connection,
    streams: &[StreamName],
    (group, consumer): (&GroupName, &ConsumerName),
    deadline: Instant,
) -> Result<bool> {
    let Some(first) = streams.first() else { return Ok(false) };
    let name = client.keys().reader_name(first, group, consumer);
    let encoded = Commands::one(&["CLIENT", "SETNAME", &name]).encode();
    let late = || StreamError::Unavailable {
        problem: "a new connection was not ready within the deadline".to_owned(),
        source: None,
    };
    let named = timeout_at(deadline, connection.request(&encoded)).await.map_err(|_| late())?;
    // An error reply is ignored here: `kill_connections` reports a server that does not permit names.
    named.map_err(|error| StreamError::unavailable("a new connection was lost", error))?;
    let mut commands = Commands::new();
    for stream in streams {
        let tombstone = client.keys().reader_tombstone(stream, group, consumer);
        commands.add_on_key(&["EXISTS"], &tombstone, &[""; 0]);
    }
    // On the shared connection, which follows a slot that is migrated.
    let call = client.call(client.slot(first.as_str()), commands, Idempotency::Idempotent);
    let replies = timeout_at(deadline, call).await.map_err(|_| late())??;
    let mut cursor = replies.cursor();
    let mut disconnected = false;
    for _ in streams {
        disconnected |= match cursor.value().map_err(|error| error.into_stream_error(first))? {
            RespValue::Number(found) => found > 0,
            // A user who cannot read tombstones cannot set them either.
            _ => false,
        };
    }
    // Otherwise a tombstone could have expired unseen: time also passes while a process is paused.
    if Instant::now() >= deadline {
        return Err(late());
    }
    Ok(disconnected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_matched_by_their_full_name() {
        let list = "id=3 addr=1.2.3.4:5 name=headwater age=1 cmd=xreadgroup\n\
                    id=4 addr=1.2.3.4:6 name=headwater:reader@0:ab age=1 cmd=xreadgroup\n\
                    id=5 addr=1.2.3.4:7 name= age=1\n\
                    id=66 addr=1.2.3.4:8 name=headwater:reader@0:abc age=1\n\
                    id=7 addr=1.2.3.4:9 name=headwater:reader@0:ab age=1\n";
        let of = |list, names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            let found = connections_of(list, &names).into_iter();
            found.map(|(_, id)| id).collect::<Vec<_>>()
        };
        assert_eq!(of(list, &["headwater:reader@0:ab"]), ["4", "7"]);
        assert_eq!(
            of(list, &["headwater:reader@0:abc", "headwater:reader@0:ab"]),
            ["4", "66", "7"]
        );
        assert!(of(list, &["headwater:reader@1:ab"]).is_empty());
        assert!(of("garbage", &["x"]).is_empty());
    }
}
