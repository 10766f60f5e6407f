//! Exports all ticket events from SQL in pages.
//!
//! Upstream: the event logs of the desk, and the answers in its tickets with their run metrics. Downstream: a rebuild
//! of analytics.
//! Guarantees: each published event that was committed before the export started is read once, in its published form.
//! Not here: stream entries of other programs that were rejected, because SQL does not have them.

use std::sync::Arc;

use headwater_analytics::{RunMetrics, TicketEventRow as Row};
use headwater_issue::{Store, StoreConnection};
use headwater_stream::clock::Timestamp;
use sqlx::Error;

use crate::tickets::sql::rows;
use crate::tickets::store::{INTEGRATION, database_error};
use crate::tickets::ticket::TicketError;
use crate::tickets::{TicketEvent, TicketEventType};

/// Rows per page.
const PAGE: i64 = 1000;

/// Position of an export.
#[derive(Debug)]
pub(crate) struct TicketExport {
    store: Arc<dyn Store>,
    stage: ExportStage,
    after: i64,
}

#[derive(Debug, PartialEq, Eq)]
enum ExportStage {
    /// Messages of people, and status changes.
    EventLogs,
    /// Answers of the desk.
    Answers,
    Done,
}

/// Id and payload of an event log of the desk.
type LogRow = (i64, String);

/// An answer in a ticket: sequence number, message, ticket, user, text, time in milliseconds, run metrics.
type AnswerRow = (i64, String, String, Option<String>, String, i64, Option<String>);

const COUNT: &str =
    "SELECT (SELECT count(*) FROM event_logs e JOIN integrations i ON i.id = e.integration_id
        WHERE i.name = $1) + (SELECT count(*) FROM ticket_messages WHERE author = 'assistant')";

const LOGS: &str = "SELECT e.id AS id, CAST(e.payload AS text) AS payload
     FROM event_logs e JOIN integrations i ON i.id = e.integration_id
     WHERE i.name = $1 AND e.id > $2 ORDER BY e.id LIMIT $3";

macro_rules! answers {
    ($time:literal) => {
        concat!(
            "SELECT m.seq AS seq, CAST(m.message_id AS text) AS message_id, CAST(m.ticket_id AS text) AS ticket_id,
                 t.user_id AS user_id, m.content AS content, ",
            $time,
            " AS created_ms, m.run AS run FROM ticket_messages m JOIN tickets t ON t.ticket_id = m.ticket_id
             WHERE m.author = 'assistant' AND m.seq > $1 ORDER BY m.seq LIMIT $2"
        )
    };
}

impl TicketExport {
    /// An export that starts at the first event.
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, stage: ExportStage::EventLogs, after: 0 }
    }

    /// Upper bound of the number of events: some event logs are not exported.
    pub(crate) async fn count(&self) -> Result<u64, TicketError> {
        let mut connection = self.store.read_connection().await?;
        let counted: Result<i64, Error> = match connection.connection() {
            StoreConnection::Sqlite(connection) => {
                sqlx::query_scalar(COUNT).bind(INTEGRATION).fetch_one(connection).await
            }
            StoreConnection::Postgres(connection) => {
                sqlx::query_scalar(COUNT).bind(INTEGRATION).fetch_one(connection).await
            }
            _ => Err(unsupported_database()),
        };
        connection.release().await;
        let counted = counted.map_err(|error| database_error("count events", error))?;
        Ok(u64::try_from(counted).unwrap_or(0))
    }

    /// The next page; empty after the last one.
    pub(crate) async fn next_page(&mut self) -> Result<Vec<Row>, TicketError> {
        while self.stage != ExportStage::Done {
            let (read, last) = match self.stage {
                ExportStage::EventLogs => self.event_logs().await?,
                _ => self.answers().await?,
            };
            match last {
                Some(last) => self.after = last,
                None if self.stage == ExportStage::EventLogs => {
                    (self.stage, self.after) = (ExportStage::Answers, 0);
                }
                None => self.stage = ExportStage::Done,
            }
            // A page may contain no exported event.
            if !read.is_empty() {
                return Ok(read);
            }
        }
        Ok(Vec::new())
    }

    async fn event_logs(&self) -> Result<(Vec<Row>, Option<i64>), TicketError> {
        let mut connection = self.store.read_connection().await?;
        let read: Result<Vec<LogRow>, Error> = match connection.connection() {
            StoreConnection::Sqlite(connection) => {
                let logs = sqlx::query_as(LOGS).bind(INTEGRATION).bind(self.after).bind(PAGE);
                logs.fetch_all(connection).await
            }
            StoreConnection::Postgres(connection) => {
                let logs = sqlx::query_as(LOGS).bind(INTEGRATION).bind(self.after).bind(PAGE);
                logs.fetch_all(connection).await
            }
            _ => Err(unsupported_database()),
        };
        connection.release().await;
        let read = read.map_err(|error| database_error("read event logs", error))?;
        let last = read.last().map(|(id, _)| *id);
        let events = read.iter().filter_map(|(_, payload)| from_event_log(payload)).collect();
        Ok((events, last))
    }

    async fn answers(&self) -> Result<(Vec<Row>, Option<i64>), TicketError> {
        let mut connection = self.store.read_connection().await?;
        let read: Result<Vec<AnswerRow>, Error> = match connection.connection() {
            StoreConnection::Sqlite(connection) => {
                let answers = sqlx::query_as(answers!("m.created_at"));
                answers.bind(self.after).bind(PAGE).fetch_all(connection).await
            }
            StoreConnection::Postgres(connection) => {
                let answers = sqlx::query_as(answers!(
                    "CAST(extract(epoch FROM m.created_at) * 1000 AS bigint)"
                ));
                answers.bind(self.after).bind(PAGE).fetch_all(connection).await
            }
            _ => Err(unsupported_database()),
        };
        connection.release().await;
        let read = read.map_err(|error| database_error("read answers", error))?;
        let last = read.last().map(|(seq, ..)| *seq);
        Ok((read.into_iter().map(from_answer).collect(), last))
    }
}

/// `None` for events that were not published: reopened tickets, and payloads that are not ticket events.
fn from_event_log(payload: &str) -> Option<Row> {
    let event: TicketEvent = serde_json::from_str(payload).ok()?;
    let event_type = TicketEventType::parse_public(event.event_type.as_str())?;
    let at = Timestamp::from_rfc3339(&event.payload.timestamp)?;
    Some(Row {
        entry: None,
        event_type: event_type.as_str().to_owned(),
        ticket_id: event.ticket_id.to_string(),
        message_id: Some(event.message_id.to_string()),
        user_id: event.user_id,
        content: Some(event.payload.content),
        occurred_at: at,
        run: event.payload.run,
    })
}

fn from_answer(answer: AnswerRow) -> Row {
    let (_, message_id, ticket_id, user_id, content, created_ms, run) = answer;
    let run = run.as_deref().and_then(|run| serde_json::from_str::<RunMetrics>(run).ok());
    Row {
        entry: None,
        event_type: TicketEventType::AiResponseGenerated.as_str().to_owned(),
        ticket_id,
        message_id: Some(message_id),
        user_id,
        content: Some(content),
        occurred_at: rows::from_ms(created_ms),
        run: run.unwrap_or_default(),
    }
}

fn unsupported_database() -> Error {
    Error::Configuration("tickets need SQLite or PostgreSQL".into())
}
