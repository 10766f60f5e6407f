//! Asks Sentinels where the primary is.

use std::io;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::command::Commands;
use super::connection::{ConnectError, Connection};
use super::node::Manners;
use super::reply::Replies;
use super::url::{Access, Address};

/// How long one Sentinel may take before the next one is asked.
const ASK_MAX: Duration = Duration::from_millis(750);

/// The Sentinels of one service.
#[derive(Debug)]
pub(super) struct Sentinels {
    addresses: Vec<Address>,
    service: String,
}

impl Sentinels {
    /// At least one address.
    pub(super) fn new(addresses: Vec<Address>, service: String) -> Self {
        assert!(!addresses.is_empty(), "the URL names at least one host");
        Self { addresses, service }
    }

    pub(super) fn first(&self) -> &Address {
        &self.addresses[0]
    }

    /// The address of the primary, from the first Sentinel that knows.
    pub(super) async fn primary(
        &self,
        manners: &Manners,
        deadline: Instant,
    ) -> Result<Address, ConnectError> {
        let mut last = None;
        for sentinel in &self.addresses {
            let until = deadline.min(Instant::now() + ASK_MAX);
            match self.ask(sentinel, manners, until).await {
                Ok(primary) => return Ok(primary),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| unreachable!("there is at least one Sentinel")))
    }

    async fn ask(
        &self,
        sentinel: &Address,
        manners: &Manners,
        deadline: Instant,
    ) -> Result<Address, ConnectError> {
        // Most Sentinels ask for no password; those that do mostly share that of their servers.
        let open = Access { tls: manners.access.tls, ..Access::default() };
        let mut connection = match Connection::open(sentinel, &open, &manners.tls, deadline).await {
            Err(ConnectError::Refused(_)) if manners.access.password.is_some() => {
                let login = Access { database: 0, ..(*manners.access).clone() };
                Connection::open(sentinel, &login, &manners.tls, deadline).await?
            }
            opened => opened?,
        };
        let question =
            Commands::one(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &self.service]).pack();
        match timeout_at(deadline, connection.ask(&question)).await {
            Ok(Ok(replies)) => self.read(&replies, sentinel),
            Ok(Err(error)) => Err(ConnectError::Unreachable { address: sentinel.clone(), error }),
            Err(_) => Err(ConnectError::Unreachable {
                address: sentinel.clone(),
                error: io::ErrorKind::TimedOut.into(),
            }),
        }
    }

    fn read(&self, replies: &Replies, sentinel: &Address) -> Result<Address, ConnectError> {
        let not_yet = |problem: String| ConnectError::NotYet { address: sentinel.clone(), problem };
        let mut cursor = replies.cursor();
        let mut read = || match cursor.array_or_nil()? {
            None => Ok(None),
            Some(_) => Ok(Some((cursor.string()?, cursor.digits()?))),
        };
        match read() {
            Ok(Some((host, port))) => match u16::try_from(port) {
                Ok(port) => Ok(Address { host, port }),
                Err(_) => Err(not_yet(format!("the primary's port is {port}"))),
            },
            Ok(None) => Err(not_yet(format!("it knows no service `{}`", self.service))),
            Err(failure) => {
                let failure: super::error::Failure = failure;
                Err(not_yet(failure.about(&self.service).to_string()))
            }
        }
    }
}
