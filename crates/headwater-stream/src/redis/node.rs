//! A node is one server, or the primary that Sentinel names: its shared link, and connections of their own.
//!
//! Upstream: `servers`. Promises: a broken link is replaced on the next call; only one task connects at a time.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::command::Commands;
use super::connection::{ConnectError, Connection};
use super::link::{Answer, Haste, Link, Outcome};
use super::reply::Value;
use super::sentinel::Sentinels;
use super::url::{Access, Address};
use super::wire::Tls;

/// How to speak to servers: the same for all of them.
#[derive(Clone)]
pub(super) struct Manners {
    pub(super) access: Arc<Access>,
    pub(super) tls: Tls,
}

/// Where a node is.
pub(super) enum Target {
    /// Always there.
    Fixed(Address),
    /// Wherever Sentinel says.
    Primary(Sentinels),
}

/// One server.
pub(super) struct Node {
    target: Target,
    manners: Manners,
    shared: Mutex<Shared>,
    connecting: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Default)]
struct Shared {
    link: Option<Link>,
    task: Option<JoinHandle<()>>,
}

impl Node {
    pub(super) fn new(target: Target, manners: Manners) -> Self {
        Self { target, manners, shared: Mutex::default(), connecting: Arc::default() }
    }

    /// Where the node is, if it is always there.
    pub(super) fn address(&self) -> Option<&Address> {
        match &self.target {
            Target::Fixed(address) => Some(address),
            Target::Primary(_) => None,
        }
    }

    /// Sends commands over the shared link.
    pub(super) async fn send(
        self: &Arc<Self>,
        bytes: &[u8],
        replies: usize,
        deadline: Instant,
    ) -> Result<Outcome, ConnectError> {
        let link = match self.current() {
            Some(link) => link,
            None => self.connect(deadline).await?,
        };
        Ok(link.send(bytes, replies, deadline).await)
    }

    /// Sends commands at once, if there is an open link with room.
    pub(super) fn try_send(
        &self,
        bytes: &[u8],
        replies: usize,
        deadline: Instant,
    ) -> Option<Answer> {
        // Not under the lock: sending may be a call to the system, and others would queue up behind it.
        self.link()?.try_send(bytes, replies, deadline, Haste::None)
    }

    /// The link, open or not, if there is one.
    pub(super) fn link(&self) -> Option<Link> {
        self.lock().link.clone()
    }

    /// A connection for one caller.
    pub(super) async fn dedicated(&self, deadline: Instant) -> Result<Connection, ConnectError> {
        self.open(deadline).await
    }

    /// Forgets all connections: the server is not the one it was.
    pub(super) fn reset(&self) {
        let mut shared = self.lock();
        shared.link = None;
    }

    /// Ends the link after what is under way, by the deadline.
    pub(super) async fn close(&self, deadline: Instant) {
        let task = {
            let mut shared = self.lock();
            shared.link = None;
            shared.task.take()
        };
        if let Some(mut task) = task
            && timeout_at(deadline, &mut task).await.is_err()
        {
            task.abort();
        }
    }

    /// The link, if it is open.
    fn current(&self) -> Option<Link> {
        let mut shared = self.lock();
        if shared.link.as_ref().is_some_and(|link| !link.is_open()) {
            shared.link = None;
        }
        shared.link.clone()
    }

    /// Makes the shared link. The attempt goes on when the call that began it is dropped, for the next one to use.
    async fn connect(self: &Arc<Self>, deadline: Instant) -> Result<Link, ConnectError> {
        let connecting = Arc::clone(&self.connecting);
        let Ok(guard) = timeout_at(deadline, connecting.lock_owned()).await else {
            return Err(self.unreachable(io::ErrorKind::TimedOut.into()));
        };
        if let Some(link) = self.current() {
            return Ok(link);
        }
        let node = Arc::clone(self);
        let attempt = tokio::spawn(async move {
            let _guard = guard;
            let connection = node.open(deadline).await?;
            let (link, task) = Link::new(connection);
            let mut shared = node.lock();
            shared.link = Some(link.clone());
            shared.task = Some(task);
            Ok(link)
        });
        attempt.await.unwrap_or_else(|ended| Err(self.unreachable(io::Error::other(ended))))
    }

    async fn open(&self, deadline: Instant) -> Result<Connection, ConnectError> {
        let Manners { access, tls } = &self.manners;
        match &self.target {
            Target::Fixed(address) => Connection::open(address, access, tls, deadline).await,
            Target::Primary(sentinels) => {
                let address = sentinels.primary(&self.manners, deadline).await?;
                let mut connection = Connection::open(&address, access, tls, deadline).await?;
                must_be_primary(&mut connection, deadline).await?;
                Ok(connection)
            }
        }
    }

    fn unreachable(&self, error: io::Error) -> ConnectError {
        let address = match &self.target {
            Target::Fixed(address) => address.clone(),
            Target::Primary(sentinels) => sentinels.first().clone(),
        };
        ConnectError::Unreachable { address, error }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().expect("no code panics while it holds this lock")
    }
}

/// Sentinel may still name the old primary for a moment; a replica would refuse every write.
async fn must_be_primary(
    connection: &mut Connection,
    deadline: Instant,
) -> Result<(), ConnectError> {
    let address = connection.address().clone();
    let role = Commands::one(&["ROLE"]).pack();
    let replies = match timeout_at(deadline, connection.ask(&role)).await {
        Ok(Ok(replies)) => replies,
        Ok(Err(error)) => return Err(ConnectError::Unreachable { address, error }),
        Err(_) => {
            let error = io::ErrorKind::TimedOut.into();
            return Err(ConnectError::Unreachable { address, error });
        }
    };
    let mut cursor = replies.cursor();
    match (cursor.value(), cursor.value()) {
        (Ok(Value::Array(_)), Ok(Value::Text(role))) if role != b"master" => {
            let problem = "it is not the primary (yet)".to_owned();
            Err(ConnectError::NotYet { address, problem })
        }
        // A user who may not ask for the role finds out with the first write.
        _ => Ok(()),
    }
}
