//! What other systems send: webhooks, and the stream of ticket events.

pub(crate) mod standard_webhooks;
pub mod ticket_events_consumer;
pub(crate) mod webhooks;
