//! Limits open connections, and selects the one to close when there are too many.
//!
//! Upstream: `server.rs` obtains a [`ConnectionPermit`] before it serves a connection, and marks requests on it.
//! Guarantees: at most `http.connections_max` connections, and `http.client_connections_max` of one client address. At
//! a limit the connection that has been idle longest is closed for the new one; a connection with a request in
//! progress is never closed. If none can be closed, up to [`RESERVED_MAX`] more connections are served one request
//! each, to `/health/` only. So idle or slow sockets block neither health probes nor other clients. Not here:
//! timeouts of headers and bodies (`server.rs`, `body.rs`).

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::counter;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config::HttpSettings;

/// Connections above the limit, for health probes; each serves one request.
pub(super) const RESERVED_MAX: usize = 64;

/// A connection that has been idle for less than this is not closed: its request may be on the way.
const WAIT_MIN: Duration = Duration::from_millis(500);

/// Path prefix served on connections above the limit.
const HEALTH: &str = "/health/";

/// Connections above a limit. Label result: `replaced` (an idle one was closed), `reserved` (serves only `/health/`),
/// `closed`.
pub(crate) const OVER_LIMIT: &str = "headwater_http_connections_over_limit_total";

/// The connections of one listener.
pub(super) struct ConnectionLimiter {
    open: Mutex<OpenConnections>,
    connections_max: usize,
    client_connections_max: usize,
}

#[derive(Default)]
struct OpenConnections {
    by_id: BTreeMap<u64, OpenConnection>,
    /// Without reserved connections.
    by_client: HashMap<IpAddr, usize>,
    next_id: u64,
}

struct OpenConnection {
    client: IpAddr,
    class: ConnectionClass,
    /// `None` while a request is in progress.
    waiting_since: Option<Instant>,
    closing: Arc<Notify>,
}

/// What may be requested on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionClass {
    /// Every request.
    Full,
    /// One request to `/health/`.
    Reserved,
}

impl ConnectionClass {
    /// Whether a request to this path is served.
    pub(super) fn serves(self, path: &str) -> bool {
        self == Self::Full || path.starts_with(HEALTH)
    }
}

impl ConnectionLimiter {
    pub(super) fn new(settings: &HttpSettings) -> Arc<Self> {
        // Behind a proxy all connections have its address.
        let client_connections_max =
            if settings.forwarded { usize::MAX } else { settings.client_connections_max };
        Arc::new(Self {
            open: Mutex::default(),
            connections_max: settings.connections_max,
            client_connections_max,
        })
    }

    /// Admits a new connection of a client; `None` means that it must be closed.
    pub(super) fn admit(
        self: &Arc<Self>,
        client: IpAddr,
        now: Instant,
    ) -> Option<ConnectionPermit> {
        let mut open = self.open();
        let of_client = open.by_client.get(&client).copied().unwrap_or(0);
        let all: usize = open.by_client.values().sum();
        let is_client_full = of_client >= self.client_connections_max;
        let class = if !is_client_full && all < self.connections_max {
            ConnectionClass::Full
        } else {
            let has_waited = |since| now.duration_since(since) >= WAIT_MIN;
            let from = if is_client_full { Some(client) } else { open.largest_client(has_waited) };
            let may = |connection: &OpenConnection, since| {
                Some(connection.client) == from && has_waited(since)
            };
            if open.close_one(ConnectionClass::Full, may) {
                counter!(OVER_LIMIT, "result" => "replaced").increment(1);
                ConnectionClass::Full
            } else {
                let is_room = open.count(ConnectionClass::Reserved) < RESERVED_MAX;
                let is_admitted = is_room || open.close_one(ConnectionClass::Reserved, |_, _| true);
                let result = if is_admitted { "reserved" } else { "closed" };
                counter!(OVER_LIMIT, "result" => result).increment(1);
                if !is_admitted {
                    return None;
                }
                ConnectionClass::Reserved
            }
        };
        let (id, closing) = (open.next_id, Arc::new(Notify::new()));
        open.next_id += 1;
        if class == ConnectionClass::Full {
            *open.by_client.entry(client).or_default() += 1;
        }
        let connection = OpenConnection {
            client,
            class,
            waiting_since: Some(now),
            closing: Arc::clone(&closing),
        };
        open.by_id.insert(id, connection);
        Some(ConnectionPermit { connections: Arc::clone(self), id, class, closing })
    }

    /// Closes the connection that has been idle longest, of any client: no file descriptors are left.
    pub(super) fn close_one(&self) {
        self.open().close_one(ConnectionClass::Full, |_, _| true);
    }

    fn open(&self) -> MutexGuard<'_, OpenConnections> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenConnections {
    fn count(&self, class: ConnectionClass) -> usize {
        self.by_id.values().filter(|connection| connection.class == class).count()
    }

    /// The client with the most connections that have been idle long enough.
    fn largest_client(&self, has_waited: impl Fn(Instant) -> bool) -> Option<IpAddr> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for connection in
            self.by_id.values().filter(|connection| connection.class == ConnectionClass::Full)
        {
            if connection.waiting_since.is_some_and(&has_waited) {
                *counts.entry(connection.client).or_default() += 1;
            }
        }
        counts.into_iter().max_by_key(|(_, count)| *count).map(|(client, _)| client)
    }

    /// Closes the connection that has been idle longest among those that may be closed.
    fn close_one(
        &mut self,
        class: ConnectionClass,
        may: impl Fn(&OpenConnection, Instant) -> bool,
    ) -> bool {
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

    fn remove(&mut self, id: u64) -> Option<OpenConnection> {
        let connection = self.by_id.remove(&id)?;
        if connection.class == ConnectionClass::Full
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

/// Permission to serve a connection, until dropped.
pub(super) struct ConnectionPermit {
    connections: Arc<ConnectionLimiter>,
    id: u64,
    pub(super) class: ConnectionClass,
    closing: Arc<Notify>,
}

impl ConnectionPermit {
    /// Marks the start of a request; `None` if the connection is being closed.
    pub(super) fn begin(&self) -> Option<RequestInProgress> {
        let mut open = self.connections.open();
        open.by_id.get_mut(&self.id)?.waiting_since = None;
        Some(RequestInProgress { connections: Arc::clone(&self.connections), id: self.id })
    }

    /// Waits until the connection must be closed for another one.
    pub(super) async fn closed(&self) {
        self.closing.notified().await;
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.connections.open().remove(self.id);
    }
}

/// A request in progress, until dropped.
pub(super) struct RequestInProgress {
    connections: Arc<ConnectionLimiter>,
    id: u64,
}

impl Drop for RequestInProgress {
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

    fn connections(
        connections_max: usize,
        client_connections_max: usize,
    ) -> Arc<ConnectionLimiter> {
        let open = Mutex::default();
        Arc::new(ConnectionLimiter { open, connections_max, client_connections_max })
    }

    fn client(number: u32) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(number))
    }

    fn is_closed(permit: &ConnectionPermit) -> bool {
        permit.closed().now_or_never().is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn at_a_clients_limit_its_longest_idle_connection_is_closed() {
        let all = connections(10, 2);
        let now = Instant::now();
        let first = all.admit(client(1), now).unwrap();
        let second = all.admit(client(1), now + WAIT_MIN / 2).unwrap();
        let other = all.admit(client(2), now).unwrap();
        let third = all.admit(client(1), now + WAIT_MIN).unwrap();
        assert!(is_closed(&first) && !is_closed(&second) && !is_closed(&other));
        assert!(first.begin().is_none(), "no request starts on a closed connection");
        assert_eq!(third.class, ConnectionClass::Full);
        // The second has not been idle long enough, so the next connection is reserved.
        let fourth = all.admit(client(1), now + WAIT_MIN).unwrap();
        assert_eq!(fourth.class, ConnectionClass::Reserved);
        assert!(fourth.class.serves("/health/live") && !fourth.class.serves("/api/v1/topics"));
        drop((first, second));
        assert_eq!(all.admit(client(1), now + WAIT_MIN).unwrap().class, ConnectionClass::Full);
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
            assert_eq!(all.admit(from, Instant::now()).unwrap().class, ConnectionClass::Reserved);
        }
        assert!(!is_closed(&first) && !is_closed(&second));
        drop(requests);
        assert_eq!(all.admit(client(2), Instant::now()).unwrap().class, ConnectionClass::Reserved);
        tokio::time::advance(WAIT_MIN).await;
        assert_eq!(all.admit(client(2), Instant::now()).unwrap().class, ConnectionClass::Full);
        assert!(is_closed(&first) != is_closed(&second));
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_total_limit_the_client_with_most_connections_loses_one() {
        let all = connections(4, 4);
        let now = Instant::now();
        let few = all.admit(client(1), now).unwrap();
        let many: Vec<_> = (0..3).map(|_| all.admit(client(2), now).unwrap()).collect();
        assert_eq!(all.admit(client(3), now + WAIT_MIN).unwrap().class, ConnectionClass::Full);
        assert!(!is_closed(&few));
        assert_eq!(many.iter().filter(|permit| is_closed(permit)).count(), 1);
        // A client whose connections are all in use loses none.
        let _requests: Vec<_> = many.iter().filter_map(ConnectionPermit::begin).collect();
        let next = [(); 2].map(|()| all.admit(client(3), now + WAIT_MIN));
        assert!(
            is_closed(&few) && next.iter().flatten().all(|it| it.class == ConnectionClass::Full)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn reserved_connections_are_bounded_and_the_newest_wins() {
        let all = connections(1, 1);
        let now = Instant::now();
        let busy = all.admit(client(1), now).unwrap();
        let _request = busy.begin().unwrap();
        let reserved: Vec<_> =
            (0..RESERVED_MAX).map(|_| all.admit(client(1), now).unwrap()).collect();
        let newest = all.admit(client(1), now).unwrap();
        assert_eq!((newest.class, is_closed(&reserved[0])), (ConnectionClass::Reserved, true));
        let requests: Vec<_> = reserved.iter().filter_map(ConnectionPermit::begin).collect();
        let own = newest.begin().unwrap();
        assert_eq!(requests.len(), RESERVED_MAX - 1);
        assert!(all.admit(client(2), now).is_none());
        drop(own);
        assert!(all.admit(client(2), now).is_some());
    }
}
