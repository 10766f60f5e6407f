//! Which requests are being carried out, so that each is by one process and in it once.
//!
//! Upstream: `carry`. Downstream: leases of the backend, through a keeper.
//! Promises: whoever holds a [`RequestLock`] is the only one at work on its request, until [`RequestLock::lost`]
//! returns; a hold that is dropped is given up soon, one that is released at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::{Acquired, HeldLease, HolderName, KeeperConfig, LeaseKeeper, LeaseName};
use tokio::sync::{mpsc, watch};
use tracing::warn;

use super::parsed_request::ParsedRequest;
use crate::error::Result;
use crate::metrics;
use crate::name::RequestId;
use crate::session_backend::SessionBackend;

/// The requests of this process.
pub(super) struct RequestLocks {
    storage: SessionBackend,
    keeper: LeaseKeeper,
    requests: Mutex<HashMap<RequestId, watch::Sender<bool>>>,
    /// Locks whose holds were dropped. As many as there are requests at work.
    dropped: mpsc::UnboundedSender<LeaseName>,
}

/// What became of the wish to carry out a request.
pub(super) enum LockAttempt {
    Acquired(RequestLock),
    /// Somebody is at it, and is so at least for this time, if nothing happens.
    Held(Duration),
}

/// How long to leave a request alone that is carried out in this process.
const LOCAL_RETRY_AFTER: Duration = Duration::from_millis(200);

impl RequestLocks {
    pub(super) fn new(
        storage: SessionBackend,
        holder: &str,
        config: KeeperConfig,
    ) -> Result<(Arc<Self>, mpsc::UnboundedReceiver<LeaseName>)> {
        let leases = Arc::clone(&storage.backend) as Arc<dyn headwater_stream::Leases>;
        let keeper = LeaseKeeper::new(leases, HolderName::new(holder)?, config)?;
        let (dropped, receiver) = mpsc::unbounded_channel();
        Ok((Arc::new(Self { storage, keeper, requests: Mutex::default(), dropped }), receiver))
    }

    /// Takes a request, if nobody has it. From before the lock is taken, cancellations of it are heard.
    pub(super) async fn acquire(self: &Arc<Self>, request: &ParsedRequest) -> Result<LockAttempt> {
        let Some(mut lock) = self.register(request) else {
            return Ok(LockAttempt::Held(LOCAL_RETRY_AFTER));
        };
        let name = self.storage.keys.request_lock(&request.session);
        match self.keeper.acquire(&name).await? {
            Acquired::Won(held) => {
                lock.lease = Some((name, held));
                Ok(LockAttempt::Acquired(lock))
            }
            Acquired::Held { remaining, .. } => Ok(LockAttempt::Held(remaining)),
        }
    }

    fn register(self: &Arc<Self>, request: &ParsedRequest) -> Option<RequestLock> {
        let mut requests = self.requests();
        if requests.contains_key(&request.id) {
            return None;
        }
        let (sender, cancelled) = watch::channel(false);
        requests.insert(request.id.clone(), sender);
        metrics::requests_running(1.0);
        let request_id = request.id.clone();
        Some(RequestLock { locks: Arc::clone(self), request_id, cancelled, lease: None })
    }

    /// Tells whoever carries out a request here that nobody wants it any more.
    pub(super) fn cancel(&self, request: &str) {
        let Ok(request) = RequestId::new(request) else { return };
        if let Some(sender) = self.requests().get(&request) {
            sender.send_replace(true);
        }
    }

    /// Renews locks, and gives up those that were dropped, for as long as it is polled.
    pub(super) async fn run(&self, mut dropped: mpsc::UnboundedReceiver<LeaseName>) {
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
pub(super) struct RequestLock {
    locks: Arc<RequestLocks>,
    request_id: RequestId,
    cancelled: watch::Receiver<bool>,
    lease: Option<(LeaseName, HeldLease)>,
}

impl RequestLock {
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
            self.locks.release(&lock).await;
        }
    }
}

impl Drop for RequestLock {
    fn drop(&mut self) {
        metrics::requests_running(-1.0);
        self.locks.requests().remove(&self.request_id);
        if let Some((lock, _)) = self.lease.take() {
            // Nobody receives it after the end of the worker, which gives up all locks itself.
            let _ = self.locks.dropped.send(lock);
        }
    }
}
