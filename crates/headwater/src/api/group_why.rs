//! Explains why a consumer group has messages left: in one sentence, with the command that helps.
//!
//! Upstream: the console and `headwater group why`. Downstream: the queue, which is only read. Guarantees: read-only, one look at the group.

use axum::Json;
use axum::extract::State;
use headwater_queue::{GroupPartitionView, GroupView, Mode};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::dto::UNREAD;
use crate::api::names::{shown_group, shown_topic, wire_group};
use crate::api::why::WhyStep;
use crate::http::body::JsonResult;
use crate::http::extract::PathParams;
use crate::text::{counted, shell_word};

/// Partitions in the facts.
const PARTITIONS_SHOWN: usize = 10;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(why))
}

/// Why a group waits.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupWhyResponse {
    topic: String,
    group: String,
    /// `done`: nothing waits. `no_member`, `unread`: a server of the stream backend does not answer, `no_owner` or `working`.
    reason: &'static str,
    /// Explanation with the next step.
    sentence: String,
    /// The command that helps, or that shows more.
    command: String,
    /// The facts.
    steps: Vec<WhyStep>,
}

/// Explain why a group has messages left, and name the command that helps.
#[utoipa::path(get, path = "/topics/{topic}/groups/{group}/why", tag = "groups",
    params(("topic" = String, Path), ("group" = String, Path)), responses((status = 200, body = GroupWhyResponse), (status = 404)))]
async fn why(
    State(operations): State<Operations>,
    PathParams((topic, group)): PathParams<(String, String)>,
) -> JsonResult<GroupWhyResponse> {
    let (topic, group) = wire_group((topic, group));
    let view = operations.queue().inspect().group(&topic, &group).await?;
    Ok(Json(explain(&view)))
}

fn explain(view: &GroupView) -> GroupWhyResponse {
    let topic = shown_topic(&view.topic).into_owned();
    let group = shown_group(&view.topic, &view.group).into_owned();
    let (topic_word, group_word) = (shell_word(&topic), shell_word(&group));
    let alive = view.members.iter().filter(|member| member.heartbeat_age.is_some()).count() as u64;
    let is_shared = view.members.iter().any(|member| member.mode == Mode::Shared);
    let waits = |one: &&GroupPartitionView| {
        one.lag.is_none_or(|lag| lag > 0) || one.pending.is_none_or(|pending| pending > 0)
    };
    let is_orphan = |one: &&GroupPartitionView| {
        !is_shared && one.owner.is_none() && one.problem.is_none() && waits(one)
    };
    let orphans = view.partitions.iter().filter(is_orphan).count() as u64;
    let unread = view.unread_partitions().len() as u64;
    let describe = format!("headwater group describe {topic_word} {group_word}");
    let left = match view.lag {
        Some(lag) => counted(lag + view.pending, "message waits", "messages wait"),
        None => "An unknown number of messages waits".to_owned(),
    };
    let is_done = view.lag == Some(0) && view.pending == 0;
    let (reason, sentence, command) = if is_done && unread == 0 {
        ("done", "The group has processed every message.".to_owned(), describe)
    } else if alive == 0 {
        let sentence = format!("{left} because the group has no members: start a consumer.");
        let command = format!("headwater consume {topic_word} --group {group_word}");
        ("no_member", sentence, command)
    } else if unread > 0 {
        let partitions = counted(unread, "partition", "partitions");
        let sentence = format!(
            "{left}; {partitions} cannot be read because a server of the stream backend does not answer: their messages wait until it is back."
        );
        ("unread", sentence, describe)
    } else if orphans > 0 {
        let partitions = counted(orphans, "partition has", "partitions have");
        let sentence = format!(
            "{left}; {partitions} no owner yet: a rebalance or the end of a lease is awaited."
        );
        ("no_owner", sentence, describe)
    } else {
        let members = counted(alive, "member reads", "members read");
        ("working", format!("{left}; {members} the group."), describe)
    };
    let waiting = view.partitions.iter().filter(waits).map(|one| {
        let partition = one.partition;
        let Some(pending) = one.pending else { return format!("{partition}: {UNREAD}") };
        let owner = one.owner.as_ref();
        let owner = owner.map_or("no owner".to_owned(), |owner| format!("owner {}", owner.holder));
        let lag = one.lag.map_or("unknown".to_owned(), |lag| lag.to_string());
        format!("{partition}: {lag} not delivered, {pending} in progress, {owner}")
    });
    let waiting: Vec<String> = waiting.take(PARTITIONS_SHOWN).collect();
    let steps = vec![
        WhyStep { step: "members", found: counted(alive, "member alive", "members alive") },
        WhyStep {
            step: "messages",
            found: format!(
                "{} not delivered, {} in progress",
                view.lag.map_or("an unknown number".to_owned(), |lag| lag.to_string()),
                view.pending
            ),
        },
        WhyStep {
            step: "partitions",
            found: if waiting.is_empty() { "none waits".to_owned() } else { waiting.join("; ") },
        },
    ];
    GroupWhyResponse { topic, group, reason, sentence, command, steps }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use headwater_queue::{MemberView, OwnerView};

    use super::*;

    fn view(lag: u64, members: usize, has_owner: bool) -> GroupView {
        let member = |number: usize| MemberView {
            member: format!("m-{number}"),
            consumer: None,
            mode: Mode::Owned,
            reserved: Vec::new(),
            heartbeat_age: Some(Duration::ZERO),
        };
        let owner = OwnerView {
            holder: "m-0".to_owned(),
            epoch: 1,
            heartbeat_age: Duration::ZERO,
            remaining: Duration::from_secs(1),
        };
        GroupView {
            topic: "orders".to_owned(),
            group: "it's".to_owned(),
            pending: 0,
            lag: Some(lag),
            consumers: Vec::new(),
            members: (0..members).map(member).collect(),
            partitions: vec![GroupPartitionView {
                partition: 0,
                pending: Some(0),
                lag: Some(lag),
                last_delivered: None,
                last_id: None,
                problem: None,
                owner: has_owner.then_some(owner),
            }],
        }
    }

    #[test]
    fn a_group_says_why_it_waits_and_what_to_do() {
        let explained = |lag, members| explain(&view(lag, members, members > 0));
        assert_eq!(explained(0, 0).reason, "done");
        let alone = explained(3, 0);
        assert_eq!(alone.reason, "no_member");
        assert_eq!(
            alone.sentence,
            "3 messages wait because the group has no members: start a consumer."
        );
        assert_eq!(alone.command, "headwater consume orders --group 'it'\\''s'");
        let orphaned = explain(&view(1, 1, false));
        assert_eq!(orphaned.reason, "no_owner");
        assert_eq!(orphaned.steps[2].found, "0: 1 not delivered, 0 in progress, no owner");
        assert!(explained(1, 1).steps[2].found.ends_with("in progress, owner m-0"));
        assert_eq!(explained(1, 1).sentence, "1 message waits; 1 member reads the group.");
        let mut unread = view(0, 1, true);
        let one = &mut unread.partitions[0];
        (one.pending, one.lag, one.problem) = (None, None, Some("refused".to_owned()));
        unread.lag = None;
        let unread = explain(&unread);
        assert_eq!(unread.reason, "unread");
        assert!(unread.sentence.contains("1 partition cannot be read"), "{}", unread.sentence);
        assert_eq!(unread.steps[2].found, format!("0: {UNREAD}"));
    }
}
