//! Stores replies: one stream per requester, with at most one reply per request.
//!
//! Upstream: workers, and clients that cancel. Downstream: reply streams, and a copy on the control stream.
//! Guarantees: if several writers reply to a request, the server keeps the first, and all see that one; a reply stream
//! is bounded in entries, bytes and age, and is deleted when it is empty. The copy has the event id of the original,
//! so it is recognized as the same event.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::{
    DedupStatus, Direction, EntryId, IdempotentEntry, Range, Retention, StreamName, TrimGuard,
};
use tokio::time::Instant;
use tracing::{debug, warn};

use super::config::ReplyConfig;
use super::reply::{self, Reply};
use crate::bus::{EventBus, EventBusExt};
use crate::error::{BusError, Result};
use crate::metrics;
use crate::name::{RequestId, Requester, random_bits};
use crate::session_backend::SessionBackend;

/// Shortest interval between two registrations of a requester.
const REGISTER_INTERVAL: Duration = Duration::from_secs(10 * 60);

/// Requesters whose registration is cached; above it, the cache is cleared.
const REGISTERED_MAX: usize = 10_000;

/// Lifetime of the mark left by a dedup lookup; as short as possible.
const PROBE_MARK_TTL: Duration = Duration::from_millis(1);

/// A stored reply.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StoredReply {
    Reply(Reply),
    /// The reply was stored, but its stream has been trimmed past it.
    Trimmed,
}

/// The reply streams of a namespace.
pub(super) struct ReplyStore {
    pub(super) bus: Arc<dyn EventBus>,
    pub(super) storage: SessionBackend,
    config: ReplyConfig,
    /// Value of the field `origin` of this process.
    pub(super) origin: String,
    /// Time of the last registration of each requester.
    registered: Mutex<HashMap<Requester, Instant>>,
}

impl ReplyStore {
    pub(super) async fn new(bus: Arc<dyn EventBus>, config: ReplyConfig) -> Result<Self> {
        config.validate()?;
        let storage = bus.session_backend().await?;
        BusError::check_dedup_window("ttl", config.ttl, storage.backend.call_deadline())?;
        let origin = format!("main-loop:{}:{:032x}", std::process::id(), random_bits());
        Ok(Self { bus, storage, config, origin, registered: Mutex::default() })
    }

    pub(super) fn stream(&self, requester: &Requester) -> StreamName {
        self.storage.keys.replies(&self.storage.namespace, requester)
    }

    /// The reply to a request in the stream of this requester.
    pub(super) async fn find(
        &self,
        requester: &Requester,
        request: &RequestId,
    ) -> Result<Option<StoredReply>> {
        let stream = self.stream(requester);
        let event_id = reply::event_id(request);
        let found = self.storage.backend.appended(&stream, &[event_id.as_str()]).await?;
        match found.first().copied().flatten() {
            Some(entry_id) => self.read(&stream, entry_id).await.map(Some),
            None => Ok(None),
        }
    }

    /// The reply to the same request of another requester.
    pub(super) async fn find_for_other_requester(
        &self,
        requester: &Requester,
        request: &RequestId,
    ) -> Result<Option<StoredReply>> {
        let scope = self.storage.keys.replied(&self.storage.namespace);
        let marks =
            self.storage.backend.dedup_begin(&scope, &[request.as_str()], PROBE_MARK_TTL).await?;
        let Some(DedupStatus::Done(other)) = marks.into_iter().next() else { return Ok(None) };
        let other = std::str::from_utf8(&other).ok().and_then(|name| Requester::new(name).ok());
        match other {
            Some(other) if other != *requester => self.find(&other, request).await,
            _ => Ok(None),
        }
    }

    async fn read(&self, stream: &StreamName, entry_id: EntryId) -> Result<StoredReply> {
        let range = Range { from: entry_id, to: entry_id, direction: Direction::Forward, count: 1 };
        let entries = self.storage.backend.range(stream, range).await?;
        let Some(entry) = entries.first() else { return Ok(StoredReply::Trimmed) };
        let registry = self.bus.registry();
        Reply::from_entry(registry, stream, entry.id, &entry.fields).map(StoredReply::Reply)
    }

    /// Stores a reply, unless there is one. Returns the stored one.
    pub(super) async fn store(
        &self,
        requester: &Requester,
        request: &RequestId,
        reply: &Reply,
    ) -> Result<StoredReply> {
        let backend = &self.storage.backend;
        let now = backend.now().await?;
        let fields = reply.to_fields(request, &self.origin, now)?;
        self.register_requester(requester).await?;
        // The location is stored before the reply: a reader that finds no reply there knows that there is none yet.
        // In the other order, a crash in between would hide the reply from other requesters of the same request.
        let scope = self.storage.keys.replied(&self.storage.namespace);
        let holder = Bytes::copy_from_slice(requester.as_str().as_bytes());
        backend.dedup_finish(&scope, &[(request.as_str(), holder)], self.config.ttl).await?;
        let stream = self.stream(requester);
        let once = [IdempotentEntry { id: reply::event_id(request).to_string(), fields }];
        let retention = self.config.retention();
        let appended = backend.append_once(&stream, &once, self.config.ttl, &retention).await?;
        match appended.first() {
            Some(first) if first.duplicate => self.read(&stream, first.id).await,
            _ => Ok(StoredReply::Reply(reply.clone())),
        }
    }

    /// Copies a reply to the control stream, for subscribers. Idempotent.
    pub(super) async fn publish_copy(&self, request: &RequestId, reply: &Reply) -> Result<()> {
        self.bus.publish_outgoing(reply.to_outgoing(request)?).await?;
        Ok(())
    }

    /// Adds a requester to the set of requesters, so that its reply stream is swept.
    pub(super) async fn register_requester(&self, requester: &Requester) -> Result<()> {
        let now = Instant::now();
        let is_registered = |at: &Instant| now.duration_since(*at) < REGISTER_INTERVAL;
        if self.registered().get(requester).is_some_and(is_registered) {
            return Ok(());
        }
        let set = self.storage.keys.requesters(&self.storage.namespace);
        self.storage.backend.set_add(&set, &[requester.as_str()], None).await?;
        let mut registered = self.registered();
        if registered.len() >= REGISTERED_MAX {
            registered.clear();
        }
        registered.insert(requester.clone(), now);
        Ok(())
    }

    /// Trims expired replies and deletes streams that have been empty for the reply TTL. May run in several processes.
    pub(super) async fn sweep(&self) -> Result<()> {
        let set = self.storage.keys.requesters(&self.storage.namespace);
        for name in self.storage.backend.set_members(&set).await? {
            let Ok(requester) = Requester::new(&name) else {
                self.storage.backend.set_remove(&set, &[&name]).await?;
                continue;
            };
            if let Err(error) = self.sweep_one(&requester).await {
                warn!(%requester, %error, "reply stream could not be swept");
            }
        }
        Ok(())
    }

    async fn sweep_one(&self, requester: &Requester) -> Result<()> {
        let (backend, stream) = (&self.storage.backend, self.stream(requester));
        let retention = Retention { max_age: Some(self.config.ttl), ..Retention::KEEP_ALL };
        let trimmed = backend.trim(&stream, &retention, TrimGuard::Safe).await?;
        metrics::replies_swept(trimmed.removed, 0);
        let stats = backend.stats(&stream).await?;
        let now = backend.now().await?;
        let is_abandoned = match &stats {
            None => true,
            Some(stats) => {
                let last = stats.last_id.map_or(0, |id| id.ms);
                // A reply stored between this check and the deletion is still on the control stream.
                stats.length == 0
                    && now.as_millis().saturating_sub(last) > self.stream_idle_limit_ms()
            }
        };
        if !is_abandoned {
            return Ok(());
        }
        let set = self.storage.keys.requesters(&self.storage.namespace);
        backend.set_remove(&set, &[requester.as_str()]).await?;
        self.registered().remove(requester);
        if stats.is_some() && backend.delete_stream(&stream).await? {
            metrics::replies_swept(0, 1);
            debug!(%stream, "reply stream deleted");
        }
        Ok(())
    }

    fn stream_idle_limit_ms(&self) -> u64 {
        u64::try_from((self.config.ttl * 2).as_millis()).unwrap_or(u64::MAX)
    }

    fn registered(&self) -> MutexGuard<'_, HashMap<Requester, Instant>> {
        self.registered.lock().expect("no code panics while it holds this lock")
    }
}
