//! Finds the primary of a service through Sentinel.

use std::time::Duration;

use tokio::time::Instant;

use super::command::Commands;
use super::connection::{ConnectError, Connection};
use super::node::ConnectionSettings;
use super::reply::RespReplies;
use super::url::{Address, ConnectionParams};

/// Timeout of one Sentinel before the next one is asked.
const SENTINEL_TIMEOUT: Duration = Duration::from_millis(750);

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

    /// The address of the primary, from the first Sentinel that knows it.
    pub(super) async fn primary(
        &self,
        settings: &ConnectionSettings,
        deadline: Instant,
    ) -> Result<Address, ConnectError> {
        let mut last = None;
        for sentinel in &self.addresses {
            let until = deadline.min(Instant::now() + SENTINEL_TIMEOUT);
            match self.query(sentinel, settings, until).await {
                Ok(primary) => return Ok(primary),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| unreachable!("there is at least one Sentinel")))
    }

    async fn query(
        &self,
        sentinel: &Address,
        settings: &ConnectionSettings,
        deadline: Instant,
    ) -> Result<Address, ConnectError> {
        // Most Sentinels need no password; those that do usually share the one of their servers.
        let open = ConnectionParams { tls: settings.params.tls, ..ConnectionParams::default() };
        let mut connection = match Connection::open(sentinel, &open, &settings.tls, deadline).await
        {
            Err(ConnectError::Fatal(_)) if settings.params.password.is_some() => {
                let login = ConnectionParams { database: 0, ..(*settings.params).clone() };
                Connection::open(sentinel, &login, &settings.tls, deadline).await?
            }
            opened => opened?,
        };
        let query = Commands::one(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &self.service]);
        self.read(&connection.request_until(query, deadline).await?, sentinel)
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
