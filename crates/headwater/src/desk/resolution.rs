//! Builds the result of a run: the reply, draft or note, tool effects, conversation and issue fields.
//!
//! Upstream: `handler`, with the outcome of the model calls. Downstream: the worker commits the resolution; `outbound`
//! delivers its rows. No I/O. Guarantees: a hand-over is never stale; every other reply is, once there are newer events.

use headwater_analytics::RunMetrics;
use headwater_issue::{EventLogId, NewOutboxRow, Resolution, Run};
use serde_json::{Value as Json, json};
use uuid::Uuid;

use crate::desk::budget;
use crate::desk::conversation::{Conversation, ConversationEntry};
use crate::desk::draft::{DraftEffect, DraftReply};
use crate::desk::effect_call::UnresolvedCall;
use crate::desk::effects::{PlannedCall, ToldEffect};
use crate::desk::model::TokenUsage;
use crate::desk::policy::{AnswerContext, IntegrationPolicy, ReplyMode};
use crate::desk::reply::{DeskReply, HandOverReply, ReplyTarget};
use crate::desk::session::RunSession;
use crate::desk::tools::ToolEffect;
use crate::limits::{EFFECTS_PER_ISSUE_MAX, REPLY_BYTES_MAX};
use crate::text;
use crate::tickets::Author;
use crate::tickets::desk_events::{DeskEvent, EventIssue};

/// What others than the people of the support team are told about a hand-over because of a tool call.
const UNRESOLVED_REASON: &str = "a person has to check a tool call";

/// Bytes of a reason.
const REASON_BYTES_MAX: usize = 800;

/// Bytes of the facts of several tool calls in one reason. Further calls are named by their numbers.
const FACTS_BYTES_MAX: usize = 5 * REASON_BYTES_MAX;

/// The result of all model calls of a run.
#[derive(Debug, Default)]
pub(super) struct ModelOutcome {
    pub(super) text: String,
    pub(super) effects: Vec<ToolEffect>,
    /// Names of the tools that the model called.
    pub(super) tools: Vec<String>,
    /// Calls that wait for the approval of a person. Then nothing else of the outcome is used but its text.
    pub(super) planned: Vec<PlannedCall>,
    /// The calls because of which the issue is handed over.
    pub(super) unresolved: Vec<UnresolvedCall>,
    /// Id of the message that the text becomes; `None`: a new one.
    pub(super) message_id: Option<Uuid>,
    /// Sum over all model calls of the run, also those that failed.
    pub(super) usage: TokenUsage,
    /// What they cost, if prices are known.
    pub(super) cost: Option<f64>,
}

/// Events, tokens and cost of a run.
fn run_metrics(run: &Run, outcome: &ModelOutcome) -> RunMetrics {
    let usage = outcome.usage;
    let count = |number: u64| Some(u32::try_from(number).unwrap_or(u32::MAX));
    RunMetrics {
        events: count(run.events().len() as u64),
        tokens_in: count(usage.input_tokens),
        tokens_out: count(usage.output_tokens),
        cost: outcome.cost,
    }
}

/// Builds the resolution: reply, tool effects, conversation and issue fields.
pub(super) fn resolve(
    supersede_max: u32,
    run: &Run,
    conversation: &Conversation,
    outcome: ModelOutcome,
    session: &RunSession<'_>,
    policy: &IntegrationPolicy,
) -> Resolution {
    let content = text::cut(text::cleaned(&outcome.text).trim(), REPLY_BYTES_MAX).to_owned();
    let hands_over =
        outcome.effects.iter().any(|effect| matches!(effect, ToolEffect::HandOver { .. }));
    // After too many superseded runs the reply is sent even if it is stale, so that a busy issue gets an answer. A
    // hand-over is never stale: the desk does not answer after it.
    // A draft is outdated by every newer event.
    let (mode, chosen_by) = policy.choose_mode(&answer_context(conversation, &outcome.tools));
    let unless_stale =
        mode != ReplyMode::Auto || run.issue().superseded < supersede_max && !hands_over;
    let newest = run.events().last().map(|event| event.id).map(|EventLogId(id)| id);
    let session_id = Some(session.id().to_owned());
    let message_id = outcome.message_id;
    let row = |content: String, target, run| {
        let is_answer = target == ReplyTarget::Answer;
        let message_id = message_id.filter(|_| is_answer).or_else(|| Some(Uuid::now_v7()));
        let session_id = session_id.clone();
        let up_to = newest.filter(|_| unless_stale || target == ReplyTarget::HandOver);
        DeskReply { content, message_id, session_id, up_to, run }
    };
    let draft_id = (mode == ReplyMode::Draft).then(Uuid::now_v7);
    // The hand-over of a ticket is only seen by us; everything else needs the approval.
    let is_ticket = run.issue().provider == "desk";
    let hands_over_later = hands_over && mode == ReplyMode::Draft && !is_ticket;
    let run_metrics = run_metrics(run, &outcome);
    let answer = ConversationEntry {
        author: Author::Assistant,
        name: (mode == ReplyMode::Note).then(|| "internal note that was not sent".to_owned()),
        text: content.clone(),
        at: budget::now().to_rfc3339(),
        unless_stale,
        association: None,
        draft: draft_id,
        hands_over: hands_over_later,
        was_not_sent: mode == ReplyMode::Note,
    };
    let mut resolution = record_only(run, conversation, Some(&answer));
    let hand_over_reason = outcome.effects.iter().find_map(|effect| match effect {
        ToolEffect::HandOver { reason } => Some(reason.clone()),
        ToolEffect::Close { .. } => None,
    });
    // What was called stays known to the model until it has answered. A draft does that only when it is sent.
    let told = if hands_over_later { &[] } else { outcome.unresolved.as_slice() };
    let mut fields = issue_fields(conversation, !told.is_empty());
    fields["session_id"] = json!(session_id);
    fields["handed_over"] =
        json!((hands_over && !hands_over_later || conversation.handed_over).then_some(true));
    fields["hand_over_reason"] = json!(hand_over_reason.as_ref().filter(|_| !hands_over_later));
    if !told.is_empty() {
        fields["told_effects"] = json!(told_effects(conversation, told));
    }
    resolution.fields = Some(fields.to_string());
    // Not with the reply: events do not wait for a provider that rejects replies. A ticket reports it itself.
    if let Some(reason) = hand_over_reason.filter(|_| !hands_over_later && !is_ticket) {
        resolution.outbox.push(hand_over_event(run, &reason));
    }
    let nothing = RunMetrics::default();
    let public = (!outcome.unresolved.is_empty()).then(|| UNRESOLVED_REASON.to_owned());
    let public_of = |target| public.clone().filter(|_| target == ReplyTarget::HandOver);
    let effects = outcome.effects.into_iter().map(|effect| match effect {
        ToolEffect::HandOver { reason } => (ReplyTarget::HandOver, reason),
        ToolEffect::Close { reason } => (ReplyTarget::Close, reason),
    });
    let (now, later): (Vec<_>, Vec<_>) = effects.partition(|(target, _)| {
        mode == ReplyMode::Auto || is_ticket && *target == ReplyTarget::HandOver
    });
    let target = match mode {
        ReplyMode::Auto => ReplyTarget::Answer,
        ReplyMode::Draft => ReplyTarget::Draft,
        ReplyMode::Note => ReplyTarget::Note,
    };
    let answer = row(content, target, run_metrics);
    resolution.outbox.push(match mode {
        ReplyMode::Auto => answer.into_row(target),
        ReplyMode::Draft | ReplyMode::Note => {
            let message_id = draft_id.or(answer.message_id);
            let effect = |(target, reason): (ReplyTarget, String)| {
                DraftEffect::new(target, reason, public_of(target))
            };
            let effects = later.into_iter().map(effect).collect();
            let reply = DeskReply { message_id, up_to: newest, ..answer };
            DraftReply { reply, effects, chosen_by, calls: Vec::new() }.into_row(target)
        }
    });
    let effects = now.into_iter().map(|(target, reason)| match public_of(target) {
        Some(public) => {
            let reply = row(public, target, nothing);
            HandOverReply { reply, internal: Some(reason) }.into_row()
        }
        None => row(reason, target, nothing).into_row(target),
    });
    resolution.outbox.extend(effects);
    resolution
}

/// Builds the resolution of a run without an answer whose issue is handed over because of tool calls.
pub(super) fn resolve_unresolved(
    run: &Run,
    conversation: &Conversation,
    calls: &[UnresolvedCall],
    policy: &IntegrationPolicy,
) -> Resolution {
    let reason = facts_of(calls);
    let mut resolution = record_only(run, conversation, None);
    let mut fields = issue_fields(conversation, true);
    fields["handed_over"] = json!(true);
    fields["hand_over_reason"] = json!(reason);
    fields["told_effects"] = json!(told_effects(conversation, calls));
    resolution.fields = Some(fields.to_string());
    let is_ticket = run.issue().provider == "desk";
    if !is_ticket {
        resolution.outbox.push(hand_over_event(run, &reason));
    }
    // As with an answer: what others see needs an approval, if answers do.
    let (mode, _) = policy.choose_mode(&answer_context(conversation, &[]));
    if is_ticket || mode == ReplyMode::Auto {
        let reply = DeskReply {
            content: UNRESOLVED_REASON.to_owned(),
            message_id: Some(Uuid::now_v7()),
            session_id: None,
            up_to: run.events().last().map(|event| event.id).map(|EventLogId(id)| id),
            run: RunMetrics::default(),
        };
        resolution.outbox.push(HandOverReply { reply, internal: Some(reason) }.into_row());
    }
    resolution
}

/// Builds the resolution of a run that ends with planned calls: a draft that names them.
pub(super) fn resolve_planned(
    run: &Run,
    conversation: &Conversation,
    outcome: ModelOutcome,
    session: &RunSession<'_>,
) -> Resolution {
    let run_metrics = run_metrics(run, &outcome);
    let mut names: Vec<&str> = outcome.planned.iter().map(|call| call.tool.as_str()).collect();
    names.dedup();
    let names = names.join("`, `");
    let text = text::cut(text::cleaned(&outcome.text).trim(), REPLY_BYTES_MAX).to_owned();
    let content = match text.is_empty() {
        true => format!("The model wants to call `{names}`."),
        false => text,
    };
    let draft_id = Uuid::now_v7();
    let entry = ConversationEntry {
        author: Author::Assistant,
        name: None,
        text: content.clone(),
        at: budget::now().to_rfc3339(),
        unless_stale: true,
        association: None,
        draft: Some(draft_id),
        hands_over: false,
        was_not_sent: true,
    };
    let mut resolution = record_only(run, conversation, Some(&entry));
    let reply = DeskReply {
        content,
        message_id: Some(draft_id),
        session_id: Some(session.id().to_owned()),
        up_to: run.events().last().map(|event| event.id).map(|EventLogId(id)| id),
        run: run_metrics,
    };
    let chosen_by = format!("approval of `{names}`");
    let draft = DraftReply { reply, effects: Vec::new(), chosen_by, calls: outcome.planned };
    resolution.outbox.push(draft.into_row(ReplyTarget::Draft));
    resolution
}

impl ModelOutcome {
    pub(super) fn has_effect(&self, effect: &ToolEffect) -> bool {
        let same = |one: &ToolEffect| std::mem::discriminant(one) == std::mem::discriminant(effect);
        self.effects.iter().any(same)
    }

    /// The text, or a default text if the model only called a tool.
    pub(super) fn or_default_text(mut self) -> Self {
        if self.text.trim().is_empty() {
            let hands_over = |effect: &ToolEffect| matches!(effect, ToolEffect::HandOver { .. });
            self.text = match self.effects.iter().any(hands_over) {
                true => "A person will take over and answer you here.".to_owned(),
                false => "This ticket is now closed. Write again to open it.".to_owned(),
            };
        }
        self
    }

    /// A hand-over because the model gives no answer that can be sent.
    pub(super) fn no_answer(reason: String) -> Self {
        Self {
            text: "I cannot answer this. A person will take over and answer you here.".to_owned(),
            effects: vec![ToolEffect::HandOver {
                reason: text::one_line(&reason, REASON_BYTES_MAX),
            }],
            ..Self::default()
        }
    }

    /// A hand-over because a person has to look at tool calls.
    pub(super) fn unresolved(calls: Vec<UnresolvedCall>) -> Self {
        let effects = vec![ToolEffect::HandOver { reason: facts_of(&calls) }];
        Self { effects, unresolved: calls, ..Self::no_answer(String::new()) }
    }

    pub(super) fn budget_exceeded(tokens_max: u64) -> Self {
        Self {
            text:
                "I cannot answer more in this conversation. A person will take over and answer you here."
                    .to_owned(),
            effects: vec![ToolEffect::HandOver {
                reason: format!(
                    "the token budget of this issue is used up (`desk.issue_tokens_max` = {tokens_max})"
                ),
            }],
            ..Self::default()
        }
    }
}

/// What a person has to know about these calls, in one line. No call is left out: one without enough space for its facts is
/// named by its number.
fn facts_of(calls: &[UnresolvedCall]) -> String {
    let (mut reason, mut others) = (String::new(), Vec::new());
    if calls.len() > 1 {
        reason = format!("{} tool calls: ", calls.len());
    }
    for (index, call) in calls.iter().enumerate() {
        let facts = text::one_line(&call.facts, REASON_BYTES_MAX);
        if reason.len() + facts.len() > FACTS_BYTES_MAX {
            others.push(call.told.number.to_string());
            continue;
        }
        if index > 0 {
            reason.push_str(". Also: ");
        }
        reason.push_str(&facts);
    }
    if !others.is_empty() {
        let others = others.join(", ");
        reason.push_str(". Also the calls with these numbers, see `headwater effect show`: ");
        reason.push_str(&others);
    }
    reason
}

/// The calls that a person was told about, after this hand-over. Those with the lowest numbers are dropped over the limit: a
/// run does not read them any more.
fn told_effects(conversation: &Conversation, calls: &[UnresolvedCall]) -> Vec<ToldEffect> {
    let mut told: Vec<ToldEffect> = calls.iter().map(|call| call.told).collect();
    let is_new = |one: &&ToldEffect| calls.iter().all(|call| call.told.number != one.number);
    told.extend(conversation.told_effects.iter().filter(is_new));
    told.sort_by_key(|one| one.number);
    told.split_off(told.len().saturating_sub(EFFECTS_PER_ISSUE_MAX))
}

/// What the rules of a policy are compared with.
pub(super) fn answer_context<'a>(
    conversation: &'a Conversation,
    tools: &'a [String],
) -> AnswerContext<'a> {
    let author = conversation.newest_user_message();
    let of_users = conversation.pending.iter().filter(|entry| entry.author == Author::User);
    let hour = budget::now().as_millis() / (60 * 60 * 1000) % 24;
    AnswerContext {
        association: author.and_then(|author| author.association.as_deref()),
        is_first_contact: conversation.is_first_contact(),
        tools,
        texts: of_users.map(|entry| entry.text.as_str()).collect(),
        hour: u8::try_from(hour).unwrap_or_default(),
    }
}

/// The event that reports the hand-over of the issue of a run.
fn hand_over_event(run: &Run, reason: &str) -> NewOutboxRow {
    let issue = run.issue();
    let issue = EventIssue {
        id: issue.id,
        integration: &issue.integration,
        external_project_id: &issue.external_project_id,
        external_issue_id: &issue.external_issue_id,
    };
    DeskEvent::handed_over(issue, reason, budget::now()).row()
}

/// What the next run reads of this one. The request is open until it is answered.
fn issue_fields(conversation: &Conversation, is_open: bool) -> Json {
    json!({
        "user_id": conversation.user_id, "handed_over": conversation.handed_over.then_some(true),
        "request": conversation.request.0, "request_is_open": is_open.then_some(true),
        "installation": conversation.installation,
    })
}

/// A resolution that only records the conversation.
pub(super) fn record_only(
    run: &Run,
    conversation: &Conversation,
    answer: Option<&ConversationEntry>,
) -> Resolution {
    let fields = issue_fields(conversation, answer.is_none());
    let mut resolution = Resolution::new()
        .discussions(conversation.to_discussions(answer))
        .fields(fields.to_string());
    // A ticket reports it itself.
    if conversation.taken_over && run.issue().provider != "desk" {
        resolution.outbox.push(hand_over_event(run, "a person answered"));
    }
    resolution
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(number: i64, draft: Option<i64>, facts: &str) -> UnresolvedCall {
        UnresolvedCall { told: ToldEffect { number, draft }, facts: facts.to_owned() }
    }

    #[test]
    fn a_person_is_told_about_every_call_however_many_there_are() {
        assert_eq!(
            facts_of(&[call(1, None, "one"), call(2, None, "two")]),
            "2 tool calls: one. Also: two"
        );
        let calls: Vec<UnresolvedCall> =
            (0..200).map(|number| call(1_000 + number, None, &"x".repeat(700))).collect();
        let reason = facts_of(&calls);
        let told_in_full = reason.matches(&"x".repeat(700)).count();
        assert_eq!(told_in_full, 5, "{reason}");
        for number in 1_005..1_200 {
            assert!(reason.contains(&number.to_string()), "{number}: {reason}");
        }
        assert!(reason.len() < 2 * FACTS_BYTES_MAX, "{}", reason.len());
    }

    #[test]
    fn a_call_that_is_approved_again_is_told_again() {
        let mut conversation = Conversation::default();
        let mut tell = |calls: &[UnresolvedCall]| {
            conversation.told_effects = told_effects(&conversation, calls);
            conversation.told_effects.clone()
        };
        let (first, other) = (call(1, Some(4), ""), call(2, None, ""));
        tell(std::slice::from_ref(&other));
        // A lower number than one that was told before.
        assert_eq!(tell(std::slice::from_ref(&first)), [first.told, other.told]);
        let again = call(1, Some(5), "");
        assert_eq!(tell(std::slice::from_ref(&again)), [again.told, other.told]);
        let many: Vec<UnresolvedCall> = (10..500).map(|number| call(number, None, "")).collect();
        let told = tell(&many);
        assert_eq!((told.len(), told.last()), (EFFECTS_PER_ISSUE_MAX, Some(&many[489].told)));
    }
}
