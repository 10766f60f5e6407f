//! Locks on requests, so that each is executed by one process, and there only once.
//!
//! Upstream: `executor`. Downstream: leases of the backend.
//! Guarantees: the holder of a [`RequestLock`] is the only executor of its request until [`RequestLock::lost`] returns; a
//! dropped lock is released soon, a released one at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::{
    HeldLease, HolderName, LeaseAcquisition, LeaseName, LeaseRenewer, LeaseRenewerConfig,
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::parsed_request::ParsedRequest;
use crate::error::Result;
use crate::metrics;
use crate::name::RequestId;
use crate::session_backend::SessionBackend;

/// The request locks of this process.
pub(super) struct RequestLocks {
    storage: SessionBackend,
    renewer: LeaseRenewer,
    requests: Mutex<HashMap<RequestId, CancellationToken>>,
}

/// Result of acquiring a lock.
pub(super) enum LockAttempt {
    Acquired(RequestLock),
    /// Held elsewhere, for at least this time unless it is released.
    Held(Duration),
}

/// Time to wait for a request that is already running in this process.
const LOCAL_RETRY_AFTER: Duration = Duration::from_millis(200);

impl RequestLocks {
    pub(super) fn new(
        storage: SessionBackend,
        holder: &str,
        config: LeaseRenewerConfig,
    ) -> Result<Arc<Self>> {
        let leases = Arc::clone(&storage.backend) as Arc<dyn headwater_stream::Leases>;
        // A lock tells its holder of its loss itself.
        let (renewer, _) = LeaseRenewer::new(leases, HolderName::new(holder)?, config)?;
        Ok(Arc::new(Self { storage, renewer, requests: Mutex::default() }))
    }

    /// Acquires the lock of a request, if it is free. The request can be cancelled from before the lock is acquired.
    pub(super) async fn acquire(self: &Arc<Self>, request: &ParsedRequest) -> Result<LockAttempt> {
        let Some(mut lock) = self.register(request) else {
            return Ok(LockAttempt::Held(LOCAL_RETRY_AFTER));
        };
        let name = self.storage.keys.request_lock(&request.session);
        match self.renewer.acquire(&name).await? {
            LeaseAcquisition::Won(held) => {
                lock.lease = Some((name, held));
                Ok(LockAttempt::Acquired(lock))
            }
            LeaseAcquisition::Held { remaining, .. } => Ok(LockAttempt::Held(remaining)),
        }
    }

    fn register(self: &Arc<Self>, request: &ParsedRequest) -> Option<RequestLock> {
        let mut requests = self.requests();
        if requests.contains_key(&request.id) {
            return None;
        }
        let cancelled = CancellationToken::new();
        requests.insert(request.id.clone(), cancelled.clone());
        metrics::requests_running(1.0);
        let request_id = request.id.clone();
        Some(RequestLock { locks: Arc::clone(self), request_id, cancelled, lease: None })
    }

    /// Cancels a request if it is running in this process.
    pub(super) fn cancel(&self, request: &str) {
        let Ok(request) = RequestId::new(request) else { return };
        if let Some(cancelled) = self.requests().get(&request) {
            cancelled.cancel();
        }
    }

    /// Renews locks and releases dropped ones, for as long as it is polled.
    pub(super) async fn run(&self) {
        self.renewer.run(std::future::pending()).await;
    }

    async fn release(&self, lock: &LeaseName) {
        if let Err(error) = self.renewer.release(std::slice::from_ref(lock)).await {
            // It is no longer renewed, so it expires after its TTL.
            warn!(lease = %lock, %error, "request lock could not be released; it expires after its TTL");
        }
    }

    /// Releases all locks.
    pub(super) async fn release_all(&self) {
        for fence in self.renewer.held() {
            self.release(&fence.lease).await;
        }
    }

    fn requests(&self) -> MutexGuard<'_, HashMap<RequestId, CancellationToken>> {
        self.requests.lock().expect("no code panics while it holds this lock")
    }
}

/// The lock of a request.
pub(super) struct RequestLock {
    locks: Arc<RequestLocks>,
    request_id: RequestId,
    cancelled: CancellationToken,
    lease: Option<(LeaseName, HeldLease)>,
}

impl RequestLock {
    /// Returns when the request is cancelled. Cancel-safe.
    pub(super) async fn cancelled(&self) {
        self.cancelled.cancelled().await;
    }

    /// Returns when another process may hold the lock. Cancel-safe.
    pub(super) async fn lost(&self) {
        match &self.lease {
            Some((_, held)) => held.lost().await,
            None => std::future::pending().await,
        }
    }

    /// Releases the lock, so that another process can acquire it at once.
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
            // After the worker has stopped, it releases all locks itself.
            self.locks.renewer.release_later(&lock);
        }
    }
}
