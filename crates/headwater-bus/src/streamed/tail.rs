//! What other processes publish, for the live subscriptions of this one.
//!
//! Upstream: the streams that are `followed`. Downstream: `live`, and `parked` for what cannot be read.
//! Promises: entries are dealt with in order; those that this bus wrote itself are skipped, for its handlers have had
//! them; a bad entry never stops the reader; an outage delays, and loses nothing that is still in the stream.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Batch, Entry, EntryId, Fields, StreamError, StreamName, TailReader};
use tracing::{debug, error};

use super::Inner;
use crate::error::Misfit;
use crate::event::Envelope;
use crate::handler::Delivered;
use crate::live::Source;

/// The waits between tries while the backend is away.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// Follows streams until the bus closes.
pub(super) async fn run(inner: Arc<Inner>) {
    let mut wait = RETRY_FIRST;
    let mut reader = None;
    while !inner.closing.is_set() {
        let positions = inner.followed.positions();
        // Only reading is ended by a change or by closing: reads are cancel-safe, handlers need not be.
        let read = tokio::select! {
            read = read(&inner, &mut reader, &positions) => read,
            () = inner.followed.changed.notified() => continue,
            () = inner.closing.wait() => return,
        };
        match read {
            Ok(batches) => {
                wait = RETRY_FIRST;
                for batch in batches {
                    inner.receive(batch).await;
                }
            }
            Err(error) => {
                debug!(%error, "live subscriptions cannot read, trying again");
                reader = None;
                if !inner.pause(wait).await {
                    return;
                }
                wait = (wait * 2).min(RETRY_MAX);
            }
        }
    }
}

async fn read(
    inner: &Inner,
    reader: &mut Option<Box<dyn TailReader>>,
    positions: &[(StreamName, EntryId)],
) -> Result<Vec<Batch<Entry>>, StreamError> {
    if positions.is_empty() {
        // Until there is something to follow.
        return std::future::pending().await;
    }
    if reader.is_none() {
        *reader = Some(inner.backend.tail().await?);
    }
    let reader = reader.as_mut().expect("it was opened above");
    reader.read(positions, inner.config.batch, inner.config.poll).await
}

impl Inner {
    async fn receive(&self, batch: Batch<Entry>) {
        for entry in batch.entries {
            if self.closing.is_set() {
                return;
            }
            self.receive_one(&batch.stream, &entry).await;
            self.followed.advance(&batch.stream, entry.id);
        }
    }

    async fn receive_one(&self, stream: &StreamName, entry: &Entry) {
        match self.read_foreign(stream, entry) {
            Ok(None) => {}
            Ok(Some(delivered)) => {
                let session = self.session_of(stream);
                let source = Source::Stream { session: session.as_ref(), stream };
                self.live.dispatch(&delivered, source, self.config.session.as_ref()).await;
            }
            // If it cannot be parked, the log has it, and its stream.
            Err(misfit) => {
                let _ = self.park_for_sure(stream, entry.id, &entry.fields, &misfit).await;
            }
        }
    }

    /// The event of an entry, if handlers here are to run for it.
    fn read_foreign(
        &self,
        stream: &StreamName,
        entry: &Entry,
    ) -> Result<Option<Delivered>, Misfit> {
        let envelope = Envelope::from_entry(stream, entry.id, &entry.fields)?;
        let is_own = envelope.origin.as_deref() == Some(self.origin.name());
        if is_own && !self.origin.saw(&envelope.event_id, entry.id) || envelope.copy_of.is_some() {
            return Ok(None);
        }
        let is_known = self.registry.scope(&envelope.event_type).is_some();
        if is_known && !self.live.handles(&envelope.event_type) {
            return Ok(None);
        }
        let value = self.registry.decode_any(&envelope)?;
        Ok(Some(Delivered { value, envelope: Arc::new(envelope) }))
    }

    /// Parks an entry, however long it takes. An error means that the bus closes meanwhile, or that the backend will
    /// never take it.
    pub(super) async fn park_for_sure(
        &self,
        stream: &StreamName,
        entry_id: EntryId,
        fields: &Fields,
        misfit: &Misfit,
    ) -> Result<(), StreamError> {
        let mut wait = RETRY_FIRST;
        loop {
            let now = self.config.clock.now();
            match self.parked.park(stream, entry_id, fields, misfit, now).await {
                Ok(()) => return Ok(()),
                Err(error) if error.is_transient() => {
                    if !self.pause(wait).await {
                        return Err(error);
                    }
                    wait = (wait * 2).min(RETRY_MAX);
                }
                Err(error) => {
                    error!(%stream, %entry_id, %misfit, %error, "entry could not be parked");
                    return Err(error);
                }
            }
        }
    }

    /// Waits, or returns `false` because the bus closes.
    pub(super) async fn pause(&self, wait: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(wait) => true,
            () = self.closing.wait() => false,
        }
    }
}
