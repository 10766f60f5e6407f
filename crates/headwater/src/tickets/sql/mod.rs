//! SQL of the ticket tables: shared statements, and the two dialects.

pub(super) mod migrations;
pub(super) mod postgres;
pub(super) mod rows;
pub(super) mod sqlite;
pub(super) mod statements;
