//! Which requests are being carried out, so that each is by one process and in it once.
//!
//! Upstream: `carry`. Downstream: leases of the backend, through a keeper.
//! Promises: whoever holds a [`Hold`] is the only one at work on its request, until [`Hold::lost`] returns; a hold that is
//! dropped is given up soon, one that is released at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::{Acquired, HeldLease, HolderName, KeeperConfig, LeaseKeeper, LeaseName};
use tokio::sync::{mpsc, watch};
use tracing::warn;

use super::task::Task;
use crate::error::Result;
use crate::journal::Journal;
use crate::metrics;
use crate::name::RequestId;

/// The requests of this process.
pub(super) struct Running {
    journal: Journal,
    keeper: LeaseKeeper,
    requests: Mutex<HashMap<RequestId, watch::Sender<bool>>>,
    /// Locks whose holds were dropped. As many as there are requests at work.
    dropped: mpsc::UnboundedSender<LeaseName>,
}

/// What became of the wish to carry out a request.
pub(super) enum Entered {
    Won(Hold),
    /// Somebody is at it, and is so at least for this time, if nothing happens.
    Busy(Duration),
}

/// How long to leave a request alone that is carried out in this process.
const BUSY_HERE: Duration = Duration::from_millis(200);

impl Running {
    pub(super) fn new(
        journal: Journal,
        holder: &str,
        config: KeeperConfig,
    ) -> Result<(Arc<Self>, mpsc::UnboundedReceiver<LeaseName>)> {
        let leases = Arc::clone(&journal.backend) as Arc<dyn headwater_stream::Leases>;
        let keeper = LeaseKeeper::new(leases, HolderName::new(holder)?, config)?;
        let (dropped, receiver) = mpsc::unbounded_channel();
        Ok((Arc::new(Self { journal, keeper, requests: Mutex::default(), dropped }), receiver))
    }

    /// Takes a request, if nobody has it. From before the lock is taken, cancellations of it are heard.
    pub(super) async fn enter(self: &Arc<Self>, task: &Task) -> Result<Entered> {
        let Some(mut hold) = self.note(task) else { return Ok(Entered::Busy(BUSY_HERE)) };
        let lock = self.journal.keys.request_lock(&task.session);
        match self.keeper.acquire(&lock).await? {
            Acquired::Won(held) => {
                hold.lease = Some((lock, held));
                Ok(Entered::Won(hold))
            }
            Acquired::Held { remaining, .. } => Ok(Entered::Busy(remaining)),
        }
    }

    fn note(self: &Arc<Self>, task: &Task) -> Option<Hold> {
        let mut requests = self.requests();
        if requests.contains_key(&task.request_id) {
            return None;
        }
        let (sender, cancelled) = watch::channel(false);
        requests.insert(task.request_id.clone(), sender);
        metrics::requests_running(1.0);
        let request_id = task.request_id.clone();
        Some(Hold { running: Arc::clone(self), request_id, cancelled, lease: None })
    }

    /// Tells whoever carries out a request here that nobody wants it any more.
    pub(super) fn cancel(&self, request: &str) {
        let Ok(request) = RequestId::new(request) else { return };
        if let Some(sender) = self.requests().get(&request) {
            sender.send_replace(true);
        }
    }

    /// Renews locks, and gives up those that were dropped, for as long as it is polled.
    pub(super) async fn upkeep(&self, mut dropped: mpsc::UnboundedReceiver<LeaseName>) {
        let releasing = async {
            while let Some(lock) = dropped.recv().await {
                self.release(&lock).await;
            }
        };
        tokio::join!(self.keeper.run(std::future::pending()), releasing);
    }

    async fn release(&self, lock: &LeaseName) {
        if let Err(error) = self.keeper.release(std::slice::from_ref(lock)).await {
            // It is not renewed any more, so others wait for it a little longer, and no more.
            warn!(lease = %lock, %error, "the lock of a request could not be given up");
        }
    }

    /// Gives up all locks.
    pub(super) async fn release_all(&self) {
        for fence in self.keeper.held() {
            self.release(&fence.lease).await;
        }
    }

    fn requests(&self) -> MutexGuard<'_, HashMap<RequestId, watch::Sender<bool>>> {
        self.requests.lock().expect("no code panics while it holds this lock")
    }
}

/// The right to carry out a request.
pub(super) struct Hold {
    running: Arc<Running>,
    request_id: RequestId,
    cancelled: watch::Receiver<bool>,
    lease: Option<(LeaseName, HeldLease)>,
}

impl Hold {
    /// Returns when the request is cancelled. Cancel-safe.
    pub(super) async fn cancelled(&self) {
        let mut cancelled = self.cancelled.clone();
        if cancelled.wait_for(|is_cancelled| *is_cancelled).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns when somebody else may have the request. Cancel-safe.
    pub(super) async fn lost(&self) {
        match &self.lease {
            Some((_, held)) => held.lost().await,
            None => std::future::pending().await,
        }
    }

    /// Gives the request up, so that others can have it at once.
    pub(super) async fn release(mut self) {
        if let Some((lock, _)) = self.lease.take() {
            self.running.release(&lock).await;
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        metrics::requests_running(-1.0);
        self.running.requests().remove(&self.request_id);
        if let Some((lock, _)) = self.lease.take() {
            // Nobody receives it after the end of the worker, which gives up all locks itself.
            let _ = self.running.dropped.send(lock);
        }
    }
}
