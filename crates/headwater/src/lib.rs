//! The binary `headwater` as a library: from webhook to reply in one process, with your own handler if you like.
//!
//! `main` reads the command line and runs what it asks for; a program of your own calls [`main_with`] instead and has the
//! same server, with a handler of its own in place of the desk.

// In dependency order, except for names that several modules share.
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

pub use entry::{main, main_with};
