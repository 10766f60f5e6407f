//! Random sequences of calls; every result and every state is compared with the state machine.
//!
//! `HEADWATER_SEQUENCES` sets ten times the number of sequences (default 1000), `HEADWATER_SEED` the seed, which is
//! printed. Time advances in steps of ten minutes, so that elapsed real time does not affect the results.

use std::ops::Range;
use std::time::Duration;

use headwater_stream::clock::Timestamp;

use super::env::{StoreTestEnv, TTL, event};
use super::random::{SeededRandom, from_environment, seed};
use crate::{TestFailure, TestResult};
use headwater_issue::state::{EndedRun, IssueState, Transition, TransitionEffect, apply};
use headwater_issue::{
    AfterFailure, Claim, ClaimEpoch, ClaimOptions, ClaimRelease, ClaimReleased, ClaimRenewal,
    CompletionOutcome, DebounceWindow, EventLogId, FailureOutcome, IssueId, IssueRetried,
    ProcessingStatus, QuarantineCleared, ReleaseReason, RunCompletion, RunFailure, RunResult,
    SweepOptions,
};

const SEQUENCES_DEFAULT: u64 = 1000;
const CALLS: usize = 40;
const ISSUES: usize = 3;
const MINUTE: Duration = Duration::from_secs(60);
/// Tolerance of comparisons of times, for the real time that elapses during a sequence.
const SLACK: Duration = Duration::from_secs(240);
const CRASHES_MAX: u32 = 3;
const ATTEMPTS_MAX: u32 = 3;

/// The expected state of one issue.
#[derive(Debug, Default)]
struct IssueModel {
    id: IssueId,
    name: String,
    state: IssueState,
    /// All recorded events: key, id, and whether processed.
    events: Vec<(String, EventLogId, bool)>,
    /// All acquired claims.
    claims: Vec<(ClaimEpoch, Vec<EventLogId>)>,
    /// All ended runs, oldest first.
    runs: Vec<EndedRun>,
}

impl IssueModel {
    fn apply(&mut self, transition: &Transition, now: Timestamp) -> TransitionEffect {
        let (state, effect) = apply(&self.state, transition, now);
        state.check_invariants().unwrap_or_else(|problem| panic!("{problem}: {state:?}"));
        self.runs.extend(EndedRun::of(&self.state, &state, transition));
        if let (Transition::Complete { epoch, .. }, TransitionEffect::Fenced) =
            (transition, &effect)
        {
            let expired =
                |run: &&mut EndedRun| run.epoch == *epoch && run.result == RunResult::Expired;
            self.runs.iter_mut().filter(expired).for_each(|run| run.result = RunResult::Fenced);
        }
        self.state = state;
        effect
    }

    fn unprocessed(&self) -> impl Iterator<Item = EventLogId> {
        self.events.iter().filter(|(.., processed)| !processed).map(|(_, id, _)| *id)
    }

    /// A claim to present: mostly the newest, sometimes an old one.
    fn any_claim(&self, random: &mut SeededRandom) -> (ClaimEpoch, Vec<EventLogId>) {
        match self.claims.last() {
            None => (ClaimEpoch(1), vec![]),
            Some(newest) if random.below(4) > 0 => newest.clone(),
            Some(_) => random.pick(&self.claims).clone(),
        }
    }
}

/// One sequence: its issues, and the time of the state machine.
struct Sequence<'a> {
    env: &'a StoreTestEnv,
    random: SeededRandom,
    now: Timestamp,
    issues: Vec<IssueModel>,
    /// The calls so far, for failure messages.
    calls: Vec<String>,
}

pub async fn random_sequences_of_calls_match_the_state_machine(env: StoreTestEnv) -> TestResult {
    let sequences = from_environment("HEADWATER_SEQUENCES").unwrap_or(SEQUENCES_DEFAULT) / 10;
    let seed = seed();
    for number in 0..sequences.max(1) {
        let mut sequence = Sequence::new(&env, number, seed).await?;
        for _ in 0..CALLS {
            let touched = sequence.call().await?;
            sequence.compare(touched).await?;
        }
        sequence.compare(0..ISSUES).await?;
        sequence.drain().await?;
    }
    env.assert_consistent().await
}

impl<'a> Sequence<'a> {
    async fn new(env: &'a StoreTestEnv, number: u64, seed: u64) -> TestResult<Self> {
        let random = SeededRandom::seeded(seed.wrapping_add(number.wrapping_mul(0x1234_5678_9abc)));
        let now = Timestamp::from_millis(1_800_000_000_000);
        let mut sequence = Self {
            env,
            random,
            now,
            issues: Vec::new(),
            calls: vec![format!("sequence {number}")],
        };
        for issue in 0..ISSUES {
            let name = format!("{seed}-{number}-{issue}");
            sequence.issues.push(IssueModel { name, ..IssueModel::default() });
            sequence.record(issue).await?;
        }
        Ok(sequence)
    }

    /// Makes a call, and returns the issues it may have changed.
    async fn call(&mut self) -> TestResult<Range<usize>> {
        let issue = usize::try_from(self.random.below(ISSUES as u64)).unwrap_or(0);
        match self.random.below(20) {
            0..4 => self.record(issue).await?,
            4..8 => self.claim(issue).await?,
            8 => self.heartbeat(issue).await?,
            9..12 => self.complete(issue).await?,
            12..14 => self.fail(issue).await?,
            14 => self.release_claims(issue).await?,
            15 => {
                self.sweep().await?;
                return Ok(0..ISSUES);
            }
            16 => self.release_or_retry(issue).await?,
            _ => {
                self.advance().await?;
                return Ok(0..0);
            }
        }
        Ok(issue..issue + 1)
    }

    async fn advance(&mut self) -> TestResult {
        let time = MINUTE * 10 * u32::try_from(1 + self.random.below(8)).unwrap_or(1);
        self.calls.push(format!("advance {time:?}"));
        self.now = self.now.after(time);
        self.env.advance(time).await
    }

    async fn record(&mut self, issue: usize) -> TestResult {
        let model = &mut self.issues[issue];
        let events_max = usize::try_from(self.random.below(3) * 3).unwrap_or_default();
        let debounce = match self.random.below(2) {
            0 => DebounceWindow { events_max, ..DebounceWindow::default() },
            _ => DebounceWindow { quiet_for: MINUTE * 20, max_wait: MINUTE * 40, events_max },
        };
        let count = 1 + self.random.below(3);
        let mut keys = Vec::new();
        for n in 0..count {
            let new = format!("{}/{}/{n}", model.name, model.events.len());
            let old = self.random.below(4) == 0 && !model.events.is_empty();
            keys.push(if old { self.random.pick(&model.events).0.clone() } else { new });
        }
        keys.dedup();
        self.calls.push(format!("record {issue} {keys:?} {debounce:?}"));
        let known =
            |model: &IssueModel, key: &str| model.events.iter().find(|one| one.0 == key).cloned();

        let events: Vec<_> = keys.iter().map(|key| event(&model.name, key)).collect();
        let recorded = self.env.store.record(&events, &debounce).await;
        let fresh = keys.iter().filter(|key| known(model, key).is_none()).count() as u64;
        let effect = match fresh {
            0 => TransitionEffect::Nothing,
            events => model.apply(&Transition::Record { events, debounce }, self.now),
        };
        let mut nudged = false;
        for (key, recorded) in keys.iter().zip(recorded) {
            let recorded = recorded?;
            model.id = recorded.issue_id;
            let before = known(model, key);
            assert_eq!(recorded.duplicate, before.is_some(), "{:?}", self.calls);
            let queued = model.state.status == ProcessingStatus::Queued;
            let wanted =
                before.as_ref().map_or(effect == TransitionEffect::Queued, |one| !one.2 && queued);
            assert_eq!(recorded.nudge, wanted && !nudged, "{:?}", self.calls);
            nudged |= wanted;
            match before {
                Some((_, id, _)) => assert_eq!(recorded.event_log_id, id),
                None => model.events.push((key.clone(), recorded.event_log_id, false)),
            }
        }
        Ok(())
    }

    async fn claim(&mut self, issue: usize) -> TestResult {
        let model = &mut self.issues[issue];
        let worker = (*self.random.pick(&["a", "b"])).to_owned();
        let events_max = usize::try_from(1 + self.random.below(4)).unwrap_or(1);
        self.calls.push(format!("claim {issue} by {worker}, {events_max} events"));
        let (ttl, crashes_max) = (TTL, CRASHES_MAX);
        let options = ClaimOptions { worker: worker.clone(), ttl, events_max, crashes_max };
        let claim = self.env.store.claim(&[model.id], &options).await?.remove(0);
        let effect = model.apply(&Transition::Claim { owner: worker, ttl, crashes_max }, self.now);
        let state = &model.state;
        let fits = match (&claim, &effect) {
            (Claim::Won(claimed), TransitionEffect::Won(epoch)) => {
                let events: Vec<_> = claimed.events.iter().map(|event| event.id).collect();
                let expected: Vec<_> = model.unprocessed().take(events_max).collect();
                assert_eq!(events, expected, "{:?}", self.calls);
                model.claims.push((*epoch, events));
                claimed.epoch == *epoch
            }
            (Claim::NotYet { wait, .. }, TransitionEffect::NotYet(not_before)) => {
                wait.abs_diff(not_before.since(self.now)) < SLACK
            }
            (Claim::Quarantined { just_now, .. }, effect) => {
                state.quarantined_at.is_some()
                    && *just_now == (*effect == TransitionEffect::Quarantined)
            }
            (Claim::Taken { owner, .. }, TransitionEffect::Nothing) => {
                Some(owner) == state.claim_owner.as_ref()
            }
            (Claim::Idle, TransitionEffect::Nothing) => {
                state.status == ProcessingStatus::Idle && state.quarantined_at.is_none()
            }
            _ => false,
        };
        assert!(fits, "{claim:?} is not {effect:?} after {:?}", self.calls);
        Ok(())
    }

    async fn heartbeat(&mut self, issue: usize) -> TestResult {
        let model = &mut self.issues[issue];
        let (epoch, _) = model.any_claim(&mut self.random);
        self.calls.push(format!("heartbeat {issue} {epoch}"));
        let renewal = self.env.store.heartbeat(&[(model.id, epoch)], TTL).await?.remove(0);
        let effect = model.apply(&Transition::Heartbeat { epoch, ttl: TTL }, self.now);
        let kept = match renewal {
            ClaimRenewal::Kept { pending_events, .. } => {
                assert_eq!(pending_events, model.state.pending_events, "{:?}", self.calls);
                true
            }
            ClaimRenewal::Lost => false,
        };
        assert_eq!(kept, effect == TransitionEffect::Kept, "{:?}", self.calls);
        Ok(())
    }

    async fn complete(&mut self, issue: usize) -> TestResult {
        let model = &mut self.issues[issue];
        let (epoch, event_log_ids) = model.any_claim(&mut self.random);
        self.calls.push(format!("complete {issue} {epoch}"));
        let issue_id = model.id;
        let run = RunCompletion { issue_id, epoch, event_log_ids, ..RunCompletion::default() };
        let completed = self.env.store.complete(std::slice::from_ref(&run)).await?.remove(0);
        let done = |one: &(String, EventLogId, bool)| !one.2 && run.event_log_ids.contains(&one.1);
        let processed = model.events.iter().filter(|one| done(one)).count() as u64;
        let effect = model.apply(&Transition::Complete { epoch, processed }, self.now);
        if matches!(effect, TransitionEffect::Queued | TransitionEffect::Finished) {
            model.events.iter_mut().filter(|one| done(one)).for_each(|one| one.2 = true);
        }
        let fits = match (completed, &effect) {
            (CompletionOutcome::Fenced, TransitionEffect::Fenced) => true,
            (CompletionOutcome::Committed { repeated: true, .. }, TransitionEffect::Repeated) => {
                true
            }
            (CompletionOutcome::Committed { requeued, repeated: false, .. }, effect) => {
                matches!(effect, TransitionEffect::Queued | TransitionEffect::Finished)
                    && requeued == (*effect == TransitionEffect::Queued)
            }
            _ => false,
        };
        assert!(fits, "{completed:?} is not {effect:?} after {:?}", self.calls);
        Ok(())
    }

    async fn fail(&mut self, issue: usize) -> TestResult {
        let model = &mut self.issues[issue];
        let (epoch, _) = model.any_claim(&mut self.random);
        let then = match self.random.below(5) {
            0 => AfterFailure::Quarantine,
            1 => AfterFailure::Defer { after: MINUTE * 10 },
            n => AfterFailure::Retry { after: MINUTE * 10 * u32::try_from(n).unwrap_or(1) },
        };
        let error = format!("failed after {} calls", self.calls.len());
        self.calls.push(format!("fail {issue} {epoch} {then:?}"));
        let failure = RunFailure { issue_id: model.id, epoch, error: error.clone(), then };
        let failed = self.env.store.fail(&[failure], ATTEMPTS_MAX).await?.remove(0);
        let transition = Transition::Fail { epoch, error, then, attempts_max: ATTEMPTS_MAX };
        let effect = model.apply(&transition, self.now);
        let fits = match (failed, &effect) {
            (FailureOutcome::Fenced, TransitionEffect::Fenced) => true,
            (FailureOutcome::Requeued { attempts, .. }, TransitionEffect::Queued)
            | (FailureOutcome::Quarantined { attempts }, TransitionEffect::Quarantined) => {
                attempts == model.state.attempts
            }
            _ => false,
        };
        assert!(fits, "{failed:?} is not {effect:?} after {:?}", self.calls);
        Ok(())
    }

    async fn release_claims(&mut self, issue: usize) -> TestResult {
        let model = &mut self.issues[issue];
        let (epoch, _) = model.any_claim(&mut self.random);
        let reason = *self.random.pick(&[ReleaseReason::Shutdown, ReleaseReason::Superseded]);
        self.calls.push(format!("release claim {issue} {epoch} {reason:?}"));
        let release = ClaimRelease { issue_id: model.id, epoch, reason };
        let released = self.env.store.release_claims(&[release]).await?.remove(0);
        let effect = model.apply(&Transition::ReleaseClaim { epoch, reason }, self.now);
        assert_eq!(
            released == ClaimReleased::Fenced,
            effect == TransitionEffect::Fenced,
            "{:?}",
            self.calls
        );
        Ok(())
    }

    async fn sweep(&mut self) -> TestResult {
        self.calls.push("sweep".into());
        let overdue = MINUTE * 20;
        let (nudge_overdue, crashes_max) = (overdue, CRASHES_MAX);
        let options = SweepOptions { nudge_overdue, crashes_max, ..SweepOptions::default() };
        let swept = self.env.store.sweep(&options).await?;
        for model in &mut self.issues {
            let expired = model.apply(&Transition::Expire { crashes_max: CRASHES_MAX }, self.now);
            let due = model.state.not_before.is_none_or(|not_before| not_before <= self.now);
            let mut nudge = expired == TransitionEffect::Queued && due;
            if expired == TransitionEffect::Nothing {
                nudge |= model.apply(&Transition::Nudge { overdue }, self.now)
                    == TransitionEffect::Queued;
            }
            let found = swept.nudges.iter().find(|one| one.issue_id == model.id);
            assert_eq!(found.is_some(), nudge, "{:?}", self.calls);
            assert_eq!(
                found.map(|one| one.event_log_id),
                model.unprocessed().next().filter(|_| nudge),
                "{:?}",
                self.calls
            );
            let quarantined = swept.quarantined.contains(&model.id);
            assert_eq!(quarantined, expired == TransitionEffect::Quarantined, "{:?}", self.calls);
        }
        Ok(())
    }

    async fn release_or_retry(&mut self, issue: usize) -> TestResult {
        let model = &mut self.issues[issue];
        if self.random.below(2) == 0 {
            self.calls.push(format!("release {issue}"));
            let released = self.env.store.release(model.id).await?;
            let expected = match model.apply(&Transition::Release, self.now) {
                TransitionEffect::Queued => QuarantineCleared::Queued,
                TransitionEffect::Finished => QuarantineCleared::Idle,
                _ => QuarantineCleared::NotQuarantined,
            };
            assert_eq!(released, expected, "{:?}", self.calls);
        } else {
            self.calls.push(format!("retry {issue}"));
            let retried = self.env.store.retry(model.id).await?;
            let expected = match (model.apply(&Transition::Retry, self.now), model.state.status) {
                (TransitionEffect::Queued, _) => IssueRetried::Queued,
                (_, ProcessingStatus::Processing) => IssueRetried::Processing,
                _ => IssueRetried::Idle,
            };
            assert_eq!(retried, expected, "{:?}", self.calls);
        }
        Ok(())
    }

    /// Compares issues with their models; times relative to the current time.
    async fn compare(&self, issues: Range<usize>) -> TestResult {
        for model in &self.issues[issues] {
            let facts = self.env.store.issue_facts(model.id).await?;
            let facts = facts.unwrap_or_else(|| panic!("{model:?} does not exist"));
            let (issue, state) = (&facts.issue, &model.state);
            let found = IssueState {
                status: issue.status,
                pending_events: issue.pending_events,
                claim_epoch: issue.claim_epoch,
                claim_owner: issue.claim_owner.clone(),
                attempts: issue.attempts,
                crashes: issue.crashes,
                superseded: issue.superseded,
                last_error: issue.last_error.clone(),
                ..IssueState::default()
            };
            let expected = IssueState {
                completed_epoch: ClaimEpoch::default(),
                claim_expires_at: None,
                not_before: None,
                first_pending_at: None,
                quarantined_at: None,
                nudged_at: None,
                ..state.clone()
            };
            assert_eq!(found, expected, "{:?}", self.calls);
            let runs = self.env.store.runs(model.id, None, CALLS + 1).await?;
            let run = |run: headwater_issue::IssueRun| EndedRun {
                epoch: run.epoch,
                worker: run.worker,
                result: run.result,
                error: run.error,
                events: run.events,
            };
            let runs: Vec<_> = runs.into_iter().rev().map(run).collect();
            assert_eq!(runs, model.runs, "{:?}", self.calls);
            let queued = state.status == ProcessingStatus::Queued;
            let times = [
                ("claim_expires_at", issue.claim_expires_at, state.claim_expires_at),
                ("not_before", issue.not_before, state.not_before),
                ("quarantined_at", issue.quarantined_at, state.quarantined_at),
                // `nudged_at` is undefined for idle issues.
                (
                    "nudged_at",
                    issue.nudged_at.filter(|_| queued),
                    state.nudged_at.filter(|_| queued),
                ),
            ];
            for (what, found, expected) in times {
                let fits = match (found, expected) {
                    (Some(found), Some(expected)) => {
                        let from_now = |time: Timestamp, now: Timestamp| {
                            i128::from(time.as_millis()) - i128::from(now.as_millis())
                        };
                        let apart = from_now(found, facts.now) - from_now(expected, self.now);
                        apart.unsigned_abs() < SLACK.as_millis()
                    }
                    (None, None) => true,
                    _ => false,
                };
                assert!(fits, "{what} is {found:?}, not {expected:?}, after {:?}", self.calls);
            }
        }
        Ok(())
    }

    /// After any sequence, an operator and a worker can process everything.
    async fn drain(mut self) -> TestResult {
        self.env.advance(MINUTE * 600).await?;
        for model in &mut self.issues {
            self.env.store.release(model.id).await?;
            for _ in 0..CALLS {
                let options =
                    ClaimOptions { ttl: TTL, crashes_max: 99, ..ClaimOptions::new("last") };
                let claim = self.env.store.claim(&[model.id], &options).await?.remove(0);
                let Claim::Won(claimed) = claim else { break };
                self.env.complete(super::env::completion(&claimed)).await?;
            }
            let after = self.env.issue(model.id).await?;
            assert_eq!(after.status, ProcessingStatus::Idle, "{:?}", self.calls);
            assert_eq!((after.pending_events, after.quarantined_at), (0, None), "{:?}", self.calls);
        }
        Ok::<_, TestFailure>(())
    }
}
