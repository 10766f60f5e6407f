//! Explains why an issue or a ticket has no answer: every step from the inbox to the delivery of the reply.
//!
//! Upstream: `issues.rs` and `tickets.rs`. Downstream: `headwater_issue::IssueDiagnosis` for the steps of every handler;
//! this file adds those of the desk: model, budget and hand-over. Guarantees: read-only; the answer names the command
//! that helps.

use headwater_issue::{
    DiagnosisReason, IssueDiagnosis, IssueError, IssueFacts, IssueId, ProcessingStatus,
};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::desk::effects::Effect;
use crate::http::ApiError;
use crate::server::app_state::App;
use crate::text::counted;
use crate::tickets::effects::EffectFilter;
use crate::tickets::{TicketError, TicketStatus};

/// Newest tool calls that are shown.
const SHOWN_EFFECTS: usize = 5;

/// Why an issue has no answer yet.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct WhyResponse {
    issue_id: i64,
    /// `idle`, `handed_over`, `claimed`, `worker_dead`, `claim_ran_out`, `quarantined`, `no_worker`, `waiting`,
    /// `deferred`, `retrying`, `queued`, `reply_dead`, `reply_waiting`, `draft` or `closed`.
    reason: &'static str,
    /// Explanation with the next step.
    sentence: String,
    /// The command that helps, or that shows more.
    command: String,
    pending_events: u64,
    /// How long its oldest event has been waiting.
    waiting_ms: Option<u64>,
    /// The way from the event to the reply.
    steps: Vec<WhyStep>,
}

/// One step from the event to the reply.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct WhyStep {
    /// Of an issue `inbox`, `wait`, `claim`, `run`, `model`, `tools`, `hand_over` or `outbox`; of an outbox row `commit`,
    /// `delivery` or `state`.
    pub(super) step: &'static str,
    /// What happened there.
    pub(super) found: String,
}

/// What the desk stores in the fields of an issue.
struct HandOver {
    reason: Option<String>,
}

impl HandOver {
    fn of(facts: &IssueFacts) -> Option<Self> {
        let fields: Value = serde_json::from_str(&facts.issue.fields).unwrap_or_default();
        let reason = fields["hand_over_reason"].as_str().map(str::to_owned);
        (fields["handed_over"] == true).then_some(Self { reason })
    }
}

/// Explains an issue.
pub(crate) async fn of_issue(app: &App, issue_id: IssueId) -> Result<WhyResponse, ApiError> {
    let facts = app.store.issue_facts(issue_id).await?;
    let facts = facts.ok_or_else(|| IssueError::NotFound { what: format!("issue {issue_id}") })?;
    let diagnosis = IssueDiagnosis::from_facts(&facts);
    let hand_over = HandOver::of(&facts);
    let steps = steps(app, &facts, &diagnosis, hand_over.as_ref()).await?;
    let mut why = WhyResponse {
        issue_id: issue_id.0,
        reason: reason(&diagnosis.reason),
        sentence: diagnosis.to_string(),
        command: diagnosis.command(),
        pending_events: diagnosis.pending_events,
        waiting_ms: diagnosis.waiting_for.and_then(|waited| u64::try_from(waited.as_millis()).ok()),
        steps,
    };
    if let (DiagnosisReason::Idle, Some(draft)) =
        (&diagnosis.reason, app.tickets.pending_draft(issue_id).await?)
    {
        let number = draft.number;
        let calls: Vec<&str> = draft.calls.iter().map(|call| call.tool.as_str()).collect();
        let what = match calls.is_empty() {
            true => format!("the answer to issue {issue_id} is draft {number}, which"),
            false => format!(
                "to answer issue {issue_id}, the model wants to call `{}`; draft {number}",
                calls.join("`, `")
            ),
        };
        why.reason = "draft";
        why.command = format!("headwater draft show {number}");
        why.sentence = format!(
            "{what} waits for the approval of a person since {}; \
             read it with `{}`, then run `headwater draft approve {number}` or `headwater draft reject {number}`",
            draft.created_at.to_rfc3339(),
            why.command
        );
        return Ok(why);
    }
    // Everything is processed and delivered: the desk has left the answer to a person.
    if let (DiagnosisReason::Idle, Some(hand_over)) = (&diagnosis.reason, &hand_over) {
        let is_ticket = facts.issue.provider == "desk";
        why.reason = "handed_over";
        why.command = match is_ticket {
            true => format!("headwater ticket reopen {}", facts.issue.external_issue_id),
            false => format!("headwater issue show {issue_id}"),
        };
        let because = hand_over.reason.as_ref().map_or(String::new(), |why| format!(" ({why})"));
        let next = match is_ticket {
            true => format!("to let the desk answer again, run `{}`", why.command),
            false => format!(
                "reopen it at its provider to let the desk answer again; `{}` shows its events",
                why.command
            ),
        };
        why.sentence = format!(
            "issue {issue_id} was handed over to a person{because}, who answers it; {next}"
        );
    }
    Ok(why)
}

/// Explains a ticket.
pub(crate) async fn of_ticket(app: &App, ticket_id: Uuid) -> Result<WhyResponse, ApiError> {
    let ticket = app.tickets.ticket(ticket_id).await?.ok_or(TicketError::NotFound(ticket_id))?;
    let mut why = of_issue(app, ticket.issue_id).await?;
    if ticket.handed_over {
        let reason = ticket.hand_over_reason.as_deref().unwrap_or("a person answers");
        let since =
            ticket.handed_over_at.map_or(String::new(), |at| format!(" since {}", at.to_rfc3339()));
        let assigned = match &ticket.assignee {
            Some(assignee) => format!("assigned to {assignee}"),
            None => format!("assigned to nobody; `headwater ticket take {ticket_id}` takes it"),
        };
        let found = format!("{reason}{since}, {assigned}");
        match why.steps.iter_mut().find(|step| step.step == "hand_over") {
            Some(step) => step.found = found,
            None => why.steps.push(WhyStep { step: "hand_over", found }),
        }
    }
    // An agent takes a ticket over without a run of the desk.
    if ticket.handed_over && why.reason == "idle" {
        why.reason = "handed_over";
        why.command = format!("headwater ticket reopen {ticket_id}");
        why.sentence = format!(
            "ticket {ticket_id} was taken over by a person; to let the desk answer again, run `{}`",
            why.command
        );
    }
    if ticket.status == TicketStatus::Closed && why.reason == "idle" {
        why.reason = "closed";
        why.command = format!("headwater ticket reopen {ticket_id}");
        why.sentence = format!(
            "ticket {ticket_id} is closed, and every message in it is processed; to reopen it, run `{}`",
            why.command
        );
    }
    Ok(why)
}

fn reason(reason: &DiagnosisReason) -> &'static str {
    match reason {
        DiagnosisReason::Idle => "idle",
        DiagnosisReason::Claimed { owner_alive: false, .. } => "worker_dead",
        DiagnosisReason::Claimed { .. } => "claimed",
        DiagnosisReason::ClaimExpired { .. } => "claim_ran_out",
        DiagnosisReason::Quarantined { .. } => "quarantined",
        DiagnosisReason::NoWorker => "no_worker",
        DiagnosisReason::Waiting { error: None, .. } => "waiting",
        DiagnosisReason::Waiting { attempts: 0, .. } => "deferred",
        DiagnosisReason::Waiting { .. } => "retrying",
        DiagnosisReason::Queued { .. } => "queued",
        DiagnosisReason::DeliveryDead { .. } => "reply_dead",
        DiagnosisReason::DeliveryWaiting { .. } => "reply_waiting",
        _ => "other",
    }
}

async fn steps(
    app: &App,
    facts: &IssueFacts,
    diagnosis: &IssueDiagnosis,
    hand_over: Option<&HandOver>,
) -> Result<Vec<WhyStep>, ApiError> {
    let issue = &facts.issue;
    let mut steps = Vec::new();
    let mut add = |step, found| steps.push(WhyStep { step, found });
    let oldest = facts
        .oldest_pending_at
        .map_or(String::new(), |at| format!(", the oldest since {}", at.to_rfc3339()));
    let pending = counted(issue.pending_events, "event", "events");
    add("inbox", format!("{pending} pending{oldest}"));
    if let DiagnosisReason::Waiting { not_before, error, .. } = &diagnosis.reason {
        let why = match error {
            None => "for further events".to_owned(),
            Some(error) => format!("because of: {error}"),
        };
        add("wait", format!("until {} {why}", not_before.to_rfc3339()));
    }
    let claim = match (issue.status, &issue.claim_owner) {
        (ProcessingStatus::Processing, Some(owner)) => {
            let seen = facts.owner_seen_at.map(|seen| facts.now.since(seen).as_secs());
            let seen = seen.map_or("unknown".to_owned(), |age| format!("{age} s ago"));
            let state = if facts.owner_alive { "alive" } else { "dead" };
            format!("worker {owner} ({state}), last heartbeat {seen}")
        }
        _ => format!("no claim; {} alive", counted(facts.workers_alive, "worker", "workers")),
    };
    add("claim", claim);
    let last = issue.last_processed_at.map_or("never".to_owned(), |at| at.to_rfc3339());
    let mut run = format!("last completed: {last}");
    for (count, one, several) in [
        (issue.attempts, "failed attempt", "failed attempts"),
        (issue.crashes, "crashed worker", "crashed workers"),
        (issue.superseded, "run superseded by newer events", "runs superseded by newer events"),
    ] {
        if count > 0 {
            run.push_str(&format!(", {}", counted(count.into(), one, several)));
        }
    }
    if let Some(error) = &issue.last_error {
        run.push_str(&format!("; last error: {error}"));
    }
    add("run", run);
    if let Some(last) = app.tickets.last_model_run(issue.id).await? {
        let (at, calls) = (
            last.at.to_rfc3339(),
            counted(u64::try_from(last.calls).unwrap_or(0), "call", "calls"),
        );
        let prompt = match last.prompt_version {
            0 => "the built-in prompt".to_owned(),
            version => format!("prompt version {version}"),
        };
        let found = format!("{}: last run at {at} {}, {calls}, {prompt}", last.model, last.result);
        add("model", found);
    }
    let filter = EffectFilter { issue_id: Some(issue.id.0), ..EffectFilter::default() };
    let effects = app.tickets.effects(&filter, SHOWN_EFFECTS).await?;
    if !effects.is_empty() {
        let one = |effect: &Effect| {
            let (number, tool) = (effect.number, &effect.call.tool);
            let problem = effect.problem.as_ref();
            let problem = problem.map_or(String::new(), |problem| format!(" ({problem})"));
            format!("{tool} {}{problem}, effect {number}", effect.status.as_str())
        };
        add("tools", effects.iter().map(one).collect::<Vec<_>>().join("; "));
    }
    if let Some(HandOver { reason }) = hand_over {
        add("hand_over", reason.clone().unwrap_or_else(|| "a person answers".to_owned()));
    }
    let delivered = facts.reply_delivered_at.map_or("never".to_owned(), |at| at.to_rfc3339());
    let mut outbox = format!("last reply delivered: {delivered}");
    for row in &facts.undelivered {
        let state = if row.is_dead { "dead" } else { "waiting" };
        let error = row.error.as_ref().map_or(String::new(), |error| format!(": {error}"));
        outbox.push_str(&format!(
            "; row {} ({}) {state} after {}{error}",
            row.id,
            row.kind.as_str(),
            counted(row.attempts.into(), "attempt", "attempts")
        ));
    }
    add("outbox", outbox);
    Ok(steps)
}
