//! Consumers that come, go, die and stand still, with real messages.

// Clippy knows tests by their attribute, and half of this is not directly in one.
#![allow(clippy::unwrap_used)]

mod env;
mod processes;
mod subscriptions;
