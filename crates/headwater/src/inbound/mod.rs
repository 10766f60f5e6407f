//! Input from other systems: webhooks, and the `ticket_events` stream.

pub(crate) mod standard_webhooks;
pub mod ticket_events_consumer;
pub(crate) mod webhook_log;
pub(crate) mod webhooks;
