//! A handler that shows what it got and says what it is told to say.

use std::sync::Arc;

use anyhow::{Context, Result};
use async_trait::async_trait;
use headwater_queue::{Handler, Message, Outcome};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;

use crate::env::PATIENCE;

type Answer = dyn Fn(&Message) -> Outcome + Send + Sync;

/// Answers every message and sends it on.
#[derive(Clone)]
pub(crate) struct Recorder {
    answer: Arc<Answer>,
    seen: UnboundedSender<Message>,
}

/// What a recorder got.
pub(crate) struct Seen(UnboundedReceiver<Message>);

/// A handler that answers with this, and what it gets.
pub(crate) fn recorder(
    answer: impl Fn(&Message) -> Outcome + Send + Sync + 'static,
) -> (Recorder, Seen) {
    let (seen, receiver) = unbounded_channel();
    (Recorder { answer: Arc::new(answer), seen }, Seen(receiver))
}

#[async_trait]
impl Handler for Recorder {
    async fn handle(&self, message: Message) -> Outcome {
        let outcome = (self.answer)(&message);
        // A test that has seen enough looks no longer.
        let _ = self.seen.send(message);
        outcome
    }
}

impl Seen {
    /// The next message; fails if there is none for too long.
    pub(crate) async fn next(&mut self) -> Result<Message> {
        let next = timeout(PATIENCE, self.0.recv()).await.context("no message came")?;
        next.context("the handler is gone")
    }

    /// The payloads of the next messages.
    pub(crate) async fn payloads(&mut self, count: usize) -> Result<Vec<String>> {
        let mut payloads = Vec::new();
        for _ in 0..count {
            payloads.push(payload(&self.next().await?));
        }
        Ok(payloads)
    }

    /// What is there already.
    pub(crate) fn now(&mut self) -> Option<Message> {
        self.0.try_recv().ok()
    }
}

pub(crate) fn payload(message: &Message) -> String {
    String::from_utf8_lossy(&message.payload).into_owned()
}
