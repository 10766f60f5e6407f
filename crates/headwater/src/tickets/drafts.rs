//! Drafts and notes in SQL, and the decisions of people about them.
//!
//! Upstream: `outbound` stores the drafts that runs have committed; routes decide about them; a run asks what became of
//! the draft before it. Downstream: the table `drafts`, and the outbox for approved texts.
//!
//! Guarantees: a text leaves only through the outbox row that the transaction of its approval writes, so a crash leaves
//! either both or none. Each draft is decided about once. With an event that its run has not seen it is outdated and can
//! not be approved; both take the lock of the issue, so there is no moment in between. Storing a draft twice changes
//! nothing; storing it the first time reports it (`desk_events`). The calls that a draft names are written to the effect
//! ledger with its approval, and made by the next run. Decisions are kept with their time, their author and both texts.

use async_trait::async_trait;
use headwater_issue::{
    DeliverError, IssueId, KeyedOutboxRow, NewEvent, OutboxRow, Recorded, SqlRow, StoreConnection,
    Transaction,
};
use headwater_stream::clock::Timestamp;
use sqlx::Error;
use uuid::Uuid;

use crate::desk::draft::{DECISION_SOURCE, DraftEffect, DraftLookup, DraftOutcome, DraftReply};
use crate::desk::effect_call;
use crate::desk::effects::{EffectStatus, PlannedCall};
use crate::desk::{DeskReply, ReplyTarget};
use crate::tickets::desk_events::{DeskEvent, DeskEventType, EventIssue, NamedDraft};
use crate::tickets::effects::{self, CallDecision};
use crate::tickets::sql::statements::{execute, from_ms, list, run_json};
use crate::tickets::store::{Tickets, now, retry_on_conflict};
use crate::tickets::ticket::{TicketError, checked_content};

/// A draft or a note, a row of `drafts`.
#[derive(Clone, Debug, PartialEq)]
pub struct Draft {
    /// Sequence number; grows.
    pub number: i64,
    /// Id of the message that it becomes.
    pub draft_id: Uuid,
    /// Its issue.
    pub issue_id: IssueId,
    /// The integration of the issue.
    pub integration: String,
    /// Project id at the provider.
    pub external_project_id: String,
    /// Issue id at the provider.
    pub external_issue_id: String,
    /// What can be done with it.
    pub status: DraftStatus,
    /// The text of the model.
    pub content: String,
    /// The text of a person, which is posted instead.
    pub edited: Option<String>,
    /// The text that was posted.
    pub posted: Option<String>,
    /// What else an approval does.
    pub effects: Vec<DraftEffect>,
    /// Tool calls that an approval makes. Then the text is not posted.
    pub calls: Vec<PlannedCall>,
    /// Session of the run.
    pub session_id: Option<String>,
    /// What chose the mode.
    pub chosen_by: String,
    /// Grows with each edit.
    pub version: i64,
    /// When it was stored.
    pub created_at: Timestamp,
    /// When it was approved, rejected or found outdated.
    pub decided_at: Option<Timestamp>,
    /// Who approved or rejected it.
    pub decided_by: Option<String>,
    /// Why it was rejected.
    pub decision_reason: Option<String>,
    /// When it was found to wait longer than `desk.draft_max_wait`.
    pub overdue_at: Option<Timestamp>,
    run: Option<String>,
    up_to: i64,
}

/// Status of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftStatus {
    /// It waits for a decision.
    Pending,
    /// It was approved.
    Approved,
    /// It was rejected.
    Rejected,
    /// Newer events came before a decision.
    Outdated,
    /// It is a note.
    Note,
}

impl DraftStatus {
    /// The name in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Approved => "approved",
            Self::Rejected => "rejected",
            Self::Outdated => "outdated",
            Self::Note => "note",
        }
    }

    /// Parses a name; `None` if it is unknown.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Pending, Self::Approved, Self::Rejected, Self::Outdated, Self::Note]
            .into_iter()
            .find(|one| one.as_str() == name)
    }
}

/// Which drafts to list, newest first.
#[derive(Clone, Debug, Default)]
pub struct DraftFilter {
    /// Only those with this status.
    pub status: Option<DraftStatus>,
    /// Only those of this integration.
    pub integration: Option<String>,
    /// Only those of one of these integrations.
    pub integrations: Option<Vec<String>>,
    /// Only those of this issue.
    pub issue_id: Option<i64>,
    /// Only those with a smaller number: the last one of the previous page.
    pub before: Option<i64>,
}

/// A decision about a draft.
#[derive(Clone, Debug)]
pub enum DraftDecision {
    /// Post it, or this text instead.
    Approve {
        /// The text to post. Default: the edited one, or that of the model.
        content: Option<String>,
    },
    /// Do not post it.
    Reject {
        /// Why; the model sees it in the next run.
        reason: Option<String>,
    },
    /// Replace its text.
    Edit {
        /// The new text.
        content: String,
    },
}

/// Result of a decision.
#[derive(Clone, Debug, PartialEq)]
pub struct DecidedDraft {
    /// The draft after it.
    pub draft: Draft,
    /// False if the same decision was made before.
    pub changed: bool,
}

/// Why a decision was refused. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DraftError {
    /// There is no such draft.
    #[error("there is no draft {0}; `headwater draft list` shows all")]
    NotFound(i64),
    /// Newer events came.
    #[error(
        "draft {0} is outdated: its issue has newer events, which the draft does not answer; a new draft follows"
    )]
    Outdated(i64),
    /// Another decision was made, or the text was edited.
    #[error("draft {number} {problem}")]
    Conflict {
        /// The draft.
        number: i64,
        /// What happened to it.
        problem: String,
    },
    /// The text is invalid, or the database failed.
    #[error(transparent)]
    Ticket(#[from] TicketError),
}

impl Draft {
    /// An event about this draft.
    pub(super) fn event(&self, event_type: DeskEventType) -> DeskEvent {
        let Self { number: id, draft_id, version, .. } = *self;
        let draft = Some(NamedDraft { id, draft_id, version });
        DeskEvent { draft, ..DeskEvent::new(event_type, self.event_issue(), now()) }
    }

    /// Its issue.
    pub(super) fn event_issue(&self) -> EventIssue<'_> {
        EventIssue {
            id: self.issue_id,
            integration: &self.integration,
            external_project_id: &self.external_project_id,
            external_issue_id: &self.external_issue_id,
        }
    }
}

const SELECT: &str = "SELECT d.number, d.draft_id, d.issue_id, d.integration, i.external_project_id, i.external_issue_id,
         CASE WHEN d.status = 'pending' AND EXISTS (
             SELECT 1 FROM event_logs e WHERE e.issue_id = d.issue_id AND e.id > d.up_to) THEN 'outdated' ELSE d.status END,
         d.content, d.edited, d.posted, d.effects, d.session_id, d.chosen_by, d.version, d.created_at, d.decided_at,
         d.decided_by, d.decision_reason, d.run, d.up_to, d.overdue_at, d.calls
     FROM drafts d JOIN issues i ON i.id = d.issue_id
     WHERE ($1::bigint IS NULL OR d.number = $1) AND d.number < $2 AND ($3::text IS NULL OR d.integration = $3)
         AND ($4::bigint IS NULL OR d.issue_id = $4)
         AND ($7::text IS NULL OR d.integration IN (SELECT value FROM headwater_each($7)))
         AND ($5::text IS NULL OR $5 = CASE WHEN d.status = 'pending' AND EXISTS (
             SELECT 1 FROM event_logs e WHERE e.issue_id = d.issue_id AND e.id > d.up_to) THEN 'outdated' ELSE d.status END)
     ORDER BY d.number DESC LIMIT $6";

fn read_draft(row: &SqlRow) -> Result<Draft, Error> {
    let (draft_id, status, effects) =
        (row.get::<String>(1)?, row.get::<String>(6)?, row.get::<String>(10)?);
    let invalid =
        |what: &str| Error::Decode(format!("invalid {what} in the table `drafts`").into());
    let calls = row.get::<Option<String>>(21)?;
    let calls = calls.map(|calls| serde_json::from_str(&calls)).transpose();
    Ok(Draft {
        number: row.get(0)?,
        draft_id: Uuid::parse_str(&draft_id).map_err(|_| invalid("draft_id"))?,
        issue_id: IssueId(row.get(2)?),
        integration: row.get(3)?,
        external_project_id: row.get(4)?,
        external_issue_id: row.get(5)?,
        status: DraftStatus::parse(&status).ok_or_else(|| invalid("status"))?,
        content: row.get(7)?,
        edited: row.get(8)?,
        posted: row.get(9)?,
        effects: serde_json::from_str(&effects).map_err(|_| invalid("effects"))?,
        calls: calls.map_err(|_| invalid("calls"))?.unwrap_or_default(),
        session_id: row.get(11)?,
        chosen_by: row.get(12)?,
        version: row.get(13)?,
        created_at: from_ms(row.get(14)?),
        decided_at: row.get::<Option<i64>>(15)?.map(from_ms),
        decided_by: row.get(16)?,
        decision_reason: row.get(17)?,
        run: row.get(18)?,
        up_to: row.get(19)?,
        overdue_at: row.get::<Option<i64>>(20)?.map(from_ms),
    })
}

pub(super) async fn select(
    connection: StoreConnection<'_>,
    number: Option<i64>,
    filter: &DraftFilter,
    limit: i64,
) -> Result<Vec<Draft>, TicketError> {
    let integrations = filter.integrations.as_ref();
    let integrations = integrations.map(|all| serde_json::to_string(all).expect("texts are JSON"));
    let parameters = [
        number.into(),
        filter.before.unwrap_or(i64::MAX).into(),
        filter.integration.as_deref().into(),
        filter.issue_id.into(),
        filter.status.map(DraftStatus::as_str).into(),
        limit.into(),
        integrations.as_deref().into(),
    ];
    list(connection, "drafts", SELECT, &parameters, read_draft).await
}

/// Drafts of an issue that wait for a decision get outdated by one for newer events. An operator may retry the row of an
/// older draft: it does not outdate a newer one.
const OUTDATE_OTHERS: &str =
    "UPDATE drafts SET status = 'outdated', decided_at = headwater_ms(headwater_now())
     WHERE issue_id = $1 AND draft_id <> $2 AND status = 'pending' AND up_to <= $3";

/// A draft gets outdated if it waits for a decision and its issue has newer events.
const OUTDATE: &str =
    "UPDATE drafts SET status = 'outdated', decided_at = headwater_ms(headwater_now())
     WHERE draft_id = $1 AND status = 'pending' AND EXISTS (
         SELECT 1 FROM event_logs e WHERE e.issue_id = drafts.issue_id AND e.id > drafts.up_to)";

impl Tickets {
    /// At most `limit` drafts, newest first.
    pub async fn drafts(
        &self,
        filter: &DraftFilter,
        limit: usize,
    ) -> Result<Vec<Draft>, TicketError> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.read(async |connection| select(connection, None, filter, limit).await).await
    }

    /// A draft, if it exists.
    pub async fn draft(&self, number: i64) -> Result<Option<Draft>, TicketError> {
        let filter = DraftFilter::default();
        let found =
            self.read(async |connection| select(connection, Some(number), &filter, 1).await);
        Ok(found.await?.pop())
    }

    /// Stores a draft or note that a run has committed. Idempotent. The deliverer has discarded those that were stale when
    /// they were committed.
    pub(super) async fn store_draft(
        &self,
        row: &OutboxRow,
        target: ReplyTarget,
    ) -> Result<(), DeliverError> {
        let payload: DraftReply = serde_json::from_str(&row.payload)
            .map_err(|error| DeliverError::Dead(format!("the payload is not a draft: {error}")))?;
        let (Some(draft_id), Some(_)) = (payload.reply.message_id, payload.reply.up_to) else {
            let problem = "the payload is not a draft: `message_id` and `up_to` are required";
            return Err(DeliverError::Dead(problem.to_owned()));
        };
        let stored =
            retry_on_conflict(|| self.store_draft_once(row, target, draft_id, &payload)).await;
        stored.map_err(|error| match error {
            error if error.is_transient() => DeliverError::Unavailable(error.to_string()),
            error => DeliverError::Dead(error.to_string()),
        })
    }

    async fn store_draft_once(
        &self,
        row: &OutboxRow,
        target: ReplyTarget,
        draft_id: Uuid,
        payload: &DraftReply,
    ) -> Result<(), TicketError> {
        let insert = "INSERT INTO drafts
                 (draft_id, issue_id, integration, status, content, effects, session_id, chosen_by, run, up_to, calls, created_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, headwater_ms(headwater_now()))
             ON CONFLICT (draft_id) DO NOTHING RETURNING number";
        let status = match target {
            ReplyTarget::Note => DraftStatus::Note,
            _ => DraftStatus::Pending,
        };
        let (id, reply) = (draft_id.to_string(), &payload.reply);
        let effects = serde_json::to_string(&payload.effects).expect("texts are JSON");
        let calls = (!payload.calls.is_empty()).then_some(&payload.calls);
        let calls = calls.map(|calls| serde_json::to_string(calls).expect("calls are JSON"));
        let run = run_json(&reply.run);
        let up_to = reply.up_to.unwrap_or_default();
        let parameters = [
            (&id).into(),
            row.issue_id.0.into(),
            (&row.integration).into(),
            status.as_str().into(),
            (&reply.content).into(),
            (&effects).into(),
            reply.session_id.as_deref().into(),
            (&payload.chosen_by).into(),
            run.as_deref().into(),
            up_to.into(),
            calls.as_deref().into(),
        ];
        let mut transaction = self.store.begin().await?;
        lock_issue(transaction.as_mut(), row.issue_id).await?;
        let read = |row: &SqlRow| row.get::<i64>(0);
        let stored =
            list(transaction.connection(), "store_draft", insert, &parameters, read).await?;
        let others = [row.issue_id.0.into(), (&id).into(), up_to.into()];
        execute(transaction.connection(), "store_draft", OUTDATE_OTHERS, &others).await?;
        execute(transaction.connection(), "store_draft", OUTDATE, &[(&id).into()]).await?;
        // A row that is delivered again stores nothing, and reports nothing.
        if let Some(number) = stored.first() {
            let filter = DraftFilter::default();
            let draft = select(transaction.connection(), Some(*number), &filter, 1).await?.pop();
            if let Some(draft) = draft.filter(|draft| draft.status == DraftStatus::Pending) {
                let event = draft.event(DeskEventType::DraftWaiting);
                event.write(transaction.as_mut()).await?;
            }
        }
        Ok(transaction.commit().await?)
    }

    /// Decides about a draft. `version`, if given, is the version of the draft that the person has seen. Repeating an
    /// approval or a rejection changes nothing.
    pub async fn decide_draft(
        &self,
        number: i64,
        decision: DraftDecision,
        version: Option<i64>,
        by: &str,
    ) -> Result<DecidedDraft, DraftError> {
        let decision = checked(decision)?;
        retry_on_conflict(|| self.decide_draft_once(number, &decision, version, by)).await?
    }

    async fn decide_draft_once(
        &self,
        number: i64,
        decision: &DraftDecision,
        version: Option<i64>,
        by: &str,
    ) -> Result<Result<DecidedDraft, DraftError>, TicketError> {
        let Some(draft) = self.draft(number).await? else {
            return Ok(Err(DraftError::NotFound(number)));
        };
        let mut transaction = self.store.begin().await?;
        // No event of the issue can be recorded until the commit.
        lock_issue(transaction.as_mut(), draft.issue_id).await?;
        let filter = DraftFilter::default();
        let draft = select(transaction.connection(), Some(number), &filter, 1).await?.pop();
        let Some(draft) = draft else { return Ok(Err(DraftError::NotFound(number))) };
        let conflict = |problem: &str| {
            let problem = problem.to_owned();
            Ok(Err(DraftError::Conflict { number, problem }))
        };
        match (draft.status, decision) {
            (DraftStatus::Approved, DraftDecision::Approve { content })
                if content.is_none() || *content == draft.posted =>
            {
                return Ok(Ok(DecidedDraft { draft, changed: false }));
            }
            (DraftStatus::Rejected, DraftDecision::Reject { .. }) => {
                return Ok(Ok(DecidedDraft { draft, changed: false }));
            }
            (DraftStatus::Approved, _) => return conflict("was approved before"),
            (DraftStatus::Rejected, _) => return conflict("was rejected before"),
            (DraftStatus::Note, _) => {
                return conflict("is an internal note, which is never posted");
            }
            (DraftStatus::Outdated, _) => return Ok(Err(DraftError::Outdated(number))),
            (DraftStatus::Pending, _) => {}
        }
        if version.is_some_and(|seen| seen != draft.version) {
            return conflict("was edited since; read it again");
        }
        if !draft.calls.is_empty() {
            if matches!(
                decision,
                DraftDecision::Edit { .. } | DraftDecision::Approve { content: Some(_) }
            ) {
                return conflict(
                    "names tool calls, and its text is not posted; approve or reject it",
                );
            }
            let recorded = self.decide_calls(transaction.as_mut(), &draft, decision, by).await?;
            let draft = select(transaction.connection(), Some(number), &filter, 1).await?.pop();
            self.commit_event(transaction, &recorded).await?;
            return Ok(draft
                .map(|draft| DecidedDraft { draft, changed: true })
                .ok_or(DraftError::NotFound(number)));
        }
        match decision {
            DraftDecision::Approve { content } => {
                let text = content.as_ref().or(draft.edited.as_ref()).unwrap_or(&draft.content);
                transaction.write_outbox(draft.issue_id, &approved_rows(&draft, text)).await?;
                set_decision(
                    transaction.as_mut(),
                    number,
                    (DraftStatus::Approved, Some(text), None),
                    by,
                )
                .await?;
            }
            DraftDecision::Reject { reason } => {
                let rejected = (DraftStatus::Rejected, None, reason.as_ref());
                set_decision(transaction.as_mut(), number, rejected, by).await?;
            }
            DraftDecision::Edit { content } => {
                let update =
                    "UPDATE drafts SET edited = $2, version = version + 1 WHERE number = $1";
                let parameters = [number.into(), content.into()];
                execute(transaction.connection(), "edit draft", update, &parameters).await?;
            }
        }
        let draft = select(transaction.connection(), Some(number), &filter, 1).await?.pop();
        transaction.commit().await?;
        Ok(draft
            .map(|draft| DecidedDraft { draft, changed: true })
            .ok_or(DraftError::NotFound(number)))
    }

    /// Writes the calls of a draft to the effect ledger, and an event that starts the run which makes them, or learns why
    /// they were rejected.
    async fn decide_calls(
        &self,
        transaction: &mut dyn Transaction,
        draft: &Draft,
        decision: &DraftDecision,
        by: &str,
    ) -> Result<Recorded, TicketError> {
        let reason = match decision {
            DraftDecision::Reject { reason } => Some(reason.as_ref()),
            _ => None,
        };
        let told = reason.map(|reason| effect_call::rejection(reason.map(String::as_str)));
        let (status, of_draft, event_type) = match reason {
            Some(_) => (EffectStatus::Rejected, DraftStatus::Rejected, "tool_calls_rejected"),
            None => (EffectStatus::Approved, DraftStatus::Approved, "tool_calls_approved"),
        };
        for call in &draft.calls {
            let (result, draft_number) = (told.as_deref(), draft.number);
            let decision = CallDecision { status, result, draft: draft_number, by };
            let of = (draft.issue_id, draft.integration.as_str());
            effects::insert(transaction.connection(), of, call, Some(decision)).await?;
        }
        let decided = (of_draft, None, reason.flatten());
        set_decision(transaction, draft.number, decided, by).await?;
        let event = NewEvent {
            external_project_id: draft.external_project_id.clone(),
            source: DECISION_SOURCE.to_owned(),
            dedup_key: Some(format!("draft:{}", draft.draft_id)),
            ..NewEvent::new(
                &draft.integration,
                &draft.external_issue_id,
                event_type,
                serde_json::json!({"draft": draft.number, "by": by}).to_string(),
            )
        };
        self.record_event(transaction, event).await
    }

    /// The draft of an issue that waits for a decision.
    pub(crate) async fn pending_draft(
        &self,
        issue_id: IssueId,
    ) -> Result<Option<Draft>, TicketError> {
        let (status, issue_id) = (Some(DraftStatus::Pending), Some(issue_id.0));
        let filter = DraftFilter { status, issue_id, ..DraftFilter::default() };
        Ok(self.drafts(&filter, 1).await?.pop())
    }

    async fn outcome_of_draft(
        &self,
        issue_id: IssueId,
        draft: Uuid,
    ) -> Result<DraftOutcome, TicketError> {
        // Its issue has newer events, so no approval can be under way that is not committed after this lock.
        let outdate =
            "UPDATE drafts SET status = 'outdated', decided_at = headwater_ms(headwater_now())
             WHERE draft_id = $1 AND status = 'pending'";
        let read = "SELECT status, posted, decision_reason, calls FROM drafts WHERE draft_id = $1";
        let id = draft.to_string();
        let mut transaction = self.store.begin().await?;
        lock_issue(transaction.as_mut(), issue_id).await?;
        execute(transaction.connection(), "outdate draft", outdate, &[(&id).into()]).await?;
        let parameters = [(&id).into()];
        let found = list(transaction.connection(), "draft outcome", read, &parameters, |row| {
            Ok((
                row.get::<String>(0)?,
                row.get::<Option<String>>(1)?,
                row.get::<Option<String>>(2)?,
                row.get::<Option<String>>(3)?,
            ))
        });
        let found = found.await?.pop();
        transaction.commit().await?;
        Ok(match found {
            Some((status, .., Some(_))) if status == "approved" || status == "rejected" => {
                DraftOutcome::CallsDecided
            }
            Some((status, Some(posted), ..)) if status == "approved" => DraftOutcome::Sent(posted),
            Some((status, _, reason, _)) if status == "rejected" => DraftOutcome::Rejected(reason),
            // Without a row, the draft is still in the outbox, and is outdated when it is stored.
            _ => DraftOutcome::Outdated,
        })
    }
}

#[async_trait]
impl DraftLookup for Tickets {
    async fn draft_outcome(&self, issue_id: IssueId, draft: Uuid) -> Result<DraftOutcome, String> {
        let found = retry_on_conflict(|| self.outcome_of_draft(issue_id, draft)).await;
        found.map_err(|error| error.to_string())
    }
}

/// Locks an issue until the end of the transaction, as recording an event does.
pub(super) async fn lock_issue(
    transaction: &mut dyn Transaction,
    issue_id: IssueId,
) -> Result<(), TicketError> {
    let lock = "SELECT id FROM issues WHERE id = $1 FOR UPDATE";
    let read = |row: &SqlRow| row.get::<i64>(0);
    list(transaction.connection(), "lock issue", lock, &[issue_id.0.into()], read).await.map(drop)
}

async fn set_decision(
    transaction: &mut dyn Transaction,
    number: i64,
    (status, posted, reason): (DraftStatus, Option<&String>, Option<&String>),
    by: &str,
) -> Result<(), TicketError> {
    let update =
        "UPDATE drafts SET status = $2, posted = $3, decision_reason = $4, decided_by = $5,
             decided_at = headwater_ms(headwater_now()) WHERE number = $1";
    let text = |text: Option<&String>| text.cloned();
    let (posted, reason) = (text(posted), text(reason));
    let parameters = [
        number.into(),
        status.as_str().into(),
        posted.as_deref().into(),
        reason.as_deref().into(),
        by.into(),
    ];
    execute(transaction.connection(), "decide draft", update, &parameters).await
}

/// The outbox rows of an approved draft. Their keys are those of the draft, so that it is posted once.
fn approved_rows(draft: &Draft, text: &str) -> Vec<KeyedOutboxRow> {
    let run = draft.run.as_deref().and_then(|run| serde_json::from_str(run).ok());
    let answer = DeskReply {
        content: text.to_owned(),
        message_id: Some(draft.draft_id),
        session_id: draft.session_id.clone(),
        // No newer event can come before the commit of the approval.
        up_to: None,
        run: run.unwrap_or_default(),
    };
    let key = format!("draft:{}", draft.draft_id);
    let effects = draft.effects.iter().filter_map(|effect| {
        let reply = DeskReply {
            content: effect.reason.clone(),
            message_id: None,
            up_to: Some(draft.up_to),
            run: Default::default(),
            ..answer.clone()
        };
        let row = reply.into_row(ReplyTarget::parse(&effect.target)?);
        Some(KeyedOutboxRow { key: format!("{key}:{}", effect.target), row })
    });
    let mut effects: Vec<_> = effects.collect();
    let handed_over = ReplyTarget::HandOver.as_str();
    let hands_over = draft.effects.iter().find(|effect| effect.target == handed_over);
    effects.extend(hands_over.map(|effect| {
        let reason = effect.internal.as_ref().unwrap_or(&effect.reason);
        DeskEvent::handed_over(draft.event_issue(), reason, now()).keyed_row()
    }));
    let answer = KeyedOutboxRow { key, row: answer.into_row(ReplyTarget::Answer) };
    std::iter::once(answer).chain(effects).collect()
}

/// Maximum bytes of the reason of a rejection.
const REASON_BYTES_MAX: usize = 2000;

/// Cleans the texts of a decision, and rejects those that are empty or too long.
fn checked(decision: DraftDecision) -> Result<DraftDecision, TicketError> {
    Ok(match decision {
        DraftDecision::Approve { content } => DraftDecision::Approve {
            content: content.map(|text| checked_content(&text)).transpose()?,
        },
        DraftDecision::Edit { content } => {
            DraftDecision::Edit { content: checked_content(&content)? }
        }
        DraftDecision::Reject { reason } => {
            let reason = reason.map(|reason| crate::text::cleaned(&reason).trim().to_owned());
            let reason = reason.filter(|reason| !reason.is_empty());
            if reason.as_ref().is_some_and(|reason| reason.len() > REASON_BYTES_MAX) {
                let problem = format!("`reason` is longer than {REASON_BYTES_MAX} bytes");
                return Err(TicketError::Invalid(problem));
            }
            DraftDecision::Reject { reason }
        }
    })
}
