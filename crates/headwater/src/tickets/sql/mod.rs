//! SQL of the ticket tables: schema and statements.

pub(super) mod migrations;
pub(super) mod statements;
pub(super) mod ticket_lists;
