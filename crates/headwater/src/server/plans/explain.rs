//! Says in one sentence how a plan is doing, and which command helps.
//!
//! Upstream: `api/plans.rs`, for the command line and the console. Not here: reading anything.

use crate::server::plans::STAGES;
use crate::server::plans::progress::PlanAction;
use crate::server::plans::rows::{PlanState, ReplayPlan};
use crate::text::{counted, shell_word};

/// What a letter without an outcome waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AwaitedGroup {
    pub(crate) topic: String,
    /// `None`: no group reads the topic.
    pub(crate) group: Option<String>,
    /// Whether a member of the group is alive.
    pub(crate) has_members: bool,
}

/// How a plan is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlanDiagnosis {
    /// `unavailable`, `no_process`, `no_member`, `awaiting`, `sending`, `paused`, `stopped`, `cancelled` or `done`.
    pub(crate) reason: &'static str,
    pub(crate) sentence: String,
    /// The command that helps, or that shows more.
    pub(crate) command: String,
}

/// Explains a plan. `awaited` is about a letter without an outcome, if there is one.
pub(crate) fn explain(plan: &ReplayPlan, awaited: Option<&AwaitedGroup>) -> PlanDiagnosis {
    let (id, progress) = (plan.id, &plan.progress);
    let show = format!("headwater plan show {id}");
    let resume = format!("headwater plan resume {id}");
    let letters = |count: u64| counted(count, "letter", "letters");
    let result = format!(
        "{} of {} sent, {} settled, {} failed again",
        progress.sent, progress.total, progress.settled, progress.failed
    );
    let (reason, found, command) = match plan.state {
        PlanState::Done => ("done", format!("is done: {result}"), show),
        PlanState::Cancelled => (
            "cancelled",
            format!("was cancelled: {result}; {} stay dead letters", letters(progress.left())),
            show,
        ),
        PlanState::Stopped => {
            let why = plan.reason.as_deref().unwrap_or("too many letters failed again");
            let found = format!(
                "stopped by itself: {why}; fix the cause, then run `{resume}`, which begins with a canary again"
            );
            ("stopped", found, resume)
        }
        PlanState::Paused => {
            ("paused", format!("is paused: {result}; `{resume}` continues it"), resume)
        }
        PlanState::Running => return running(plan, awaited, &result),
    };
    PlanDiagnosis { reason, sentence: format!("replay plan {id} {found}"), command }
}

fn running(plan: &ReplayPlan, awaited: Option<&AwaitedGroup>, result: &str) -> PlanDiagnosis {
    let (id, mut progress) = (plan.id, plan.progress.clone());
    let show = format!("headwater plan show {id}");
    let (reason, found, command) = if let Some(problem) = &plan.problem {
        let found = format!("waits: {problem}; it goes on by itself when they answer ({result})");
        ("unavailable", found, "headwater doctor".to_owned())
    } else if plan.owner.is_none() {
        let found = "waits for a process: a running `headwater serve` or `headwater worker` takes it within ten seconds";
        ("no_process", found.to_owned(), "headwater status".to_owned())
    } else if matches!(progress.next(), PlanAction::Send { .. }) {
        let rate = STAGES[progress.stage.min(STAGES.len() - 1)].1;
        let found = format!("sends {rate} letters per second in step {}: {result}", progress.step);
        ("sending", found, show)
    } else {
        let open = counted(progress.awaited(), "letter", "letters");
        let what = if progress.stage == 0 { "its canary" } else { "this step" };
        let waits = format!("waits for the outcome of {open}, to judge {what} ({result})");
        match awaited.filter(|group| !group.has_members) {
            None => ("awaiting", waits, show),
            Some(AwaitedGroup { topic, group, .. }) => {
                let name = group.as_deref().map_or_else(|| "NAME".to_owned(), shell_word);
                let command = format!("headwater consume {} --group {name}", shell_word(topic));
                let lack = match group {
                    Some(group) => format!("group `{group}` of topic `{topic}` has no members"),
                    None => format!("no group reads topic `{topic}`"),
                };
                let found = format!("{waits}; {lack}: start a consumer with `{command}`");
                ("no_member", found, command)
            }
        }
    };
    PlanDiagnosis { reason, sentence: format!("replay plan {id} {found}"), command }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use headwater_stream::clock::Timestamp;

    use super::*;
    use crate::server::plans::PlanProgress;
    use crate::server::plans::progress::PlanEvent;
    use crate::server::plans::selection::PlanSelection;

    fn plan(state: PlanState, sent: u64) -> ReplayPlan {
        let mut progress = PlanProgress::new(20);
        progress.on(PlanEvent::Taken(sent));
        progress.on(PlanEvent::Sent(sent));
        ReplayPlan {
            id: 3,
            state,
            reason: None,
            selection: PlanSelection::default(),
            progress,
            resumes: 0,
            problem: None,
            created_by: "ann".to_owned(),
            created_at: Timestamp::from_millis(0),
            changed_at: Timestamp::from_millis(0),
            unchanged_for: Duration::ZERO,
            owner: Some("w".to_owned()),
            epoch: 1,
        }
    }

    #[test]
    fn every_state_has_a_sentence_and_a_command() {
        let said = |plan: &ReplayPlan| explain(plan, None);
        assert_eq!(
            said(&plan(PlanState::Running, 0)).sentence,
            "replay plan 3 sends 5 letters per second in step 1: 0 of 20 sent, 0 settled, 0 failed again"
        );
        let waiting = said(&plan(PlanState::Running, 5));
        assert_eq!(waiting.reason, "awaiting");
        assert!(
            waiting.sentence.contains("outcome of 5 letters, to judge its canary"),
            "{waiting:?}"
        );
        let stopped =
            ReplayPlan { reason: Some("5 of 5".to_owned()), ..plan(PlanState::Stopped, 5) };
        assert_eq!(said(&stopped).command, "headwater plan resume 3");
        assert!(said(&stopped).sentence.contains("stopped by itself: 5 of 5; fix the cause"));
        assert_eq!(said(&plan(PlanState::Paused, 5)).command, "headwater plan resume 3");
        let cancelled = said(&plan(PlanState::Cancelled, 5)).sentence;
        assert!(cancelled.contains("15 letters stay dead letters"), "{cancelled}");
        assert_eq!(said(&plan(PlanState::Done, 20)).reason, "done");
    }

    #[test]
    fn a_running_plan_names_what_it_lacks() {
        let alone = ReplayPlan { owner: None, ..plan(PlanState::Running, 0) };
        assert_eq!(explain(&alone, None).reason, "no_process");
        let problem = Some("the streams do not answer".to_owned());
        let waiting = ReplayPlan { problem, ..plan(PlanState::Running, 0) };
        assert_eq!(explain(&waiting, None).reason, "unavailable");
        let group = AwaitedGroup {
            topic: "a b".to_owned(),
            group: Some("g".to_owned()),
            has_members: false,
        };
        let said = explain(&plan(PlanState::Running, 5), Some(&group));
        assert_eq!(
            (said.reason, &*said.command),
            ("no_member", "headwater consume 'a b' --group g")
        );
        let group = AwaitedGroup { has_members: true, ..group };
        assert_eq!(explain(&plan(PlanState::Running, 5), Some(&group)).reason, "awaiting");
    }
}
