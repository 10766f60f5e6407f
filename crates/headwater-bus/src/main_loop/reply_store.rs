//! Where replies are kept: a stream for each requester, with the first reply to a request as the only one.
//!
//! Upstream: workers, and clients that cancel. Downstream: streams of the journal, and a copy on the control stream.
//! Promises: of all who reply to a request one wins, at the server, and all see the same reply; a stream of replies
//! is bounded in entries, bytes and age, and goes when nothing is in it. The copy has the id of the original, so it
//! is known to be the same event.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::{Begin, Direction, EntryId, Once, Range, Retention, StreamName, TrimGuard};
use tokio::time::Instant;
use tracing::{debug, warn};

use super::config::ReplyConfig;
use super::reply::{self, Reply};
use crate::bus::{EventBus, EventBusExt};
use crate::error::{BusError, Result};
use crate::metrics;
use crate::name::{RequestId, Requester, random_bits};
use crate::session_backend::SessionBackend;

/// How often a requester is put on the list of those who have replies, at most.
const REGISTER_INTERVAL: Duration = Duration::from_secs(10 * 60);

/// Requesters that are known to be on the list; beyond it, all are listed anew.
const REGISTERED_MAX: usize = 10_000;

/// The shortest mark there is: asking whether a request was replied to leaves one.
const PROBE_MARK_TTL: Duration = Duration::from_millis(1);

/// A reply that is kept somewhere, or was.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StoredReply {
    Reply(Reply),
    /// There was one, but its stream grew beyond what is kept.
    Trimmed,
}

/// The replies of a namespace.
pub(super) struct ReplyStore {
    pub(super) bus: Arc<dyn EventBus>,
    pub(super) storage: SessionBackend,
    config: ReplyConfig,
    /// What this process writes into the field `origin`.
    pub(super) origin: String,
    /// When requesters were last put on the list.
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

    /// The reply to a request that another requester sent, too.
    pub(super) async fn find_for_other_requester(
        &self,
        requester: &Requester,
        request: &RequestId,
    ) -> Result<Option<StoredReply>> {
        let scope = self.storage.keys.replied(&self.storage.namespace);
        let begun =
            self.storage.backend.dedup_begin(&scope, &[request.as_str()], PROBE_MARK_TTL).await?;
        let Some(Begin::Done(other)) = begun.into_iter().next() else { return Ok(None) };
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

    /// Keeps a reply, unless there is one. Returns the one that counts.
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
        // Where the reply is comes before the reply: whoever finds nothing there knows that there is none yet. The
        // other way round, a crash in between would hide it from others who asked the same.
        let scope = self.storage.keys.replied(&self.storage.namespace);
        let holder = Bytes::copy_from_slice(requester.as_str().as_bytes());
        backend.dedup_finish(&scope, &[(request.as_str(), holder)], self.config.ttl).await?;
        let stream = self.stream(requester);
        let once = [Once { id: reply::event_id(request).to_string(), fields }];
        let retention = self.config.retention();
        let appended = backend.append_once(&stream, &once, self.config.ttl, &retention).await?;
        match appended.first() {
            Some(first) if first.duplicate => self.read(&stream, first.id).await,
            _ => Ok(StoredReply::Reply(reply.clone())),
        }
    }

    /// Copies a reply to the control stream, for those who watch. Doing so twice is known by the id.
    pub(super) async fn publish_copy(&self, request: &RequestId, reply: &Reply) -> Result<()> {
        self.bus.publish_outgoing(reply.to_outgoing(request)?).await?;
        Ok(())
    }

    /// Puts a requester on the list of those who have replies, so that what is theirs can be swept.
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

    /// Removes replies whose time is up, and streams that have had none for as long again. Any process may do so, and
    /// several may.
    pub(super) async fn sweep(&self) -> Result<()> {
        let set = self.storage.keys.requesters(&self.storage.namespace);
        for name in self.storage.backend.set_members(&set).await? {
            let Ok(requester) = Requester::new(&name) else {
                self.storage.backend.set_remove(&set, &[&name]).await?;
                continue;
            };
            if let Err(error) = self.sweep_one(&requester).await {
                warn!(%requester, %error, "replies could not be swept");
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
                // A reply that comes between this look and the end of the stream is still on the control stream.
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
            debug!(%stream, "a stream of replies has ended");
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
