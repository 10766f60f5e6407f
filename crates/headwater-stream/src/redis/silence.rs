//! Ends the reads of one consumer that may still be under way, wherever they are: waiting at the server, or in the network.
//!
//! Every connection of a reader bears a name made of group and consumer, and the server knows it before the first read is
//! sent. So whoever takes over lists the connections of that name and has the server end them.
//! A reader that is only just connecting would be missed. Therefore a mark is set first, and a reader looks for it after it
//! has named its connection and before it sends anything: either its connection is in the list, or it sees the mark.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, timeout_at};

use super::RedisBackend;
use super::command::Commands;
use super::connection::Connection;
use super::error::Failure;
use super::keys;
use super::node::Node;
use super::reply::Value;
use super::servers::{Effect, Servers};
use super::subscription::unavailable;
use crate::coalescer::{Coalescer, CoalescerConfig};
use crate::error::{Result, StreamError};
use crate::limits::WAIT_MAX;
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::Silenced;

/// How long the mark lies. A read that began before it and still connects is given up long before.
const MARK_FOR: Duration = Duration::from_secs(60 * 60);
/// How long servers may take that most probably have nothing to do with the stream.
const OTHERS_MAX: Duration = Duration::from_secs(1);

const _: () = assert!(MARK_FOR.as_secs() > 10 * WAIT_MAX.as_secs());

impl RedisBackend {
    pub(super) async fn silence_readers(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<Silenced> {
        let mark = keys::silenced(stream, group, consumer);
        let ms = MARK_FOR.as_millis().to_string();
        let commands = Commands::one(&["SET", &mark, "1", "PX", &ms]);
        let replies = self.call(stream, commands, Effect::Repeatable).await?;
        let unmarked = match replies.cursor().text() {
            Ok(_) => None,
            Err(Failure::Refused(refusal)) => Some(refusal.to_string()),
            Err(failure) => return Err(failure.about(&mark)),
        };
        let deadline = self.servers.deadline();
        let slot = self.slot(stream);
        let owner = self.servers.owner(slot, deadline).await.map_err(unavailable)?;
        let name = keys::reader_name(self.database, group, consumer);
        // While a slot moves, a reader may wait at the server that is to have it.
        let soon = deadline.min(Instant::now() + OTHERS_MAX);
        let others = self.servers.primaries();
        let others = others.iter().filter(|node| !Arc::ptr_eq(node, &owner));
        let others = join_all(others.map(|node| self.end_readers(node, &name, soon)));
        let (ended, others) = tokio::join!(self.end_readers(&owner, &name, deadline), others);
        let elsewhere: usize = others.into_iter().flatten().flatten().sum();
        Ok(match (ended?, unmarked) {
            (Ok(ended), None) => Silenced::Yes { ended: ended + elsewhere },
            (Err(reason), _) | (Ok(_), Some(reason)) => Silenced::No { reason },
        })
    }
}

/// What came of a wish to end the connections of a name: how many there were, or why the server does not do it.
type Ended = Result<Result<usize, String>>;

/// The servers that were asked so far to end connections. A list of all connections of a server is long, and whoever
/// takes over many partitions of many dead consumers wants them ended all at once: they share a list. It is asked for
/// after the last of them has set its mark.
#[derive(Default)]
pub(super) struct Silencers(Mutex<Vec<(Arc<Node>, Arc<Silencer>)>>);

type Silencer = Coalescer<String, Ended>;

impl RedisBackend {
    /// Has a server end all connections of this name.
    async fn end_readers(&self, node: &Arc<Node>, name: &str, deadline: Instant) -> Ended {
        let silencer = self.silencer(node)?;
        let ended = timeout_at(deadline, silencer.call(name.to_owned())).await;
        match ended {
            Ok(Ok(ended)) => ended,
            Ok(Err(gone)) => Err(StreamError::unavailable("a reader was not ended", gone)),
            Err(late) => Err(StreamError::unavailable("a reader was not ended in time", late)),
        }
    }

    fn silencer(&self, node: &Arc<Node>) -> Result<Arc<Silencer>> {
        let mut known = self.silencers.0.lock().expect("no code panics while it holds the list");
        // A silencer lives as long as the runtime that first asked for it; a backend may outlive that.
        known.retain(|(_, silencer)| !silencer.has_ended());
        if let Some((_, silencer)) = known.iter().find(|(known, _)| Arc::ptr_eq(known, node)) {
            return Ok(Arc::clone(silencer));
        }
        let primaries = self.servers.primaries();
        known.retain(|(known, _)| primaries.iter().any(|primary| Arc::ptr_eq(primary, known)));
        let (asked, patience) = (Arc::clone(node), self.servers.call_deadline());
        let silencer = Coalescer::new(CoalescerConfig::default(), move |names: Vec<String>| {
            let node = Arc::clone(&asked);
            async move {
                let ended = end_connections(&node, &names, Instant::now() + patience).await;
                let of = |name: &String| match &ended {
                    Ok(Ok(ended)) => Ok(Ok(ended.get(name).copied().unwrap_or(0))),
                    Ok(Err(reason)) => Ok(Err(reason.clone())),
                    Err(error) => Err(error.again()),
                };
                names.iter().map(of).collect()
            }
        })?;
        let silencer = Arc::new(silencer);
        known.push((Arc::clone(node), Arc::clone(&silencer)));
        Ok(silencer)
    }
}

/// Has a server end all connections of these names. Returns how many there were of each, or why it does not.
async fn end_connections(
    node: &Arc<Node>,
    names: &[String],
    deadline: Instant,
) -> Result<Result<BTreeMap<String, usize>, String>> {
    let mut commands = Commands::new();
    commands.add(&["CLIENT", "GETNAME"]);
    commands.add(&["CLIENT", "LIST", "TYPE", "normal"]);
    let packed = commands.pack();
    let sent = node.send(&packed.bytes, packed.len(), deadline).await.map_err(unavailable)?;
    let replies =
        sent.map_err(|error| StreamError::unavailable("no list of connections", error))?;
    let mut cursor = replies.cursor();
    let protocol = |failure: Failure| failure.about("CLIENT LIST");
    if let Value::Nil | Value::Text(b"") | Value::Error(_) = cursor.value().map_err(protocol)? {
        return Ok(Err("connections may not bear names here (CLIENT SETNAME)".to_owned()));
    }
    let found = match cursor.value().map_err(protocol)? {
        Value::Text(list) => connections_of(&String::from_utf8_lossy(list), names),
        Value::Error(refusal) => return Ok(Err(String::from_utf8_lossy(refusal).into_owned())),
        _ => return Err(protocol(Failure::shape("no list of connections"))),
    };
    let mut ended = BTreeMap::new();
    if found.is_empty() {
        return Ok(Ok(ended));
    }
    let mut commands = Commands::new();
    found.iter().for_each(|(_, number)| commands.add(&["CLIENT", "KILL", "ID", number]));
    let packed = commands.pack();
    let sent = node.send(&packed.bytes, packed.len(), deadline).await.map_err(unavailable)?;
    let replies =
        sent.map_err(|error| StreamError::unavailable("a reader was not ended", error))?;
    let mut cursor = replies.cursor();
    for (name, _) in found {
        match cursor.value().map_err(protocol)? {
            // None: it ended by itself meanwhile.
            Value::Number(number) => *ended.entry(name).or_insert(0) += usize::from(number > 0),
            Value::Error(refusal) => return Ok(Err(String::from_utf8_lossy(refusal).into_owned())),
            _ => return Err(protocol(Failure::shape("no number of connections"))),
        }
    }
    Ok(Ok(ended))
}

/// The connections that bear one of these names: the name and the number of each.
fn connections_of(list: &str, names: &[String]) -> Vec<(String, String)> {
    let number = |line: &str| {
        let word = |key: &str| line.split(' ').find_map(|word| word.strip_prefix(key));
        let name = word("name=").filter(|name| names.iter().any(|wanted| wanted == name))?;
        Some((name.to_owned(), word("id=")?.to_owned()))
    };
    list.lines().filter_map(number).collect()
}

/// Names a new connection of a reader. Returns whether its consumer may have been silenced on one of these streams
/// meanwhile.
pub(super) async fn introduce(
    servers: &Servers,
    connection: &mut Connection,
    streams: &[StreamName],
    (group, consumer): (&GroupName, &ConsumerName),
    deadline: Instant,
) -> Result<bool> {
    let name = keys::reader_name(servers.database(), group, consumer);
    let packed = Commands::one(&["CLIENT", "SETNAME", &name]).pack();
    let late = || StreamError::Unavailable {
        problem: "a connection was not ready in time".to_owned(),
        source: None,
    };
    let named = timeout_at(deadline, connection.ask(&packed)).await.map_err(|_| late())?;
    // A server that refuses names says so to whoever wants to silence.
    named.map_err(|error| StreamError::unavailable("a new connection broke off", error))?;
    let Some(first) = streams.first() else { return Ok(false) };
    let mut commands = Commands::new();
    for stream in streams {
        commands.add(&["EXISTS", &keys::silenced(stream, group, consumer)]);
    }
    // On the shared link, which follows a slot that moves.
    let call = servers.call(servers.slot(first.as_str()), commands, Effect::Repeatable);
    let replies = timeout_at(deadline, call).await.map_err(|_| late())??;
    let mut cursor = replies.cursor();
    let mut silenced = false;
    for _ in streams {
        silenced |= match cursor.value().map_err(|failure| failure.about(first))? {
            Value::Number(found) => found > 0,
            // Who may not look for marks may not set them either.
            _ => false,
        };
    }
    // Else a mark could have lapsed: time passes also while a process stands still.
    if Instant::now() >= deadline {
        return Err(late());
    }
    Ok(silenced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_found_by_their_whole_name() {
        let list = "id=3 addr=1.2.3.4:5 name=headwater age=1 cmd=xreadgroup\n\
                    id=4 addr=1.2.3.4:6 name=headwater:reader@0:ab age=1 cmd=xreadgroup\n\
                    id=5 addr=1.2.3.4:7 name= age=1\n\
                    id=66 addr=1.2.3.4:8 name=headwater:reader@0:abc age=1\n\
                    id=7 addr=1.2.3.4:9 name=headwater:reader@0:ab age=1\n";
        let of = |list, names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            let found = connections_of(list, &names).into_iter();
            found.map(|(_, number)| number).collect::<Vec<_>>()
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
