//! Finds the primary of a service through Sentinel, and watches for another one.
//!
//! Upstream: `node`. Guarantees: all known Sentinels are asked, also those that other Sentinels name, and the answer with the
//! highest configuration epoch counts: a Sentinel that missed the last failover names the old primary, which may be running again
//! and accept writes that it will discard. When Sentinel names another primary, connections to the old one are left at once.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::command::Commands;
use super::connection::{ConnectError, Connection, ConnectionSettings};
use super::node::Node;
use super::pubsub::{self, PubSubConnection};
use super::reconnect::BACKOFF;
use super::reply::{Cursor, RespReplies};
use super::url::{Address, Login};

/// Timeout of a Sentinel.
const SENTINEL_TIMEOUT: Duration = Duration::from_millis(750);
/// How long the other Sentinels are waited for after the first answer.
const OTHERS_TIMEOUT: Duration = Duration::from_millis(250);
/// Maximum number of Sentinels to remember.
const SENTINELS_MAX: usize = 32;
/// The channel on which Sentinels announce a new primary.
const SWITCH_CHANNEL: &str = "+switch-master";

/// The Sentinels of one service.
#[derive(Debug)]
pub(super) struct Sentinels {
    /// Those of the URL, then those that others named.
    addresses: Mutex<Vec<Address>>,
    /// Number of those of the URL.
    configured: usize,
    service: String,
}

/// What one Sentinel answered.
struct SentinelAnswer {
    primary: Address,
    /// The epoch of the failover that made it the primary.
    epoch: u64,
    /// The Sentinel that answered, and those that it named.
    sentinel: Address,
    others: Vec<Address>,
    connection: Connection,
}

impl Sentinels {
    /// At least one address.
    pub(super) fn new(addresses: Vec<Address>, service: String) -> Self {
        assert!(!addresses.is_empty(), "the URL names at least one host");
        let configured = addresses.len();
        Self { addresses: Mutex::new(addresses), configured, service }
    }

    pub(super) fn first(&self) -> Address {
        self.lock()[0].clone()
    }

    /// The address of the primary.
    pub(super) async fn primary(
        &self,
        settings: &ConnectionSettings,
        deadline: Instant,
    ) -> Result<Address, ConnectError> {
        self.ask(settings, deadline).await.map(|answer| answer.primary)
    }

    /// Asks all Sentinels at once. Returns the answer with the highest configuration epoch.
    async fn ask(
        &self,
        settings: &ConnectionSettings,
        deadline: Instant,
    ) -> Result<SentinelAnswer, ConnectError> {
        let addresses = self.lock().clone();
        let mut until = deadline.min(Instant::now() + SENTINEL_TIMEOUT);
        let queries = addresses.iter().map(|sentinel| self.query(sentinel, settings, until));
        let mut queries: FuturesUnordered<_> = queries.collect();
        let (mut newest, mut last_error) = (None::<SentinelAnswer>, None);
        let (mut answered, mut named) = (Vec::new(), Vec::new());
        while let Ok(Some(result)) = timeout_at(until, queries.next()).await {
            match result {
                Ok(mut answer) => {
                    until = until.min(Instant::now() + OTHERS_TIMEOUT);
                    answered.push(answer.sentinel.clone());
                    named.append(&mut answer.others);
                    if newest.as_ref().is_none_or(|known| known.epoch < answer.epoch) {
                        newest = Some(answer);
                    }
                }
                Err(error) => last_error = Some(error),
            }
        }
        drop(queries);
        if newest.is_some() {
            self.remember(answered, named);
        }
        newest.ok_or_else(|| {
            last_error.unwrap_or_else(|| ConnectError::NotReady {
                address: self.first(),
                problem: "no Sentinel answered in time".to_owned(),
            })
        })
    }

    async fn query(
        &self,
        sentinel: &Address,
        settings: &ConnectionSettings,
        deadline: Instant,
    ) -> Result<SentinelAnswer, ConnectError> {
        let params = &settings.params;
        let login = &params.sentinel_login;
        let mut connection = match Connection::open_as(sentinel, settings, login, 0, deadline).await
        {
            // Without credentials of their own, most Sentinels need none; the others usually share those of their servers.
            Err(ConnectError::Fatal(_))
                if *login == Login::default() && params.login.password.is_some() =>
            {
                Connection::open_as(sentinel, settings, &params.login, 0, deadline).await?
            }
            opened => opened?,
        };
        let mut query = Commands::new();
        query.add(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &self.service]);
        query.add(&["SENTINEL", "SENTINELS", &self.service]);
        query.add(&["SENTINEL", "MASTER", &self.service]);
        let replies = connection.request_until(query, deadline).await?;
        let primary = self.read(&replies, sentinel)?;
        let (sentinel, others) = (sentinel.clone(), others(&replies));
        let epoch = config_epoch(&replies);
        Ok(SentinelAnswer { primary, epoch, sentinel, others, connection })
    }

    /// Keeps the Sentinels of the URL, those that answered and those that they named, and forgets the others: they were removed
    /// from the service. Over the limit, those that are named but do not answer are forgotten first.
    fn remember(&self, answered: Vec<Address>, named: Vec<Address>) {
        let mut known = self.lock();
        let learned = known.split_off(self.configured);
        let (silent, new): (Vec<_>, Vec<_>) =
            named.into_iter().partition(|address| learned.contains(address));
        for address in answered.into_iter().chain(new).chain(silent) {
            if known.len() < SENTINELS_MAX && !known.contains(&address) {
                known.push(address);
            }
        }
    }

    /// Tells `node` whenever the Sentinels name another primary. Runs until it is dropped.
    pub(super) async fn watch(
        self: Arc<Self>,
        node: Arc<Node>,
        settings: ConnectionSettings,
        call_deadline: Duration,
    ) {
        let mut retry = BACKOFF.timer();
        loop {
            match self.subscribe(&node, &settings, Instant::now() + call_deadline).await {
                Ok(subscription) => {
                    retry.reset();
                    let on_message = |_: &[u8], text: &str| {
                        self.switched(text).iter().for_each(|primary| node.on_primary(primary));
                    };
                    subscription.run(on_message).await;
                }
                Err(error) => debug!(%error, "not subscribed at a Sentinel, retrying"),
            }
            retry.wait().await;
        }
    }

    async fn subscribe(
        &self,
        node: &Node,
        settings: &ConnectionSettings,
        deadline: Instant,
    ) -> Result<PubSubConnection, String> {
        let liveness = pubsub::liveness(settings.liveness.ping_timeout);
        let answer = self.ask(settings, deadline).await.map_err(|error| error.to_string())?;
        let mut subscription = PubSubConnection::new(answer.connection, liveness);
        subscription
            .subscribe(SWITCH_CHANNEL, deadline)
            .await
            .map_err(|error| error.to_string())??;
        // After subscribing: a switch in between is not missed.
        let primary = self.primary(settings, deadline).await.map_err(|error| error.to_string())?;
        node.on_primary(&primary);
        Ok(subscription)
    }

    /// The new primary of this service: `SERVICE OLD-HOST OLD-PORT NEW-HOST NEW-PORT`.
    fn switched(&self, text: &str) -> Option<Address> {
        let words: Vec<&str> = text.split(' ').collect();
        match words[..] {
            [service, _, _, host, port] if service == self.service => {
                Some(Address { host: host.to_owned(), port: port.parse().ok()? })
            }
            _ => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Address>> {
        self.addresses.lock().expect("no code panics while it holds this lock")
    }

    fn read(&self, replies: &RespReplies, sentinel: &Address) -> Result<Address, ConnectError> {
        let not_ready =
            |problem: String| ConnectError::NotReady { address: sentinel.clone(), problem };
        let mut cursor = replies.cursor();
        let mut read = || match cursor.array_or_nil()? {
            None => Ok(None),
            Some(_) => Ok(Some((cursor.string()?, cursor.digits()?))),
        };
        match read() {
            Ok(Some((host, port))) => match u16::try_from(port) {
                Ok(port) => Ok(Address { host, port }),
                Err(_) => Err(not_ready(format!("invalid port {port} of the primary"))),
            },
            Ok(None) => Err(not_ready(format!("unknown service `{}`", self.service))),
            Err(error) => {
                let error: super::error::ReplyError = error;
                Err(not_ready(error.into_stream_error(&self.service).to_string()))
            }
        }
    }
}

/// The Sentinels in the reply of `SENTINEL SENTINELS`; none if it cannot be read.
fn others(replies: &RespReplies) -> Vec<Address> {
    let read = |cursor: &mut Cursor<'_>| -> Result<Vec<Address>, super::error::ReplyError> {
        cursor.skip(1)?;
        let mut found = Vec::new();
        for _ in 0..cursor.array()? {
            let (mut host, mut port) = (String::new(), 0);
            for _ in 0..cursor.array()? / 2 {
                match cursor.text()? {
                    b"ip" => host = cursor.string()?,
                    b"port" => port = u16::try_from(cursor.digits()?).unwrap_or(0),
                    _ => cursor.skip(1)?,
                }
            }
            if !host.is_empty() && port != 0 {
                found.push(Address { host, port });
            }
        }
        Ok(found)
    };
    read(&mut replies.cursor()).unwrap_or_default()
}

/// The configuration epoch in the reply of `SENTINEL MASTER`; 0 if it cannot be read.
fn config_epoch(replies: &RespReplies) -> u64 {
    let read = |cursor: &mut Cursor<'_>| -> Result<u64, super::error::ReplyError> {
        cursor.skip(2)?;
        for _ in 0..cursor.array()? / 2 {
            match cursor.text()? {
                b"config-epoch" => return cursor.digits(),
                _ => cursor.skip(1)?,
            }
        }
        Ok(0)
    };
    read(&mut replies.cursor()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(ports: impl IntoIterator<Item = u16>) -> Vec<Address> {
        ports.into_iter().map(|port| Address { host: "a".to_owned(), port }).collect()
    }

    fn known(sentinels: &Sentinels) -> Vec<u16> {
        sentinels.lock().iter().map(|address| address.port).collect()
    }

    #[test]
    fn sentinels_that_neither_answer_nor_are_named_any_more_are_forgotten() {
        let sentinels = Sentinels::new(addresses([1, 2]), "orders".to_owned());
        sentinels.remember(addresses([1]), addresses([3, 4]));
        assert_eq!(known(&sentinels), [1, 2, 3, 4]);
        // 3 answers, although the others have forgotten it; 4 is gone; 1 and 2 are in the URL.
        sentinels.remember(addresses([2, 3]), addresses([5]));
        assert_eq!(known(&sentinels), [1, 2, 3, 5]);
    }

    #[test]
    fn new_sentinels_are_remembered_when_the_limit_is_reached_by_silent_ones() {
        let max = SENTINELS_MAX as u16;
        let sentinels = Sentinels::new(addresses([1]), "orders".to_owned());
        sentinels.remember(addresses([1]), addresses(2..=max));
        sentinels.remember(addresses([1, 2]), addresses((3..=max).chain([90, 91])));
        let expected: Vec<u16> = [1, 2, 90, 91].into_iter().chain(3..=max - 2).collect();
        assert_eq!(known(&sentinels), expected);
    }
}
