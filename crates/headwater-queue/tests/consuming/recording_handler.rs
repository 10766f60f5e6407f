//! A handler that records messages and returns a configured outcome.

use std::sync::Arc;

use anyhow::{Context, Result};
use async_trait::async_trait;
use headwater_queue::{Handler, Message, Outcome};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;

use crate::fixture::TIMEOUT;

type OutcomeFn = dyn Fn(&Message) -> Outcome + Send + Sync;

/// Records every message.
#[derive(Clone)]
pub(crate) struct RecordingHandler {
    outcome: Arc<OutcomeFn>,
    seen: UnboundedSender<Message>,
}

/// The recorded messages.
pub(crate) struct RecordedMessages(UnboundedReceiver<Message>);

/// A handler that returns this outcome, and the messages it records.
pub(crate) fn recording_handler(
    outcome: impl Fn(&Message) -> Outcome + Send + Sync + 'static,
) -> (RecordingHandler, RecordedMessages) {
    let (seen, receiver) = unbounded_channel();
    (RecordingHandler { outcome: Arc::new(outcome), seen }, RecordedMessages(receiver))
}

#[async_trait]
impl Handler for RecordingHandler {
    async fn handle(&self, message: Message) -> Outcome {
        let outcome = (self.outcome)(&message);
        // The receiver may be dropped.
        let _ = self.seen.send(message);
        outcome
    }
}

impl RecordedMessages {
    /// The next message; fails after the timeout.
    pub(crate) async fn next(&mut self) -> Result<Message> {
        let next = timeout(TIMEOUT, self.0.recv()).await.context("no message was handled")?;
        next.context("the handler was dropped")
    }

    /// The payloads of the next messages.
    pub(crate) async fn payloads(&mut self, count: usize) -> Result<Vec<String>> {
        let mut payloads = Vec::new();
        for _ in 0..count {
            payloads.push(payload(&self.next().await?));
        }
        Ok(payloads)
    }

    /// The next message, if one was recorded already.
    pub(crate) fn now(&mut self) -> Option<Message> {
        self.0.try_recv().ok()
    }
}

pub(crate) fn payload(message: &Message) -> String {
    String::from_utf8_lossy(&message.payload).into_owned()
}
