//! SQL of tickets: statements that both databases share, and what differs between them.

pub(super) mod migrations;
pub(super) mod postgres;
pub(super) mod rows;
pub(super) mod sqlite;
pub(super) mod statements;
