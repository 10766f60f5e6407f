//! The server process: startup, composition (`run.rs`), health, shutdown, and replay plans (`plans/`).

pub(crate) mod app_state;
pub(crate) mod db_availability;
pub(crate) mod demo;
pub(crate) mod health;
pub(crate) mod plans;
mod retention;
pub(crate) mod run;
mod services;
mod shutdown;
pub(crate) mod shutdown_signal;
pub(crate) mod startup;
pub(crate) mod stream_monitor;
pub(crate) mod stream_options;
