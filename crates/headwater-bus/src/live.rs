//! The live subscriptions of a bus and the dispatch of events to them.
//!
//! Upstream: `publish`, and events of other processes. Downstream: `handler`.
//! Guarantees: handlers run one at a time in subscription order; a failed handler does not stop the others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::{EntryId, StreamName};
use tracing::warn;

use crate::error::{BusError, FailureKind, HandlerFailure, Result};
use crate::handler::{DeliveredEvent, HandlerResult, TypedHandler};
use crate::limits::SUBSCRIPTIONS_MAX;
use crate::name::{SessionId, SubscriptionId};

/// One live subscription.
pub(crate) struct LiveSubscription {
    pub(crate) id: SubscriptionId,
    pub(crate) handlers: Vec<TypedHandler>,
    /// Restricts session-scoped events to this session.
    pub(crate) session: Option<SessionId>,
    pub(crate) handler_timeout: Duration,
    /// The followed streams, each with its last entry at the time of subscription; older entries are not delivered.
    pub(crate) follows: Vec<(StreamName, EntryId)>,
    is_active: AtomicBool,
}

impl LiveSubscription {
    pub(crate) fn new(
        id: SubscriptionId,
        handlers: Vec<TypedHandler>,
        session: Option<SessionId>,
        handler_timeout: Duration,
        follows: Vec<(StreamName, EntryId)>,
    ) -> Self {
        let is_active = AtomicBool::new(true);
        Self { id, handlers, session, handler_timeout, follows, is_active }
    }
}

/// Where an event comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum EventSource<'a> {
    /// Published by this bus, with its session if it has one.
    Here(Option<&'a SessionId>),
    /// Read from this stream, with its session if it has one.
    Stream { session: Option<&'a SessionId>, stream: &'a StreamName },
}

/// Result of a dispatch.
#[derive(Debug, Default)]
pub(crate) struct DispatchResult {
    pub(crate) invoked: usize,
    pub(crate) failures: Vec<HandlerFailure>,
}

/// All live subscriptions, in order.
#[derive(Default)]
pub(crate) struct LiveSubscriptions {
    /// Replaced as a whole, so that a running dispatch sees an unchanging list.
    list: Mutex<Arc<[Arc<LiveSubscription>]>>,
}

impl LiveSubscriptions {
    pub(crate) fn add(&self, live: LiveSubscription) -> Result<()> {
        let mut list = self.lock();
        if list.len() >= SUBSCRIPTIONS_MAX {
            let problem = format!("the limit of {SUBSCRIPTIONS_MAX} subscriptions is reached");
            return Err(BusError::invalid("subscription", problem));
        }
        *list = list.iter().cloned().chain([Arc::new(live)]).collect();
        Ok(())
    }

    /// Removes a subscription; none of its handlers is started after this.
    pub(crate) fn remove(&self, id: SubscriptionId) -> Option<Arc<LiveSubscription>> {
        let mut list = self.lock();
        let found = list.iter().find(|live| live.id == id).cloned()?;
        *list = list.iter().filter(|live| live.id != id).cloned().collect();
        found.is_active.store(false, Ordering::SeqCst);
        Some(found)
    }

    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.lock());
        all.iter().for_each(|live| live.is_active.store(false, Ordering::SeqCst));
    }

    /// Whether a live handler for this event type is subscribed.
    pub(crate) fn handles(&self, event_type: &str) -> bool {
        let list = Arc::clone(&*self.lock());
        list.iter().any(|live| live.handlers.iter().any(|handler| handler.event_type == event_type))
    }

    /// Runs the handlers of an event. `bus_session` is the session that the bus was opened for.
    pub(crate) async fn dispatch(
        &self,
        delivered: &DeliveredEvent,
        source: EventSource<'_>,
        bus_session: Option<&SessionId>,
    ) -> DispatchResult {
        let list = Arc::clone(&*self.lock());
        let mut dispatched = DispatchResult::default();
        let entry_id = delivered.envelope.entry_id;
        for live in list.iter().filter(|live| live.receives(source, bus_session, entry_id)) {
            for handler in &live.handlers {
                if handler.event_type != delivered.envelope.event_type
                    || !live.is_active.load(Ordering::SeqCst)
                {
                    continue;
                }
                dispatched.invoked += 1;
                let handled = handler.run(delivered.clone(), "live", live.handler_timeout).await;
                if let Some(failure) = failure(live.id, handled) {
                    warn!(
                        event_type = handler.event_type,
                        event_id = %delivered.envelope.event_id,
                        subscription = %live.id,
                        error = failure.reason,
                        "live handler failed"
                    );
                    dispatched.failures.push(failure);
                }
            }
        }
        dispatched
    }

    fn lock(&self) -> MutexGuard<'_, Arc<[Arc<LiveSubscription>]>> {
        self.list.lock().expect("no code panics while it holds this lock")
    }
}

impl LiveSubscription {
    fn receives(
        &self,
        source: EventSource<'_>,
        bus_session: Option<&SessionId>,
        entry_id: Option<EntryId>,
    ) -> bool {
        match source {
            EventSource::Here(None) => true,
            EventSource::Here(Some(session)) => {
                self.session.as_ref().is_none_or(|mine| mine == session)
            }
            EventSource::Stream { session, stream } => {
                let is_mine = session.is_none() || self.session.as_ref().or(bus_session) == session;
                let follows = |(followed, end): &(StreamName, EntryId)| {
                    followed == stream && entry_id.is_none_or(|id| id > *end)
                };
                is_mine && self.follows.iter().any(follows)
            }
        }
    }
}

fn failure(subscription: SubscriptionId, handled: HandlerResult) -> Option<HandlerFailure> {
    let (kind, reason) = match handled {
        HandlerResult::Done => return None,
        HandlerResult::Failed { kind, reason, .. } => (kind, reason),
        HandlerResult::Release => {
            (FailureKind::Failed, "a live handler cannot release an event".into())
        }
    };
    Some(HandlerFailure { subscription, kind, reason })
}
