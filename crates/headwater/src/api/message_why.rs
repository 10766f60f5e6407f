//! Explains what became of a message: its state in each group of its topic, in one sentence with the command that helps.
//!
//! Upstream: the console and `headwater message why`. Downstream: the queue, which is only read. Guarantees: read-only; a fixed number of
//! reads per group, and at most [`LETTERS_MAX`] dead letters.

use axum::Json;
use axum::extract::State;
use futures_util::future::try_join_all;
use headwater_queue::{
    Bound, DeadLetter, DeadLetterFilter, DeadLetterQuery, GroupView, Inspector, MessageQuery, Mode,
    Page, QueueError, StoredMessage,
};
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::dto::{parse_entry_id, time};
use crate::api::names::{shown_group, shown_topic, wire_topic};
use crate::http::ApiError;
use crate::http::body::JsonResult;
use crate::http::extract::{PathParams, QueryParams};
use crate::text::{counted, one_line, shell_word};

/// Dead letters that are searched for the message.
const LETTERS_MAX: usize = 200;

/// Groups that are read.
const GROUPS_MAX: usize = 50;

/// Maximum bytes of a reason in a sentence.
const REASON_BYTES_MAX: usize = 300;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(why))
}

/// Which message.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MessageWhyQuery {
    /// Its partition; needed only if several partitions have a message with this id.
    partition: Option<u16>,
}

/// What became of a message.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessageWhyResponse {
    topic: String,
    id: String,
    partition: u16,
    /// Of the group that needs attention most: `dead_letter`, `no_member`, `no_owner`, `waiting`, `released`,
    /// `in_progress`, `unknown` (settled, or a dead letter that was not looked at) or `settled`; `no_group` if no group reads the topic.
    reason: &'static str,
    /// Explanation with the next step.
    sentence: String,
    /// The command that helps, or that shows more.
    command: String,
    /// What became of it in each group; `step` is the name of the group.
    steps: Vec<MessageWhyStep>,
}

/// The state of a message in one group.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessageWhyStep {
    /// Name of the group.
    step: String,
    found: String,
}

/// Explain what became of a message, and name the command that helps.
#[utoipa::path(get, path = "/topics/{topic}/messages/{id}/why", tag = "messages",
    params(("topic" = String, Path), ("id" = String, Path), MessageWhyQuery),
    responses((status = 200, body = MessageWhyResponse), (status = 404)))]
async fn why(
    State(operations): State<Operations>,
    PathParams((topic, id)): PathParams<(String, String)>,
    QueryParams(query): QueryParams<MessageWhyQuery>,
) -> JsonResult<MessageWhyResponse> {
    let topic = wire_topic(topic);
    let id = parse_entry_id("id", &id)?;
    let (queue, inspect) = (operations.queue(), operations.queue().inspect());
    let (message, groups) =
        tokio::join!(find(&operations, &topic, id, query.partition), inspect.groups(&topic));
    let (message, mut groups) = (message?, groups?);
    let partition = message.partition;
    groups.truncate(GROUPS_MAX);
    let of_message = groups.iter().flat_map(|group| &group.partitions);
    for of_group in of_message.filter(|one| one.partition == partition) {
        of_group.require_complete()?;
    }
    let in_group = groups.iter().map(|group| state_in(&inspect, &topic, group, partition, id));
    let known = try_join_all(in_group).await?;
    let mut states = Vec::new();
    let mut letters: Option<Page<DeadLetter>> = None;
    for (group, mut state) in groups.iter().zip(known) {
        if state.is_none() {
            if letters.is_none() {
                let filter = DeadLetterFilter {
                    partition: Some(partition),
                    from: Some(message.stored_at),
                    ..DeadLetterFilter::default()
                };
                let query = DeadLetterQuery { filter, limit: LETTERS_MAX, ..Default::default() };
                letters = Some(queue.dead_letters(&topic).await?.browse(&query).await?);
            }
            let is_this = |letter: &&DeadLetter| {
                letter.original_id == Some(id) && letter.group.as_deref() == Some(&group.group)
            };
            let letter = letters.iter().flat_map(|page| &page.items).find(is_this);
            state = letter.map(|letter| MessageState::DeadLetter {
                letter: letter.id,
                reason: one_line(&letter.reason, REASON_BYTES_MAX),
            });
            if letters.as_ref().is_some_and(|page| page.next.is_some()) {
                state = state.or(Some(MessageState::Unknown));
            }
        }
        let name = shown_group(&topic, &group.group).into_owned();
        states.push((name, state.unwrap_or(MessageState::Settled)));
    }
    Ok(Json(explain(&shown_topic(&topic), id, partition, states)))
}

/// Where a message is in a group; `None` if the group has settled it or made it a dead letter.
async fn state_in(
    inspect: &Inspector,
    topic: &str,
    group: &GroupView,
    partition: u16,
    id: EntryId,
) -> Result<Option<MessageState>, QueueError> {
    if let Some(state) = MessageState::not_delivered(group, partition, id) {
        return Ok(Some(state));
    }
    let pending = inspect.pending_message(topic, &group.group, partition, id).await?;
    Ok(pending.map(|pending| match pending.consumer {
        None => MessageState::Released { deliveries: pending.deliveries },
        Some(consumer) => MessageState::InProgress {
            consumer,
            seconds: pending.idle.unwrap_or_default().as_secs(),
            deliveries: pending.deliveries,
        },
    }))
}

/// The message with this id; with several, `partition` must name one.
pub(super) async fn find(
    operations: &Operations,
    topic: &str,
    id: EntryId,
    partition: Option<u16>,
) -> Result<StoredMessage, ApiError> {
    let at = Some(Bound::Id(id));
    let query = MessageQuery { from: at, to: at, partition, limit: 2, ..MessageQuery::default() };
    let mut found = operations.queue().inspect().messages(topic, &query).await?.items;
    if found.len() > 1 {
        let partitions = format!("{} and {}", found[0].partition, found[1].partition);
        return Err(ApiError::invalid(format!(
            "message `{id}` exists in several partitions ({partitions}); name one with `partition`"
        )));
    }
    match found.pop() {
        Some(found) => Ok(found),
        None => Err(gone(operations, topic, id, partition).await),
    }
}

/// Says since when messages are stored, if that is why this one is not.
async fn gone(
    operations: &Operations,
    topic: &str,
    id: EntryId,
    partition: Option<u16>,
) -> ApiError {
    let view = operations.queue().inspect().topic(topic).await.ok();
    let oldest = view.and_then(|view| match partition {
        None => view.first_id,
        Some(number) => view.partitions.iter().find(|one| one.partition == number)?.first_id,
    });
    let since = oldest.filter(|oldest| id < *oldest).map_or(String::new(), |oldest| {
        let stored_at = time(Timestamp::from_millis(oldest.ms));
        format!("; the oldest stored message is `{oldest}`, of {stored_at}")
    });
    let topic = shown_topic(topic);
    ApiError::not_found(format!(
        "message `{id}` is not in topic `{topic}`: it was trimmed, or never stored{since}"
    ))
}

/// What became of a message in one group. The first ones need attention most.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum MessageState {
    DeadLetter {
        letter: EntryId,
        reason: String,
    },
    NoMember {
        lag: Option<u64>,
    },
    NoOwner {
        lag: Option<u64>,
    },
    Waiting {
        lag: Option<u64>,
        owner: Option<String>,
    },
    Released {
        deliveries: u64,
    },
    InProgress {
        consumer: String,
        seconds: u64,
        deliveries: u64,
    },
    /// Settled, or a dead letter beyond those that were looked at.
    Unknown,
    Settled,
}

impl MessageState {
    /// Why the group was not given the message yet; `None` if it was.
    fn not_delivered(group: &GroupView, partition: u16, id: EntryId) -> Option<Self> {
        let view = group.partitions.iter().find(|view| view.partition == partition)?;
        if view.last_delivered.is_some_and(|last| last >= id) {
            return None;
        }
        let lag = view.lag;
        let mut alive = group.members.iter().filter(|member| member.heartbeat_age.is_some());
        let is_shared = group.members.iter().any(|member| member.mode == Mode::Shared);
        let owner = view.owner.as_ref().map(|owner| owner.holder.clone());
        Some(match (alive.next(), &owner) {
            (None, _) => Self::NoMember { lag },
            (Some(_), None) if !is_shared => Self::NoOwner { lag },
            _ => Self::Waiting { lag, owner },
        })
    }

    fn code(&self) -> &'static str {
        match self {
            Self::DeadLetter { .. } => "dead_letter",
            Self::NoMember { .. } => "no_member",
            Self::NoOwner { .. } => "no_owner",
            Self::Waiting { .. } => "waiting",
            Self::Released { .. } => "released",
            Self::InProgress { .. } => "in_progress",
            Self::Unknown => "unknown",
            Self::Settled => "settled",
        }
    }

    /// What happened, as a part of a sentence.
    fn found(&self, partition: u16) -> String {
        let waiting = |lag: &Option<u64>| match lag {
            Some(lag) => counted(*lag, "message", "messages"),
            None => "an unknown number of messages".to_owned(),
        };
        let times = |count: &u64| counted(*count, "time", "times");
        match self {
            Self::DeadLetter { letter, reason } => format!("became dead letter {letter}: {reason}"),
            Self::NoMember { lag } => format!(
                "not delivered yet, with {} of partition {partition}: the group has no members",
                waiting(lag)
            ),
            Self::NoOwner { lag } => format!(
                "not delivered yet, with {} of partition {partition}, which has no owner: a rebalance or the end of a lease is \
                 awaited",
                waiting(lag)
            ),
            Self::Waiting { lag, owner } => {
                let owner =
                    owner.as_ref().map_or(String::new(), |owner| format!(", owned by {owner}"));
                format!("not delivered yet, with {} of partition {partition}{owner}", waiting(lag))
            }
            Self::Released { deliveries } => {
                format!("delivered {} and released; it is delivered again", times(deliveries))
            }
            Self::InProgress { consumer, seconds, deliveries } => format!(
                "delivered {}, to {consumer} {seconds} s ago, and not settled yet",
                times(deliveries)
            ),
            Self::Unknown => format!(
                "unknown: settled, or a dead letter beyond the {LETTERS_MAX} that were looked at"
            ),
            Self::Settled => {
                "settled: it was processed, or its retry is a newer message".to_owned()
            }
        }
    }

    fn command(&self, topic: &str, group: &str) -> String {
        let (topic, group) = (shell_word(topic), shell_word(group));
        match self {
            Self::DeadLetter { letter, .. } => format!("headwater dlq replay {topic} {letter}"),
            Self::NoMember { .. } => format!("headwater consume {topic} --group {group}"),
            Self::Unknown => format!("headwater dlq list {topic}"),
            Self::NoOwner { .. } | Self::Waiting { .. } | Self::Settled => {
                format!("headwater group describe {topic} {group}")
            }
            Self::Released { .. } | Self::InProgress { .. } => {
                format!("headwater pending {topic} --group {group}")
            }
        }
    }

    /// What the command does.
    fn next_step(&self, command: &str) -> String {
        match self {
            Self::DeadLetter { .. } => format!("fix the cause, then run `{command}`"),
            Self::NoMember { .. } => format!("start a consumer with `{command}`"),
            Self::NoOwner { .. } | Self::Waiting { .. } => {
                format!("`{command}` shows its members and owners")
            }
            Self::Released { .. } | Self::InProgress { .. } => {
                format!("`{command}` shows what is pending")
            }
            Self::Unknown => format!("`{command}` shows all dead letters"),
            Self::Settled => format!("`{command}` shows the group"),
        }
    }
}

/// The sentence is about the group that needs attention most.
fn explain(
    topic: &str,
    id: EntryId,
    partition: u16,
    states: Vec<(String, MessageState)>,
) -> MessageWhyResponse {
    let (reason, sentence, command) = match states.iter().min_by_key(|(_, state)| state) {
        None => {
            let command = format!("headwater consume {} --group NAME", shell_word(topic));
            let sentence = format!(
                "message {id} of topic `{topic}` is stored, but no group reads the topic; start a consumer with `{command}`"
            );
            ("no_group", sentence, command)
        }
        Some((group, state)) => {
            let command = state.command(topic, group);
            let (found, next) = (state.found(partition), state.next_step(&command));
            let sentence = format!("message {id} in group `{group}`: {found}; {next}");
            (state.code(), sentence, command)
        }
    };
    let steps = states.into_iter();
    let steps =
        steps.map(|(group, state)| MessageWhyStep { step: group, found: state.found(partition) });
    MessageWhyResponse {
        topic: topic.to_owned(),
        id: id.to_string(),
        partition,
        reason,
        sentence,
        command,
        steps: steps.collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use headwater_queue::{GroupPartitionView, MemberView, OwnerView};

    use super::*;

    fn group(last: Option<EntryId>, member: Option<Mode>, owner: Option<&str>) -> GroupView {
        let owner = owner.map(|holder| OwnerView {
            holder: holder.to_owned(),
            epoch: 1,
            heartbeat_age: Duration::ZERO,
            remaining: Duration::ZERO,
        });
        let members = member.map(|mode| MemberView {
            member: "m".to_owned(),
            consumer: Some("c".to_owned()),
            mode,
            reserved: Vec::new(),
            heartbeat_age: Some(Duration::ZERO),
        });
        GroupView {
            topic: "orders".to_owned(),
            group: "billing".to_owned(),
            pending: 0,
            lag: Some(3),
            consumers: Vec::new(),
            members: members.into_iter().collect(),
            partitions: vec![GroupPartitionView {
                partition: 2,
                pending: Some(0),
                lag: Some(3),
                last_delivered: last,
                last_id: None,
                owner,
                problem: None,
            }],
        }
    }

    #[test]
    fn an_undelivered_message_names_what_its_group_lacks() {
        let id = EntryId::new(5, 0);
        let state =
            |group: GroupView| MessageState::not_delivered(&group, 2, id).map(|state| state.code());
        assert_eq!(state(group(None, None, None)), Some("no_member"));
        assert_eq!(
            state(group(Some(EntryId::new(4, 9)), Some(Mode::Owned), None)),
            Some("no_owner")
        );
        assert_eq!(state(group(None, Some(Mode::Shared), None)), Some("waiting"));
        assert_eq!(state(group(None, Some(Mode::Owned), Some("c"))), Some("waiting"));
        assert_eq!(state(group(Some(id), None, None)), None, "it was delivered");
    }

    #[test]
    fn the_sentence_is_about_the_group_that_needs_attention_most() {
        let id = EntryId::new(5, 0);
        let dead = MessageState::DeadLetter {
            letter: EntryId::new(9, 1),
            reason: "no address".to_owned(),
        };
        let states = vec![
            ("audit".to_owned(), MessageState::Settled),
            ("it's".to_owned(), dead),
            ("slow".to_owned(), MessageState::NoMember { lag: Some(1) }),
        ];
        let why = explain("orders", id, 2, states);
        assert_eq!(
            why.sentence,
            "message 5-0 in group `it's`: became dead letter 9-1: no address; fix the cause, then run `headwater dlq replay orders 9-1`"
        );
        assert_eq!((why.reason, why.steps.len()), ("dead_letter", 3));
        let waiting = vec![("slow".to_owned(), MessageState::NoMember { lag: Some(1) })];
        let why = explain("a b", id, 2, waiting);
        assert_eq!(
            why.sentence,
            "message 5-0 in group `slow`: not delivered yet, with 1 message of partition 2: the group has no members; start a \
             consumer with `headwater consume 'a b' --group slow`"
        );
        assert_eq!(explain("orders", id, 0, Vec::new()).reason, "no_group");
    }
}
