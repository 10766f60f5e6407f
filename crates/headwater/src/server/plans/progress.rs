//! How far a plan is, and what is next: a pure state machine.
//!
//! Upstream: `runner.rs` feeds it with what happened and carries out what it answers. Not here: time, SQL and streams.
//!
//! A plan goes through stages: a canary of 5 letters, 100 letters at 10 per second, 500 at 50, then 2000 at 200 again and
//! again. Each such portion is a step. A step fails, and stops the plan, when more than 5 % of it failed again. The next
//! step begins when this one cannot fail any more: even if all open letters failed, it would be 5 % at most. So the canary
//! waits for all its outcomes, and a later step for nearly all.

use serde::{Deserialize, Serialize};

/// Letters and letters per second of each stage. The last one repeats.
pub(crate) const STAGES: [(u64, u32); 4] = [(5, 5), (100, 10), (500, 50), (2000, 200)];

/// Part of a step that may fail again, in percent.
pub(crate) const FAILED_PERCENT_MAX: u64 = 5;

/// Maximum letters whose outcome is awaited.
const AWAITED_MAX: u64 = 1000;

// A step must be able to end although letters of earlier steps are still open.
const _: () = assert!(AWAITED_MAX > STAGES[2].0);

/// The counters of a plan. Stored as JSON; a field that is missing is zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PlanProgress {
    /// Letters when the plan was made.
    pub(crate) total: u64,
    /// Letters that are recorded and perhaps not sent yet.
    pub(crate) taken: u64,
    /// Letters sent to their partitions.
    pub(crate) sent: u64,
    /// Letters handled by their group.
    pub(crate) settled: u64,
    /// Letters that became dead letters again.
    pub(crate) failed: u64,
    /// Those of them with the same cause as before.
    pub(crate) failed_same_cause: u64,
    /// Letters whose outcome cannot be known any more.
    pub(crate) unknown: u64,
    /// Letters that were not sent: refused, replayed or purged by another operation.
    pub(crate) skipped: u64,
    /// Number of the step, counting on after a resumption.
    pub(crate) step: u32,
    /// Index in [`STAGES`].
    pub(crate) stage: usize,
    pub(crate) step_size: u64,
    pub(crate) step_taken: u64,
    pub(crate) step_ended: u64,
    pub(crate) step_failed: u64,
    pub(crate) step_failed_same_cause: u64,
    /// Whether all letters were looked at.
    pub(crate) end_reached: bool,
    /// Resumptions that were taken into account.
    pub(crate) resumes: i64,
    /// Position: index of the topic, and the last dead letter that was looked at.
    pub(crate) topic: usize,
    pub(crate) after: Option<String>,
}

/// Something that happened to a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlanEvent {
    /// Letters were recorded, to be sent.
    Taken(u64),
    /// Recorded letters were sent.
    Sent(u64),
    /// Letters were left out.
    Skipped(u64),
    /// A recorded letter of this step is gone and was not sent.
    Gone { step: u32 },
    /// The outcome of a letter of this step.
    Outcome { step: u32, outcome: LetterOutcome },
    /// All letters were looked at.
    EndReached,
    /// The plan was resumed after it had stopped; the number of resumptions.
    Resumed(i64),
}

/// Outcome of a letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LetterOutcome {
    Settled,
    Failed { same_cause: bool },
    Unknown,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlanAction {
    /// Send at most this many letters, at this rate.
    Send { at_most: u64, per_second: u32 },
    /// Wait for outcomes.
    Wait,
    /// Stop: too many failed again.
    Stop(String),
    /// Everything is sent and has an outcome.
    Finish,
}

impl PlanProgress {
    /// A plan of so many letters that has not begun.
    pub(crate) fn new(total: u64) -> Self {
        let mut progress = Self { total, ..Self::default() };
        progress.begin_step(0);
        progress
    }

    /// Letters that are neither sent nor skipped.
    pub(crate) fn left(&self) -> u64 {
        self.total.saturating_sub(self.sent + self.skipped)
    }

    /// Letters whose outcome is awaited.
    pub(crate) fn awaited(&self) -> u64 {
        self.sent.saturating_sub(self.settled + self.failed + self.unknown)
    }

    /// Takes an event into account and returns what is next.
    pub(crate) fn on(&mut self, event: PlanEvent) -> PlanAction {
        match event {
            PlanEvent::Taken(count) => {
                self.taken += count;
                self.step_taken += count;
            }
            PlanEvent::Sent(count) => {
                self.taken = self.taken.saturating_sub(count);
                self.sent += count;
            }
            PlanEvent::Skipped(count) => self.skipped += count,
            PlanEvent::Gone { step } => {
                self.taken = self.taken.saturating_sub(1);
                self.skipped += 1;
                if step == self.step {
                    self.step_taken = self.step_taken.saturating_sub(1);
                }
            }
            PlanEvent::Outcome { step, outcome } => self.count(step, outcome),
            PlanEvent::EndReached => {
                self.end_reached = true;
                // What is missing was purged, or replayed by another operation.
                self.skipped += self.left().saturating_sub(self.taken);
                self.step_size = self.step_taken;
            }
            PlanEvent::Resumed(count) => {
                self.resumes = count;
                self.begin_step(0);
            }
        }
        self.next()
    }

    /// What is next. Begins the next step if this one cannot fail any more.
    pub(crate) fn next(&mut self) -> PlanAction {
        let allowed = self.step_size * FAILED_PERCENT_MAX / 100;
        if self.step_failed > allowed {
            return PlanAction::Stop(self.stop_reason());
        }
        if self.end_reached {
            let is_over = self.taken == 0 && self.awaited() == 0;
            return if is_over { PlanAction::Finish } else { PlanAction::Wait };
        }
        if self.step_taken >= self.step_size {
            let open = self.step_taken.saturating_sub(self.step_ended);
            if self.step_failed + open > allowed {
                return PlanAction::Wait;
            }
            self.begin_step((self.stage + 1).min(STAGES.len() - 1));
        }
        let room = AWAITED_MAX.saturating_sub(self.awaited() + self.taken);
        let at_most = room.min(self.step_size - self.step_taken);
        match at_most {
            0 => PlanAction::Wait,
            at_most => PlanAction::Send { at_most, per_second: STAGES[self.stage].1 },
        }
    }

    fn begin_step(&mut self, stage: usize) {
        self.step += 1;
        self.stage = stage;
        // At least one: the end is found by looking for a letter.
        self.step_size = STAGES[stage].0.min(self.left()).max(1);
        (self.step_taken, self.step_ended) = (0, 0);
        (self.step_failed, self.step_failed_same_cause) = (0, 0);
    }

    fn count(&mut self, step: u32, outcome: LetterOutcome) {
        let is_of_step = u64::from(step == self.step);
        self.step_ended += is_of_step;
        match outcome {
            LetterOutcome::Settled => self.settled += 1,
            LetterOutcome::Unknown => self.unknown += 1,
            LetterOutcome::Failed { same_cause } => {
                let same = u64::from(same_cause);
                self.failed += 1;
                self.failed_same_cause += same;
                self.step_failed += is_of_step;
                self.step_failed_same_cause += is_of_step * same;
            }
        }
    }

    fn stop_reason(&self) -> String {
        let (failed, same, size) = (self.step_failed, self.step_failed_same_cause, self.step_size);
        let cause = match same {
            same if same == failed => "with the same cause".to_owned(),
            0 => "with another cause".to_owned(),
            same => format!("{same} of them with the same cause"),
        };
        format!(
            "{failed} of the {size} letters of step {} failed again, {cause}; at most {FAILED_PERCENT_MAX} % may",
            self.step
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTLED: LetterOutcome = LetterOutcome::Settled;
    const SAME: LetterOutcome = LetterOutcome::Failed { same_cause: true };

    fn send(progress: &mut PlanProgress, count: u64) -> PlanAction {
        progress.on(PlanEvent::Taken(count));
        progress.on(PlanEvent::Sent(count))
    }

    fn end(progress: &mut PlanProgress, count: u64, outcome: LetterOutcome) -> PlanAction {
        let step = progress.step;
        let mut action = PlanAction::Wait;
        for _ in 0..count {
            action = progress.on(PlanEvent::Outcome { step, outcome });
        }
        action
    }

    #[test]
    fn the_canary_waits_for_all_its_outcomes_and_then_the_rate_rises() {
        let mut progress = PlanProgress::new(5000);
        assert_eq!(progress.next(), PlanAction::Send { at_most: 5, per_second: 5 });
        assert_eq!(send(&mut progress, 5), PlanAction::Wait);
        assert_eq!(end(&mut progress, 4, SETTLED), PlanAction::Wait);
        let next = end(&mut progress, 1, SETTLED);
        assert_eq!(next, PlanAction::Send { at_most: 100, per_second: 10 });
        assert_eq!(send(&mut progress, 100), PlanAction::Wait);
        assert_eq!(end(&mut progress, 94, SETTLED), PlanAction::Wait, "6 of 100 are more than 5 %");
        let next = end(&mut progress, 1, SETTLED);
        assert_eq!(next, PlanAction::Send { at_most: 500, per_second: 50 }, "it cannot fail now");
        send(&mut progress, 500);
        let next = end(&mut progress, 500, SETTLED);
        assert_eq!(next, PlanAction::Send { at_most: 995, per_second: 200 }, "5 are still open");
        assert_eq!((progress.left(), progress.awaited()), (4395, 5));
    }

    #[test]
    fn one_failure_stops_the_canary_and_more_than_five_percent_a_later_step() {
        let mut progress = PlanProgress::new(1000);
        send(&mut progress, 5);
        let stop = end(&mut progress, 1, SAME);
        let reason =
            "1 of the 5 letters of step 1 failed again, with the same cause; at most 5 % may";
        assert_eq!(stop, PlanAction::Stop(reason.to_owned()));

        let mut progress = PlanProgress::new(1000);
        send(&mut progress, 5);
        end(&mut progress, 5, SETTLED);
        send(&mut progress, 50);
        assert!(matches!(end(&mut progress, 5, SAME), PlanAction::Send { at_most: 50, .. }));
        let other = LetterOutcome::Failed { same_cause: false };
        let PlanAction::Stop(reason) = end(&mut progress, 1, other) else { panic!() };
        assert!(reason.contains("6 of the 100 letters of step 2"), "{reason}");
        assert!(reason.contains("5 of them with the same cause"), "{reason}");
        assert_eq!((progress.failed, progress.failed_same_cause), (6, 5));
    }

    #[test]
    fn outcomes_of_an_earlier_step_are_counted_but_do_not_stop_a_later_one() {
        let mut progress = PlanProgress::new(1000);
        send(&mut progress, 5);
        end(&mut progress, 5, SETTLED);
        send(&mut progress, 100);
        let earlier = progress.step;
        end(&mut progress, 95, SETTLED);
        assert_ne!(progress.step, earlier, "it cannot fail now");
        for _ in 0..5 {
            let action = progress.on(PlanEvent::Outcome { step: earlier, outcome: SAME });
            assert!(matches!(action, PlanAction::Send { .. }), "{action:?}");
        }
        assert_eq!((progress.failed, progress.step_failed), (5, 0));
    }

    #[test]
    fn a_resumed_plan_begins_with_a_canary() {
        let mut progress = PlanProgress::new(1000);
        send(&mut progress, 5);
        assert!(matches!(end(&mut progress, 5, SAME), PlanAction::Stop(_)));
        let action = progress.on(PlanEvent::Resumed(1));
        assert_eq!(action, PlanAction::Send { at_most: 5, per_second: 5 });
        assert_eq!((progress.step, progress.failed, progress.resumes), (2, 5, 1));
    }

    #[test]
    fn a_plan_is_finished_when_everything_is_sent_and_has_an_outcome() {
        let mut progress = PlanProgress::new(8);
        send(&mut progress, 5);
        end(&mut progress, 5, SETTLED);
        assert_eq!(progress.next(), PlanAction::Send { at_most: 3, per_second: 10 });
        progress.on(PlanEvent::Taken(2));
        // One was purged since, and one between being recorded and being sent.
        assert_eq!(progress.on(PlanEvent::EndReached), PlanAction::Wait);
        assert_eq!(progress.skipped, 1);
        progress.on(PlanEvent::Gone { step: progress.step });
        assert_eq!(progress.on(PlanEvent::Sent(1)), PlanAction::Wait);
        assert_eq!(end(&mut progress, 1, LetterOutcome::Unknown), PlanAction::Finish);
        let PlanProgress { total, sent, settled, unknown, skipped, .. } = progress;
        assert_eq!((total, sent, settled, unknown, skipped), (8, 6, 5, 1, 2));
        assert_eq!((progress.left(), progress.awaited()), (0, 0));
        assert_eq!(PlanProgress::new(0).on(PlanEvent::EndReached), PlanAction::Finish);
    }

    #[test]
    fn the_number_of_open_letters_is_bounded() {
        let mut progress = PlanProgress::new(100_000);
        send(&mut progress, 5);
        end(&mut progress, 5, SETTLED);
        send(&mut progress, 100);
        end(&mut progress, 100, SETTLED);
        send(&mut progress, 500);
        end(&mut progress, 500, SETTLED);
        assert_eq!(send(&mut progress, 1000), PlanAction::Wait);
        let one = end(&mut progress, 1, SETTLED);
        assert_eq!(one, PlanAction::Send { at_most: 1, per_second: 200 });
    }

    #[test]
    fn counters_survive_being_stored() {
        let mut progress = PlanProgress::new(7);
        send(&mut progress, 5);
        let stored = serde_json::to_string(&progress).unwrap();
        assert_eq!(serde_json::from_str::<PlanProgress>(&stored).unwrap(), progress);
        assert_eq!(serde_json::from_str::<PlanProgress>("{}").unwrap(), PlanProgress::default());
    }
}
