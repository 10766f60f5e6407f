//! Where replies are kept: a stream for each requester, with the first reply to a request as the only one.
//!
//! Upstream: workers, and clients that cancel. Downstream: streams of the journal, and a copy on the control stream.
//! Promises: of all who reply to a request one wins, at the server, and all see the same reply; a stream of replies is
//! bounded in entries, bytes and age, and goes when nothing is in it. The copy has the id of the original, so it is known
//! to be the same event.

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
use crate::journal::Journal;
use crate::metrics;
use crate::name::{RequestId, Requester, random_bits};

/// How often a requester is put on the list of those who have replies, at most.
const LIST_EVERY: Duration = Duration::from_secs(10 * 60);

/// Requesters that are known to be on the list; beyond it, all are listed anew.
const LISTED_MAX: usize = 10_000;

/// The shortest mark there is: asking whether a request was replied to leaves one.
const ASKING: Duration = Duration::from_millis(1);

/// A reply that is kept somewhere, or was.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kept {
    Reply(Reply),
    /// There was one, but its stream grew beyond what is kept.
    Gone,
}

/// The replies of a namespace.
pub(super) struct Replies {
    pub(super) bus: Arc<dyn EventBus>,
    pub(super) journal: Journal,
    config: ReplyConfig,
    /// What this process writes into the field `origin`.
    pub(super) origin: String,
    /// When requesters were last put on the list.
    listed: Mutex<HashMap<Requester, Instant>>,
}

impl Replies {
    pub(super) async fn new(bus: Arc<dyn EventBus>, config: ReplyConfig) -> Result<Self> {
        config.validate()?;
        let journal = bus.journal().await?;
        BusError::check_remembered("keep", config.keep, journal.backend.call_deadline())?;
        let origin = format!("main-loop:{}:{:032x}", std::process::id(), random_bits());
        Ok(Self { bus, journal, config, origin, listed: Mutex::default() })
    }

    pub(super) fn stream(&self, requester: &Requester) -> StreamName {
        self.journal.keys.replies(&self.journal.namespace, requester)
    }

    /// The reply to a request in the stream of this requester.
    pub(super) async fn find(
        &self,
        requester: &Requester,
        request: &RequestId,
    ) -> Result<Option<Kept>> {
        let stream = self.stream(requester);
        let event_id = reply::event_id(request);
        let found = self.journal.backend.appended(&stream, &[event_id.as_str()]).await?;
        match found.first().copied().flatten() {
            Some(entry_id) => self.read(&stream, entry_id).await.map(Some),
            None => Ok(None),
        }
    }

    /// The reply to a request that another requester sent, too.
    pub(super) async fn find_elsewhere(
        &self,
        requester: &Requester,
        request: &RequestId,
    ) -> Result<Option<Kept>> {
        let scope = self.journal.keys.replied(&self.journal.namespace);
        let asked = self.journal.backend.dedup_begin(&scope, &[request.as_str()], ASKING).await?;
        let Some(Begin::Done(other)) = asked.into_iter().next() else { return Ok(None) };
        let other = std::str::from_utf8(&other).ok().and_then(|name| Requester::new(name).ok());
        match other {
            Some(other) if other != *requester => self.find(&other, request).await,
            _ => Ok(None),
        }
    }

    async fn read(&self, stream: &StreamName, entry_id: EntryId) -> Result<Kept> {
        let range = Range { from: entry_id, to: entry_id, direction: Direction::Forward, count: 1 };
        let entries = self.journal.backend.range(stream, range).await?;
        let Some(entry) = entries.first() else { return Ok(Kept::Gone) };
        let registry = self.bus.registry();
        Reply::from_entry(registry, stream, entry.id, &entry.fields).map(Kept::Reply)
    }

    /// Keeps a reply, unless there is one. Returns the one that counts.
    pub(super) async fn store(
        &self,
        requester: &Requester,
        request: &RequestId,
        reply: &Reply,
    ) -> Result<Kept> {
        let backend = &self.journal.backend;
        let now = backend.now().await?;
        let fields = reply.to_fields(request, &self.origin, now)?;
        self.list(requester).await?;
        // Where the reply is comes before the reply: whoever finds nothing there knows that there is none yet. The other
        // way round, a crash in between would hide it from others who asked the same.
        let scope = self.journal.keys.replied(&self.journal.namespace);
        let place = Bytes::copy_from_slice(requester.as_str().as_bytes());
        backend.dedup_finish(&scope, &[(request.as_str(), place)], self.config.keep).await?;
        let stream = self.stream(requester);
        let once = [Once { id: reply::event_id(request).to_string(), fields }];
        let retention = self.config.retention();
        let appended = backend.append_once(&stream, &once, self.config.keep, &retention).await?;
        match appended.first() {
            Some(first) if first.duplicate => self.read(&stream, first.id).await,
            _ => Ok(Kept::Reply(reply.clone())),
        }
    }

    /// Copies a reply to the control stream, for those who watch. Doing so twice is known by the id.
    pub(super) async fn announce(&self, request: &RequestId, reply: &Reply) -> Result<()> {
        self.bus.publish_outgoing(reply.to_outgoing(request)?).await?;
        Ok(())
    }

    /// Puts a requester on the list of those who have replies, so that what is theirs can be swept.
    pub(super) async fn list(&self, requester: &Requester) -> Result<()> {
        let now = Instant::now();
        let is_listed = |at: &Instant| now.duration_since(*at) < LIST_EVERY;
        if self.listed().get(requester).is_some_and(is_listed) {
            return Ok(());
        }
        let set = self.journal.keys.requesters(&self.journal.namespace);
        self.journal.backend.set_add(&set, &[requester.as_str()], None).await?;
        let mut listed = self.listed();
        if listed.len() >= LISTED_MAX {
            listed.clear();
        }
        listed.insert(requester.clone(), now);
        Ok(())
    }

    /// Removes replies whose time is up, and streams that have had none for as long again. Any process may do so, and
    /// several may.
    pub(super) async fn sweep(&self) -> Result<()> {
        let set = self.journal.keys.requesters(&self.journal.namespace);
        for name in self.journal.backend.set_members(&set).await? {
            let Ok(requester) = Requester::new(&name) else {
                self.journal.backend.set_remove(&set, &[&name]).await?;
                continue;
            };
            if let Err(error) = self.sweep_one(&requester).await {
                warn!(%requester, %error, "replies could not be swept");
            }
        }
        Ok(())
    }

    async fn sweep_one(&self, requester: &Requester) -> Result<()> {
        let (backend, stream) = (&self.journal.backend, self.stream(requester));
        let retention = Retention { max_age: Some(self.config.keep), ..Retention::KEEP_ALL };
        let trimmed = backend.trim(&stream, &retention, TrimGuard::Safe).await?;
        metrics::replies_swept(trimmed.removed, 0);
        let stats = backend.stats(&stream).await?;
        let now = backend.now().await?;
        let is_over = match &stats {
            None => true,
            Some(stats) => {
                let last = stats.last_id.map_or(0, |id| id.ms);
                // A reply that comes between this look and the end of the stream is still on the control stream.
                stats.length == 0 && now.as_millis().saturating_sub(last) > self.long_ago_ms()
            }
        };
        if !is_over {
            return Ok(());
        }
        let set = self.journal.keys.requesters(&self.journal.namespace);
        backend.set_remove(&set, &[requester.as_str()]).await?;
        self.listed().remove(requester);
        if stats.is_some() && backend.delete_stream(&stream).await? {
            metrics::replies_swept(0, 1);
            debug!(%stream, "a stream of replies has ended");
        }
        Ok(())
    }

    fn long_ago_ms(&self) -> u64 {
        u64::try_from((self.config.keep * 2).as_millis()).unwrap_or(u64::MAX)
    }

    fn listed(&self) -> MutexGuard<'_, HashMap<Requester, Instant>> {
        self.listed.lock().expect("no code panics while it holds this lock")
    }
}
