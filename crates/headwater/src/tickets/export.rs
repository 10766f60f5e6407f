//! Everything that happened in tickets, read from the truth in pages.
//!
//! Upstream: the event logs of the desk, and the answers in its tickets with what they took. Downstream: a rebuild of analytics.
//! Promises: each event that other programs were told of is read once, as they were told it, as long as it is committed when
//! reading begins. Not here: what SQL never knew, such as entries of other programs that made no sense.

use std::sync::Arc;

use headwater_analytics::{RunFigures, TicketEvent as Row};
use headwater_issue::{Connection, Store};
use headwater_stream::clock::Timestamp;
use sqlx::Error;

use crate::tickets::sql::rows;
use crate::tickets::store::{INTEGRATION, database_error};
use crate::tickets::ticket::TicketError;
use crate::tickets::{TicketEvent, TicketEventType};

/// Events of one page.
const PAGE: i64 = 1000;

/// Where reading has come to.
#[derive(Debug)]
pub(crate) struct History {
    store: Arc<dyn Store>,
    stage: Stage,
    after: i64,
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// What people wrote, and what was done with tickets.
    EventLogs,
    /// What the desk answered.
    Answers,
    Done,
}

/// An event log of the desk: its id and its payload.
type LogRow = (i64, String);

/// An answer in a ticket: its place, message, ticket, user, text, time in milliseconds, and what it took.
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

impl History {
    /// From the beginning.
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, stage: Stage::EventLogs, after: 0 }
    }

    /// How many events there are, or a few more: some event logs are of nobody's interest.
    pub(crate) async fn count(&self) -> Result<u64, TicketError> {
        let mut reading = self.store.read_connection().await?;
        let counted: Result<i64, Error> = match reading.connection() {
            Connection::Sqlite(connection) => {
                sqlx::query_scalar(COUNT).bind(INTEGRATION).fetch_one(connection).await
            }
            Connection::Postgres(connection) => {
                sqlx::query_scalar(COUNT).bind(INTEGRATION).fetch_one(connection).await
            }
            _ => Err(unknown()),
        };
        reading.release().await;
        let counted = counted.map_err(|error| database_error("count events", error))?;
        Ok(u64::try_from(counted).unwrap_or(0))
    }

    /// The next events; none after the last.
    pub(crate) async fn next(&mut self) -> Result<Vec<Row>, TicketError> {
        while self.stage != Stage::Done {
            let (read, last) = match self.stage {
                Stage::EventLogs => self.event_logs().await?,
                _ => self.answers().await?,
            };
            match last {
                Some(last) => self.after = last,
                None if self.stage == Stage::EventLogs => {
                    (self.stage, self.after) = (Stage::Answers, 0);
                }
                None => self.stage = Stage::Done,
            }
            // A whole page may be of nobody's interest.
            if !read.is_empty() {
                return Ok(read);
            }
        }
        Ok(Vec::new())
    }

    async fn event_logs(&self) -> Result<(Vec<Row>, Option<i64>), TicketError> {
        let mut reading = self.store.read_connection().await?;
        let read: Result<Vec<LogRow>, Error> = match reading.connection() {
            Connection::Sqlite(connection) => {
                let logs = sqlx::query_as(LOGS).bind(INTEGRATION).bind(self.after).bind(PAGE);
                logs.fetch_all(connection).await
            }
            Connection::Postgres(connection) => {
                let logs = sqlx::query_as(LOGS).bind(INTEGRATION).bind(self.after).bind(PAGE);
                logs.fetch_all(connection).await
            }
            _ => Err(unknown()),
        };
        reading.release().await;
        let read = read.map_err(|error| database_error("read event logs", error))?;
        let last = read.last().map(|(id, _)| *id);
        let events = read.iter().filter_map(|(_, payload)| of_log(payload)).collect();
        Ok((events, last))
    }

    async fn answers(&self) -> Result<(Vec<Row>, Option<i64>), TicketError> {
        let mut reading = self.store.read_connection().await?;
        let read: Result<Vec<AnswerRow>, Error> = match reading.connection() {
            Connection::Sqlite(connection) => {
                let answers = sqlx::query_as(answers!("m.created_at"));
                answers.bind(self.after).bind(PAGE).fetch_all(connection).await
            }
            Connection::Postgres(connection) => {
                let answers = sqlx::query_as(answers!(
                    "CAST(extract(epoch FROM m.created_at) * 1000 AS bigint)"
                ));
                answers.bind(self.after).bind(PAGE).fetch_all(connection).await
            }
            _ => Err(unknown()),
        };
        reading.release().await;
        let read = read.map_err(|error| database_error("read answers", error))?;
        let last = read.last().map(|(seq, ..)| *seq);
        Ok((read.into_iter().map(of_answer).collect(), last))
    }
}

/// Other programs are not told of a ticket that is opened again, and what is no event of ours was never told.
fn of_log(payload: &str) -> Option<Row> {
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

fn of_answer(answer: AnswerRow) -> Row {
    let (_, message_id, ticket_id, user_id, content, created_ms, run) = answer;
    let run = run.as_deref().and_then(|run| serde_json::from_str::<RunFigures>(run).ok());
    Row {
        entry: None,
        event_type: TicketEventType::AiResponseGenerated.as_str().to_owned(),
        ticket_id,
        message_id: Some(message_id),
        user_id,
        content: Some(content),
        occurred_at: rows::time(created_ms),
        run: run.unwrap_or_default(),
    }
}

fn unknown() -> Error {
    Error::Configuration("tickets need SQLite or Postgres".into())
}
