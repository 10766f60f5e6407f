//! Drafts that wait too long for a decision: they are reported once, and may hand their issue over.
//!
//! Upstream: a service of every process, each `sweep.every`. Downstream: the tables `drafts`, `tickets` and `issues`, and the
//! outbox. Guarantees: mark, report and hand-over are one transaction, so that each overdue draft is reported once, however many
//! processes look for it and whenever one dies. A draft that newer messages made outdated is not reported: another draft
//! follows. The draft still waits afterwards.

use std::time::Duration;

use headwater_issue::{SqlRow, Transaction};
use serde_json::{Value, json};

use crate::tickets::desk_events::{DeskEvent, DeskEventType};
use crate::tickets::drafts::{Draft, DraftFilter, DraftStatus, lock_issue, select};
use crate::tickets::sql::statements::{self, execute, list};
use crate::tickets::store::{Tickets, now, report_hand_over, retry_on_conflict};
use crate::tickets::ticket::TicketError;

/// Drafts that one pass reads.
const PASS_MAX: i64 = 100;

/// What happens to an overdue draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OverdueAction {
    /// It is reported.
    Notify,
    /// It is reported, and its issue is handed over to a person.
    HandOver,
}

/// Drafts whose time is over, oldest first. `$1` is the time in milliseconds.
const OVERDUE: &str = "SELECT number FROM drafts d
     WHERE d.status = 'pending' AND d.overdue_at IS NULL AND d.created_at <= headwater_ms(headwater_now()) - $1
         AND NOT EXISTS (SELECT 1 FROM event_logs e WHERE e.issue_id = d.issue_id AND e.id > d.up_to)
     ORDER BY d.created_at LIMIT $2";

impl Tickets {
    /// Reports the drafts that have waited longer than `max_wait`, at most [`PASS_MAX`]. Returns how many.
    pub(crate) async fn report_overdue_drafts(
        &self,
        max_wait: Duration,
        action: OverdueAction,
    ) -> Result<usize, TicketError> {
        let wait_ms = i64::try_from(max_wait.as_millis()).unwrap_or(i64::MAX);
        let parameters = [wait_ms.into(), PASS_MAX.into()];
        let read = |row: &SqlRow| row.get::<i64>(0);
        let found = self.read(async |connection| {
            list(connection, "overdue drafts", OVERDUE, &parameters, read).await
        });
        let mut reported = 0;
        for number in found.await? {
            let report = || self.report_overdue_once(number, max_wait, action);
            reported += usize::from(retry_on_conflict(report).await?);
        }
        Ok(reported)
    }

    /// Returns whether the draft was reported now.
    async fn report_overdue_once(
        &self,
        number: i64,
        max_wait: Duration,
        action: OverdueAction,
    ) -> Result<bool, TicketError> {
        let Some(draft) = self.draft(number).await? else { return Ok(false) };
        let mut transaction = self.store.begin().await?;
        // The ticket before the issue, as in every transaction.
        let connection = transaction.connection();
        let ticket = statements::lock_ticket_of(connection, draft.issue_id).await?;
        lock_issue(transaction.as_mut(), draft.issue_id).await?;
        // Neither a decision nor a newer message can come before the commit.
        let filter = DraftFilter::default();
        let draft = select(transaction.connection(), Some(number), &filter, 1).await?.pop();
        let is_waiting =
            |draft: &Draft| draft.status == DraftStatus::Pending && draft.overdue_at.is_none();
        let Some(draft) = draft.filter(is_waiting) else { return Ok(false) };
        let hands_over = action == OverdueAction::HandOver;
        let issue = issue_state(transaction.as_mut(), &draft).await?;
        if hands_over && !issue.is_idle {
            // A run would overwrite the hand-over. The next pass finds the draft again, unless the run outdates it.
            return Ok(false);
        }
        let mark = "UPDATE drafts SET overdue_at = headwater_ms(headwater_now()) WHERE number = $1";
        execute(transaction.connection(), "mark overdue draft", mark, &[number.into()]).await?;
        draft.event(DeskEventType::DraftOverdue).write(transaction.as_mut()).await?;
        let mut changed = None;
        if hands_over && !issue.is_handed_over() {
            let reason = format!("draft {number} waited for a decision longer than {max_wait:?}");
            hand_over_issue(transaction.as_mut(), &draft, issue.fields, &reason).await?;
            match ticket {
                Some(ticket) if ticket.handed_over => {}
                None => {
                    let event = DeskEvent::handed_over(draft.event_issue(), &reason, now());
                    event.write(transaction.as_mut()).await?;
                }
                Some(ticket) => {
                    let (id, status) = (ticket.ticket_id, ticket.status);
                    statements::change_ticket(transaction.connection(), id, status, true).await?;
                    let connection = transaction.connection();
                    statements::describe_hand_over(connection, id, &reason, None).await?;
                    report_hand_over(transaction.as_mut(), &ticket, &reason).await?;
                    changed = Some(id);
                }
            }
        }
        transaction.commit().await?;
        if let Some(ticket_id) = changed {
            self.notify_changed(ticket_id);
        }
        Ok(true)
    }
}

/// What the desk stores with an issue, and whether a run may be about to change it.
struct HandOverState {
    is_idle: bool,
    fields: Value,
}

impl HandOverState {
    fn is_handed_over(&self) -> bool {
        self.fields["handed_over"] == true
    }
}

async fn issue_state(
    transaction: &mut dyn Transaction,
    draft: &Draft,
) -> Result<HandOverState, TicketError> {
    let select = "SELECT processing_status, fields::text FROM issues WHERE id = $1";
    let read = |row: &SqlRow| Ok((row.get::<String>(0)?, row.get::<String>(1)?));
    let parameters = [draft.issue_id.0.into()];
    let found = list(transaction.connection(), "read issue", select, &parameters, read).await?;
    let (status, fields) = found.into_iter().next().unwrap_or_default();
    let fields = serde_json::from_str(&fields).unwrap_or_else(|_| json!({}));
    Ok(HandOverState { is_idle: status == "idle", fields })
}

/// Sets what the next run of the desk reads: it does not answer any more, until the issue is reopened.
async fn hand_over_issue(
    transaction: &mut dyn Transaction,
    draft: &Draft,
    mut fields: Value,
    reason: &str,
) -> Result<(), TicketError> {
    if !fields.is_object() {
        fields = json!({});
    }
    fields["handed_over"] = json!(true);
    fields["hand_over_reason"] = json!(reason);
    let update = "UPDATE issues SET fields = $2::text::jsonb WHERE id = $1";
    let fields = fields.to_string();
    let parameters = [draft.issue_id.0.into(), (&fields).into()];
    execute(transaction.connection(), "hand over issue", update, &parameters).await
}
