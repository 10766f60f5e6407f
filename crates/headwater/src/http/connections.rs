//! Which connections are open, and which one gives way when there are too many.
//!
//! Upstream: `server` asks for a [`Permit`] before it serves a connection, and marks requests on it.
//! Promises: at most `http.connections_max` connections, and `http.client_connections_max` of one client address. Over a limit
//! the connection that has waited longest for a request is closed for the new one; a connection with a request in progress
//! is never closed. If no connection can be closed, [`RESERVED_MAX`] more are served one request each, which only `/health/`
//! answers. So sockets that send nothing, or slowly, keep out neither probes nor other clients.
//! Not here: deadlines for headers and bodies (`server`, `body`).

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::counter;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config::Http;

/// Connections beyond the limit that get one request each, for probes.
pub(super) const RESERVED_MAX: usize = 64;

/// A connection that has waited for a shorter time is not closed for another one: its request may be on its way.
const WAIT_MIN: Duration = Duration::from_millis(500);

/// What a connection beyond a limit can ask for.
const HEALTH: &str = "/health/";

/// Connections beyond a limit. Label result: `replaced` (an idle one was closed for it), `reserved` (only `/health/` is
/// answered on it), `closed`.
pub(crate) const OVER_LIMIT: &str = "headwater_http_connections_over_limit_total";

/// All connections of one listener.
pub(super) struct Connections {
    open: Mutex<Open>,
    connections_max: usize,
    client_connections_max: usize,
}

#[derive(Default)]
struct Open {
    by_id: BTreeMap<u64, Connection>,
    /// Of those that are not reserved.
    by_client: HashMap<IpAddr, usize>,
    next_id: u64,
}

struct Connection {
    client: IpAddr,
    class: Class,
    /// `None` while a request is in progress.
    waiting_since: Option<Instant>,
    closing: Arc<Notify>,
}

/// What a connection is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Every request.
    Full,
    /// One request to `/health/`.
    Reserved,
}

impl Class {
    /// Whether a request to this path is answered.
    pub(super) fn serves(self, path: &str) -> bool {
        self == Self::Full || path.starts_with(HEALTH)
    }
}

impl Connections {
    pub(super) fn new(settings: &Http) -> Arc<Self> {
        // Behind a proxy all clients have its address.
        let client_connections_max =
            if settings.forwarded { usize::MAX } else { settings.client_connections_max };
        Arc::new(Self {
            open: Mutex::default(),
            connections_max: settings.connections_max,
            client_connections_max,
        })
    }

    /// Admits a new connection of a client; `None`: close it.
    pub(super) fn admit(self: &Arc<Self>, client: IpAddr, now: Instant) -> Option<Permit> {
        let mut open = self.open();
        let of_client = open.by_client.get(&client).copied().unwrap_or(0);
        let all: usize = open.by_client.values().sum();
        let is_client_full = of_client >= self.client_connections_max;
        let class = if !is_client_full && all < self.connections_max {
            Class::Full
        } else {
            let has_waited = |since| now.duration_since(since) >= WAIT_MIN;
            let from = if is_client_full { Some(client) } else { open.largest_client(has_waited) };
            let may = |connection: &Connection, since| {
                Some(connection.client) == from && has_waited(since)
            };
            if open.close_one(Class::Full, may) {
                counter!(OVER_LIMIT, "result" => "replaced").increment(1);
                Class::Full
            } else {
                let is_room = open.count(Class::Reserved) < RESERVED_MAX;
                let is_admitted = is_room || open.close_one(Class::Reserved, |_, _| true);
                let result = if is_admitted { "reserved" } else { "closed" };
                counter!(OVER_LIMIT, "result" => result).increment(1);
                if !is_admitted {
                    return None;
                }
                Class::Reserved
            }
        };
        let (id, closing) = (open.next_id, Arc::new(Notify::new()));
        open.next_id += 1;
        if class == Class::Full {
            *open.by_client.entry(client).or_default() += 1;
        }
        let connection =
            Connection { client, class, waiting_since: Some(now), closing: Arc::clone(&closing) };
        open.by_id.insert(id, connection);
        Some(Permit { connections: Arc::clone(self), id, class, closing })
    }

    /// Closes the connection that has waited longest, of any client: there are no more file descriptors.
    pub(super) fn close_one(&self) {
        self.open().close_one(Class::Full, |_, _| true);
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    fn count(&self, class: Class) -> usize {
        self.by_id.values().filter(|connection| connection.class == class).count()
    }

    /// The client with the most connections that have waited long enough.
    fn largest_client(&self, has_waited: impl Fn(Instant) -> bool) -> Option<IpAddr> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for connection in self.by_id.values().filter(|connection| connection.class == Class::Full) {
            if connection.waiting_since.is_some_and(&has_waited) {
                *counts.entry(connection.client).or_default() += 1;
            }
        }
        counts.into_iter().max_by_key(|(_, count)| *count).map(|(client, _)| client)
    }

    /// Closes the connection that has waited longest of those that may be closed.
    fn close_one(&mut self, class: Class, may: impl Fn(&Connection, Instant) -> bool) -> bool {
        let waiting = self.by_id.iter().filter_map(|(id, connection)| {
            let since = connection.waiting_since?;
            (connection.class == class && may(connection, since)).then_some((since, *id))
        });
        let Some((_, id)) = waiting.min() else { return false };
        if let Some(closed) = self.remove(id) {
            closed.closing.notify_one();
        }
        true
    }

    fn remove(&mut self, id: u64) -> Option<Connection> {
        let connection = self.by_id.remove(&id)?;
        if connection.class == Class::Full
            && let Some(count) = self.by_client.get_mut(&connection.client)
        {
            *count -= 1;
            if *count == 0 {
                self.by_client.remove(&connection.client);
            }
        }
        Some(connection)
    }
}

/// A connection that may be served, until this is dropped.
pub(super) struct Permit {
    connections: Arc<Connections>,
    id: u64,
    pub(super) class: Class,
    closing: Arc<Notify>,
}

impl Permit {
    /// Marks the begin of a request; `None`: the connection is being closed.
    pub(super) fn begin(&self) -> Option<InProgress> {
        let mut open = self.connections.open();
        open.by_id.get_mut(&self.id)?.waiting_since = None;
        Some(InProgress { connections: Arc::clone(&self.connections), id: self.id })
    }

    /// Waits until the connection is to be closed for another one.
    pub(super) async fn closed(&self) {
        self.closing.notified().await;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.connections.open().remove(self.id);
    }
}

/// A request that is in progress, until this is dropped.
pub(super) struct InProgress {
    connections: Arc<Connections>,
    id: u64,
}

impl Drop for InProgress {
    fn drop(&mut self) {
        if let Some(connection) = self.connections.open().by_id.get_mut(&self.id) {
            connection.waiting_since = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use futures_util::FutureExt;

    use super::*;

    fn connections(connections_max: usize, client_connections_max: usize) -> Arc<Connections> {
        let open = Mutex::default();
        Arc::new(Connections { open, connections_max, client_connections_max })
    }

    fn client(number: u32) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(number))
    }

    fn is_closed(permit: &Permit) -> bool {
        permit.closed().now_or_never().is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn over_a_clients_limit_its_connection_that_waited_longest_is_closed() {
        let all = connections(10, 2);
        let now = Instant::now();
        let first = all.admit(client(1), now).unwrap();
        let second = all.admit(client(1), now + WAIT_MIN / 2).unwrap();
        let other = all.admit(client(2), now).unwrap();
        let third = all.admit(client(1), now + WAIT_MIN).unwrap();
        assert!(is_closed(&first) && !is_closed(&second) && !is_closed(&other));
        assert!(first.begin().is_none(), "no request begins on a connection that is closed");
        assert_eq!(third.class, Class::Full);
        // The second has not waited long enough, so the next can only ask for health.
        let fourth = all.admit(client(1), now + WAIT_MIN).unwrap();
        assert_eq!(fourth.class, Class::Reserved);
        assert!(fourth.class.serves("/health/live") && !fourth.class.serves("/api/v1/topics"));
        drop((first, second));
        assert_eq!(all.admit(client(1), now + WAIT_MIN).unwrap().class, Class::Full);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_with_a_request_in_progress_is_never_closed() {
        let all = connections(2, 2);
        let (first, second) =
            (all.admit(client(1), Instant::now()).unwrap(), all.admit(client(1), Instant::now()));
        let second = second.unwrap();
        let requests = (first.begin().unwrap(), second.begin().unwrap());
        tokio::time::advance(WAIT_MIN * 10).await;
        for from in [client(1), client(2)] {
            assert_eq!(all.admit(from, Instant::now()).unwrap().class, Class::Reserved);
        }
        assert!(!is_closed(&first) && !is_closed(&second));
        drop(requests);
        assert_eq!(all.admit(client(2), Instant::now()).unwrap().class, Class::Reserved);
        tokio::time::advance(WAIT_MIN).await;
        assert_eq!(all.admit(client(2), Instant::now()).unwrap().class, Class::Full);
        assert!(is_closed(&first) != is_closed(&second));
    }

    #[tokio::test(start_paused = true)]
    async fn when_all_are_taken_the_client_with_most_connections_loses_one() {
        let all = connections(4, 4);
        let now = Instant::now();
        let few = all.admit(client(1), now).unwrap();
        let many: Vec<_> = (0..3).map(|_| all.admit(client(2), now).unwrap()).collect();
        assert_eq!(all.admit(client(3), now + WAIT_MIN).unwrap().class, Class::Full);
        assert!(!is_closed(&few));
        assert_eq!(many.iter().filter(|permit| is_closed(permit)).count(), 1);
        // One whose requests are all in progress has none to lose.
        let _requests: Vec<_> = many.iter().filter_map(Permit::begin).collect();
        let next = [(); 2].map(|()| all.admit(client(3), now + WAIT_MIN));
        assert!(is_closed(&few) && next.iter().flatten().all(|it| it.class == Class::Full));
    }

    #[tokio::test(start_paused = true)]
    async fn the_reserve_is_for_the_newest_and_bounded() {
        let all = connections(1, 1);
        let now = Instant::now();
        let busy = all.admit(client(1), now).unwrap();
        let _request = busy.begin().unwrap();
        let reserved: Vec<_> =
            (0..RESERVED_MAX).map(|_| all.admit(client(1), now).unwrap()).collect();
        let newest = all.admit(client(1), now).unwrap();
        assert_eq!((newest.class, is_closed(&reserved[0])), (Class::Reserved, true));
        let requests: Vec<_> = reserved.iter().filter_map(Permit::begin).collect();
        let own = newest.begin().unwrap();
        assert_eq!(requests.len(), RESERVED_MAX - 1);
        assert!(all.admit(client(2), now).is_none());
        drop(own);
        assert!(all.admit(client(2), now).is_some());
    }
}
