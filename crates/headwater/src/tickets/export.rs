//! Exports all ticket events from SQL in pages.
//!
//! Upstream: the event logs of the desk, and the answers in its tickets with their run metrics. Downstream: a rebuild
//! of analytics.
//! Guarantees: each published event that was committed before the export started is read once, in its published form.
//! Not here: stream entries of other programs that were rejected, because SQL does not have them.

use std::sync::Arc;

use headwater_analytics::{RunMetrics, TicketEventRow as Row};
use headwater_issue::{SqlRow, SqlValue, Store};
use headwater_stream::clock::Timestamp;
use sqlx::Error;

use crate::tickets::sql::statements::{self, from_ms};
use crate::tickets::store::INTEGRATION;
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

/// How many ids there are: counting 10^8 rows takes longer than a statement may.
const COUNT: &str = "SELECT coalesce((SELECT max(id) FROM event_logs) - (SELECT min(id) FROM event_logs) + 1, 0)::bigint
     + coalesce((SELECT max(seq) FROM ticket_messages) - (SELECT min(seq) FROM ticket_messages) + 1, 0)::bigint";

/// Reads a page of all event logs: with few of the desk among many, a page of its own could take longer than a statement may.
const LOGS: &str = "SELECT e.id, CASE WHEN i.name = $1 THEN e.payload::text END
     FROM (SELECT id, integration_id, payload FROM event_logs WHERE id > $2 ORDER BY id LIMIT $3) AS e
     JOIN integrations i ON i.id = e.integration_id ORDER BY e.id";

const ANSWERS: &str = "SELECT m.seq, m.message_id::text, m.ticket_id::text, t.user_id, m.content,
         headwater_ms(m.created_at), m.run
     FROM ticket_messages m JOIN tickets t ON t.ticket_id = m.ticket_id
     WHERE m.author = 'assistant' AND m.seq > $1 ORDER BY m.seq LIMIT $2";

impl TicketExport {
    /// An export that starts at the first event.
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, stage: ExportStage::EventLogs, after: 0 }
    }

    /// Upper bound of the number of events: not every id is that of an exported event.
    pub(crate) async fn count(&self) -> Result<u64, TicketError> {
        let counted = self.read("count events", COUNT, &[], |row| row.get(0));
        let counted: Option<i64> = counted.await?.pop();
        Ok(counted.and_then(|count| u64::try_from(count).ok()).unwrap_or(0))
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

    /// The exported events of a page, and the position of its last row.
    async fn event_logs(&self) -> Result<(Vec<Row>, Option<i64>), TicketError> {
        let parameters = [INTEGRATION.into(), self.after.into(), PAGE.into()];
        let read = |row: &SqlRow| Ok((row.get(0)?, row.get(1)?));
        let read: Vec<(i64, Option<String>)> =
            self.read("read event logs", LOGS, &parameters, read).await?;
        let last = read.last().map(|(id, _)| *id);
        let payloads = read.iter().filter_map(|(_, payload)| payload.as_deref());
        let events = payloads.filter_map(from_event_log).collect();
        Ok((events, last))
    }

    async fn answers(&self) -> Result<(Vec<Row>, Option<i64>), TicketError> {
        let parameters = [self.after.into(), PAGE.into()];
        let read = self.read("read answers", ANSWERS, &parameters, from_answer).await?;
        let last = read.last().map(|(seq, _)| *seq);
        Ok((read.into_iter().map(|(_, row)| row).collect(), last))
    }

    async fn read<T>(
        &self,
        what: &str,
        sql: &'static str,
        parameters: &[SqlValue<'_>],
        read: impl Fn(&SqlRow) -> Result<T, Error>,
    ) -> Result<Vec<T>, TicketError> {
        let mut connection = self.store.read_connection().await?;
        let rows = statements::list(connection.connection(), what, sql, parameters, read).await;
        connection.release().await;
        rows
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

/// An answer and its sequence number.
fn from_answer(row: &SqlRow) -> Result<(i64, Row), Error> {
    let run: Option<String> = row.get(6)?;
    let run = run.as_deref().and_then(|run| serde_json::from_str::<RunMetrics>(run).ok());
    let answer = Row {
        entry: None,
        event_type: TicketEventType::AiResponseGenerated.as_str().to_owned(),
        ticket_id: row.get(2)?,
        message_id: Some(row.get(1)?),
        user_id: row.get(3)?,
        content: Some(row.get(4)?),
        occurred_at: from_ms(row.get(5)?),
        run: run.unwrap_or_default(),
    };
    Ok((row.get(0)?, answer))
}
