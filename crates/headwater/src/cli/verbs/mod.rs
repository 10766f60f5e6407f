//! One file per operator command.

pub(crate) mod analytics;
pub(crate) mod assign;
pub(crate) mod audit;
pub(crate) mod bench;
pub(crate) mod completion;
pub(crate) mod consume;
pub(crate) mod dlq;
pub(crate) mod doctor;
pub(crate) mod draft;
pub(crate) mod group;
pub(crate) mod history;
pub(crate) mod issue;
pub(crate) mod main_loop;
pub(crate) mod migrate;
pub(crate) mod outbox;
pub(crate) mod produce;
pub(crate) mod report;
pub(crate) mod session;
pub(crate) mod sql;
pub(crate) mod status;
pub(crate) mod tail;
pub(crate) mod ticket;
pub(crate) mod top;
pub(crate) mod topic;
pub(crate) mod user;
pub(crate) mod webhook;
