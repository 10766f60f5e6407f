//! Durable subscriptions: a consumer group of the queue on the stream of a session or namespace.
//!
//! Upstream: `headwater-queue` reads, shares, reclaims and dead-letters entries. Downstream: `delivery` handles each
//! event.
//! Guarantees: an undecodable entry is parked before it is acknowledged; a failed event becomes a dead letter with its
//! bytes unchanged.

use std::sync::Arc;

use headwater_queue::{ConsumerConfig, Message, Mode, Outcome, Subscription};
use headwater_stream::{EntryId, GroupName, StreamName};

use super::Inner;
use crate::bus::SubscribeOptions;
use crate::delivery::EventDelivery;
use crate::error::{BusError, DecodeError, Result};
use crate::event::{Envelope, Scope};
use crate::handler::{DeliveredEvent, Handlers};
use crate::name::SubscriptionId;

/// A durable subscription of this bus.
pub(super) struct DurableGroup {
    pub(super) stream: StreamName,
    pub(super) name: GroupName,
    pub(super) delivery: EventDelivery,
    /// `None` while it is being created.
    pub(super) subscription: Option<Arc<Subscription>>,
}

/// The slot of a group that is being subscribed; freed if that fails or the caller is dropped.
struct GroupReservation<'a> {
    inner: &'a Inner,
    id: SubscriptionId,
    is_committed: bool,
}

impl Drop for GroupReservation<'_> {
    fn drop(&mut self) {
        if !self.is_committed {
            self.inner.groups().remove(&self.id);
        }
    }
}

impl Inner {
    pub(super) async fn subscribe_durable(
        self: &Arc<Self>,
        id: SubscriptionId,
        label: &str,
        subscribe: SubscribeOptions,
        handlers: Handlers,
    ) -> Result<()> {
        let (stream, place) = match handlers.common_scope()? {
            Scope::Namespace => (self.control.clone(), self.config.namespace.as_str()),
            Scope::Session => {
                let session = subscribe.session.as_ref().or(self.config.session.as_ref());
                let session = session.ok_or_else(|| {
                    BusError::invalid("durable subscription", "no session is set")
                })?;
                (self.keys.session(session), session.as_str())
            }
        };
        let name = self.keys.group(place, label)?;
        let delivery = EventDelivery {
            handlers: handlers.list,
            handler_timeout: subscribe.handler_timeout,
            retry: subscribe.retry.clone(),
            closing: self.closing.clone(),
        };
        let group = DurableGroup {
            stream: stream.clone(),
            name: name.clone(),
            delivery: delivery.clone(),
            subscription: None,
        };
        let mut reservation = self.reserve(id, group, label)?;
        let (topic, group) = (stream.to_string(), name.to_string());
        let inner = Arc::downgrade(self);
        let handler = move |message: Message| {
            let (inner, delivery, stream) = (inner.upgrade(), delivery.clone(), stream.clone());
            async move {
                match inner {
                    Some(inner) => inner.handle(&stream, &delivery, message).await,
                    // The bus was dropped: another process will handle it.
                    None => Outcome::Release,
                }
            }
        };
        let config = consumer_config(&subscribe, self.config.drain);
        let inner = Arc::clone(self);
        // Runs in its own task: joining a group must be completed or undone even if the caller is dropped.
        let subscribing = tokio::spawn(async move {
            let subscription = inner.queue.subscribe(&topic, &group, handler, config).await?;
            inner.attach(id, subscription).await;
            Ok(())
        });
        let subscribed = subscribing.await.unwrap_or(Err(BusError::Closed));
        reservation.is_committed = subscribed.is_ok();
        subscribed
    }

    /// Puts a subscription into its reserved slot, or stops it if the slot is gone.
    async fn attach(&self, id: SubscriptionId, subscription: Subscription) {
        let subscription = Arc::new(subscription);
        let is_wanted = match self.groups().get_mut(&id) {
            Some(group) => {
                group.subscription = Some(Arc::clone(&subscription));
                true
            }
            None => false,
        };
        if !is_wanted {
            subscription.stop().await;
        }
    }

    /// One subscription per stream and group: two would acknowledge and skip each other's events.
    fn reserve(
        &self,
        id: SubscriptionId,
        group: DurableGroup,
        label: &str,
    ) -> Result<GroupReservation<'_>> {
        let mut groups = self.groups();
        let is_same =
            |other: &DurableGroup| other.stream == group.stream && other.name == group.name;
        if groups.values().any(is_same) {
            let problem = format!(
                "`{label}` is already subscribed on this bus; pass all handlers in one call"
            );
            return Err(BusError::invalid("group", problem));
        }
        groups.insert(id, group);
        Ok(GroupReservation { inner: self, id, is_committed: false })
    }

    async fn handle(
        &self,
        stream: &StreamName,
        delivery: &EventDelivery,
        message: Message,
    ) -> Outcome {
        let delivered = match self.read_message(stream, delivery, &message) {
            Ok(Some(delivered)) => delivered,
            Ok(None) => return Outcome::Done,
            Err(decode_error) => return self.park_message(stream, &message, &decode_error).await,
        };
        delivery.run(&delivered).await
    }

    /// Decodes a message; `None` if the group has no handler for its type.
    fn read_message(
        &self,
        stream: &StreamName,
        delivery: &EventDelivery,
        message: &Message,
    ) -> Result<Option<DeliveredEvent>, DecodeError> {
        let mut envelope = Envelope::from_entry(stream, message.id, &message.fields)?;
        envelope.deliveries = message.deliveries;
        let is_known = self.registry.scope(&envelope.event_type).is_some();
        if is_known && !delivery.handles(&envelope.event_type) {
            return Ok(None);
        }
        DeliveredEvent::decode(&self.registry, envelope).map(Some)
    }

    async fn park_message(
        &self,
        stream: &StreamName,
        message: &Message,
        decode_error: &DecodeError,
    ) -> Outcome {
        let entry_id: EntryId = message.id;
        match self.park_with_retries(stream, entry_id, &message.fields, decode_error).await {
            Ok(()) => Outcome::Done,
            Err(error) if error.is_transient() => Outcome::Release,
            // It cannot be parked, so it is kept as a dead letter.
            Err(error) => {
                Outcome::dead_letter(format!("{decode_error}; it could not be parked: {error}"))
            }
        }
    }
}

fn consumer_config(subscribe: &SubscribeOptions, drain: std::time::Duration) -> ConsumerConfig {
    let concurrency = subscribe.concurrency;
    let read_ahead = subscribe.read_ahead.unwrap_or(concurrency);
    let in_flight = concurrency + read_ahead;
    ConsumerConfig {
        mode: Mode::Shared,
        concurrency,
        in_flight_max: in_flight,
        read_ahead: Some(read_ahead),
        batch: in_flight.min(256),
        retry: subscribe.retry.clone(),
        drain,
        reclaim_idle: subscribe.reclaim_idle,
        ..Default::default()
    }
}
