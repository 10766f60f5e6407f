//! The binary `headwater` as a library: from webhook to reply in one process, with your own handler if you like.
//!
//! `main` reads the command line and runs what it asks for; a program of your own calls [`main_with`] instead and has the
//! same server, with a handler of its own in place of the desk.

// In dependency order: each module uses only those above it.
pub mod limits;
pub mod text;

pub mod client;
pub mod marker;
mod standard_webhooks;

pub mod ticket_events;

pub mod desk;

pub mod replies;
pub mod tickets;

pub mod ticket_intake;

mod settings;

mod failure;
mod stop;
mod telemetry;

mod open;

mod database_watch;

mod app;
mod http;

mod analytics;

mod audit;

mod webhooks;

mod admin;
mod analytics_routes;
mod issues;
mod ticket_listening;
mod ticket_routes;

mod description;
mod health;
mod page;
mod router;

mod desk_parts;

mod demo;

mod run;

mod operator;

mod cli;

mod command;

pub use command::{main, main_with};
