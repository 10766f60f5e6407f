//! Wakes callers when their reply arrives: one stream reader per requester and process.
//!
//! Upstream: `client`. Downstream: the reply stream, read without a group, so that all processes of a requester see
//! every reply.
//! Guarantees: a waiter is woken by the reply, not by polling; an outage only delays it. A reply that the reader misses
//! (the stream was trimmed or deleted) is found by a last lookup at the end of the wait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::{Backend, Backoff, EntryId, StreamName, TailReader};
use tokio::sync::watch;
use tracing::debug;

use super::reply;
use crate::error::{BusError, Result};
use crate::event::Envelope;
use crate::limits::WAITERS_MAX;
use crate::name::RequestId;

/// Timeout of one read.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Replies in one read.
const READ_COUNT: usize = 64;

/// Backoff between reads while the backend is unavailable.
const RETRY: Backoff = Backoff::doubling(Duration::from_millis(50), Duration::from_secs(2));

type ArrivedReply = Option<Arc<Envelope>>;

/// The waiters of this process, by request.
#[derive(Default)]
pub(super) struct ReplyWaiters {
    waiting: Mutex<HashMap<RequestId, watch::Sender<ArrivedReply>>>,
}

impl ReplyWaiters {
    /// Registers a waiter for the reply to a request.
    pub(super) fn add(self: &Arc<Self>, request: &RequestId) -> Result<ReplyWaiter> {
        let mut waiting = self.lock();
        let receiver = match waiting.get(request) {
            Some(sender) => sender.subscribe(),
            None if waiting.len() >= WAITERS_MAX => {
                let problem = format!("the limit of {WAITERS_MAX} awaited replies is reached");
                return Err(BusError::invalid("request", problem));
            }
            None => {
                let (sender, receiver) = watch::channel(None);
                waiting.insert(request.clone(), sender);
                receiver
            }
        };
        let waiters = Arc::clone(self);
        Ok(ReplyWaiter { waiters, request: request.clone(), receiver: Some(receiver) })
    }

    fn wake(&self, request: &RequestId, envelope: Envelope) {
        if let Some(sender) = self.lock().get(request) {
            sender.send_replace(Some(Arc::new(envelope)));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, watch::Sender<ArrivedReply>>> {
        self.waiting.lock().expect("no code panics while it holds this lock")
    }
}

/// Waits for the reply to one request.
pub(super) struct ReplyWaiter {
    waiters: Arc<ReplyWaiters>,
    request: RequestId,
    receiver: Option<watch::Receiver<ArrivedReply>>,
}

impl ReplyWaiter {
    /// Returns when the reply has arrived. Cancel-safe.
    pub(super) async fn arrived(&mut self) -> Arc<Envelope> {
        let Some(receiver) = &mut self.receiver else { return std::future::pending().await };
        match receiver.wait_for(Option::is_some).await.map(|arrived| arrived.clone()) {
            Ok(Some(envelope)) => envelope,
            // The sender is dropped only together with the last waiter.
            _ => std::future::pending().await,
        }
    }
}

impl Drop for ReplyWaiter {
    fn drop(&mut self) {
        let mut waiting = self.waiters.lock();
        self.receiver = None;
        if waiting.get(&self.request).is_some_and(|sender| sender.receiver_count() == 0) {
            waiting.remove(&self.request);
        }
    }
}

/// Reads replies after `position` and wakes their waiters, for as long as it is polled.
pub(super) async fn follow_replies(
    backend: Arc<dyn Backend>,
    stream: StreamName,
    mut position: EntryId,
    waiters: Arc<ReplyWaiters>,
) {
    let mut retry = RETRY.timer();
    let mut reader: Option<Box<dyn TailReader>> = None;
    loop {
        match read(&*backend, &mut reader, (stream.clone(), position)).await {
            Ok(envelopes) => {
                retry.reset();
                for (entry_id, envelope) in envelopes {
                    position = position.max(entry_id);
                    // An undecodable entry is not a reply.
                    let Some(envelope) = envelope else { continue };
                    if let Some(request) = reply::request_of(&envelope) {
                        waiters.wake(&request, envelope);
                    }
                }
            }
            Err(error) => {
                debug!(%stream, %error, "replies cannot be read; retrying");
                reader = None;
                retry.wait().await;
            }
        }
    }
}

async fn read(
    backend: &dyn Backend,
    reader: &mut Option<Box<dyn TailReader>>,
    position: (StreamName, EntryId),
) -> Result<Vec<(EntryId, Option<Envelope>)>> {
    let reader = match reader {
        Some(reader) => reader,
        None => reader.insert(backend.tail().await?),
    };
    let batches = reader.read(&[position], READ_COUNT, READ_TIMEOUT).await?;
    let read = batches.into_iter().flat_map(|batch| {
        let stream = batch.stream;
        batch.entries.into_iter().map(move |entry| {
            (entry.id, Envelope::from_entry(&stream, entry.id, &entry.fields).ok())
        })
    });
    Ok(read.collect())
}
