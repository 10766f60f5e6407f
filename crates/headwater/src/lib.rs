//! The `headwater` binary as a library: webhook to reply in one process.
//!
//! [`main`] runs the command line of this process. To use your own handler instead of the desk, call [`main_with`]
//! from your own binary; [`main_with_extensions`] also takes a model, tools, providers of
//! webhooks, HTTP routes and receivers of ticket events.

// In dependency order; modules shared by several others come first.
mod exit;
mod http_client;
pub mod limits;
pub mod text;

mod config;
mod telemetry;

pub mod desk;
pub mod inbound;
pub mod outbound;
pub mod tickets;

mod analytics;
mod api;
mod http;
mod server;

mod cli;
mod entry;

/// The version of `axum` that [`Extensions::routes`] takes.
pub use axum;
pub use entry::{Extensions, main, main_with, main_with_extensions};
