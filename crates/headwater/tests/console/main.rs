//! The web console in a real browser, on real servers.
//!
//! Every test fails on an error on the browser's console, a violation of the content security policy or a request to
//! another server. Tests are few and long, because each starts a browser.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../support/mod.rs"]
mod support;

mod act_on_all;
mod actions;
mod commands;
mod counts;
mod details;
mod failed_actions;
mod fixture;
mod hostile;
mod keyboard;
mod live;
mod login;
mod measured_data;
mod measures;
mod outages;
mod pictures;
mod rows;
mod screens;
mod tasks;
mod timeline;
mod topic_history;
mod topics;
mod verbs;
