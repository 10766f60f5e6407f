//! Steps of the wall clock while issues wait, run and are delivered: nothing stalls, nothing is done twice, and live
//! workers do not count as dead.
#![cfg(all(feature = "sqlite", feature = "postgres"))]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_issue::{
    AfterFailure, Claim, ClaimOptions, ClaimRenewal, ClaimedIssue, DebounceWindow, DiagnosisReason,
    EventLogId, IssueId, NewOutboxRow, OutboxDelivery, OutboxKind, OutboxRow, OutboxSettled,
    OutboxSettlement, RunCompletion, RunFailure, Store, StoreOptions, SweepOptions, connect,
    explain,
};
use headwater_stream::clock::{Clock, TestClock};
use headwater_testkit::{Postgres, WallClock};
use support::{LONG, event_of};

const HOUR: Duration = Duration::from_secs(3600);
const TTL: Duration = Duration::from_secs(60);
const WORKER_TTL: Duration = Duration::from_secs(15);
const DEBOUNCE: DebounceWindow = DebounceWindow {
    quiet_for: Duration::from_millis(800),
    max_wait: Duration::from_secs(5),
    events_max: 0,
};
const WORKER: &str = "worker";

/// Longer than any wait in this file after a step: a claim of a dead worker, a backoff, a nudge.
const BOUND: Duration = Duration::from_secs(4 * 60);

fn claiming() -> ClaimOptions {
    // Workers crash often in this test.
    ClaimOptions { ttl: TTL, crashes_max: 1_000_000, ..ClaimOptions::new(WORKER) }
}

fn sweeping() -> SweepOptions {
    SweepOptions { crashes_max: 1_000_000, ..SweepOptions::default() }
}

/// A reply to each event of a run.
fn completion(claimed: &ClaimedIssue) -> RunCompletion {
    let reply = |id: EventLogId| NewOutboxRow {
        kind: OutboxKind::Reply,
        target: String::new(),
        payload: format!(r#"{{"event":{id}}}"#),
    };
    let event_log_ids: Vec<EventLogId> = claimed.events.iter().map(|event| event.id).collect();
    RunCompletion {
        issue_id: claimed.issue.id,
        epoch: claimed.epoch,
        outbox: event_log_ids.iter().copied().map(reply).collect(),
        event_log_ids,
        ..RunCompletion::default()
    }
}

struct SeededRandom(u64);

impl SeededRandom {
    fn new() -> Self {
        let seed = std::env::var("HEADWATER_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| RandomState::new().hash_one("seed") >> 32);
        println!("HEADWATER_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, end: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).expect("an index fits")
    }
}

/// A live worker and deliverer with their runs and rows, and the store they share with crashed ones.
struct Simulation {
    clock: TestClock,
    store: Arc<dyn Store>,
    random: SeededRandom,
    issues: BTreeSet<IssueId>,
    recorded: BTreeSet<EventLogId>,
    runs: Vec<(ClaimedIssue, Duration)>,
    rows: Vec<(OutboxRow, Duration)>,
    /// Number of completed deliveries of each reply.
    sent: BTreeMap<String, usize>,
    /// Whether runs and deliveries may fail.
    may_fail: bool,
}

impl Simulation {
    async fn new(random: SeededRandom) -> Result<Self> {
        let clock = TestClock::default();
        let options = StoreOptions { clock: Arc::new(clock.clone()), ..StoreOptions::default() };
        let store = connect("sqlite::memory:", &options).await?;
        store.ensure_integration("main", "gitlab").await?;
        store.heartbeat_worker(WORKER, WORKER_TTL).await?;
        let (issues, recorded, runs, rows, sent) = Default::default();
        Ok(Self { clock, store, random, issues, recorded, runs, rows, sent, may_fail: true })
    }

    /// Advances time. Live processes renew their claims in time.
    async fn advance(&mut self, time: Duration) -> Result<()> {
        self.clock.advance(time);
        let now = self.clock.monotonic();
        self.store.heartbeat_worker(WORKER, WORKER_TTL).await?;
        for (claimed, renewed) in &mut self.runs {
            if now - *renewed >= TTL / 4 {
                let claim = (claimed.issue.id, claimed.epoch);
                let renewal = self.store.heartbeat(&[claim], TTL).await?.remove(0);
                assert!(
                    matches!(renewal, ClaimRenewal::Kept { .. }),
                    "a live worker lost its claim"
                );
                *renewed = now;
            }
        }
        // A delivery takes at most half of the TTL of its row.
        while let Some(late) = self.rows.iter().position(|(_, taken)| now - *taken >= TTL / 2) {
            self.settle(late).await?;
        }
        Ok(())
    }

    async fn record(&mut self) -> Result<()> {
        let (issue, event) = (self.random.below(6).to_string(), self.recorded.len().to_string());
        let recorded = self.store.record(&[event_of(&issue, &event)], &DEBOUNCE).await.remove(0)?;
        self.issues.insert(recorded.issue_id);
        self.recorded.insert(recorded.event_log_id);
        Ok(())
    }

    /// Claims the issues that a sweep nudges.
    async fn sweep_and_claim(&mut self) -> Result<()> {
        let swept = self.store.sweep(&sweeping()).await?;
        let nudged: Vec<IssueId> = swept.nudges.iter().map(|nudge| nudge.issue_id).collect();
        self.claim(&nudged).await
    }

    async fn claim(&mut self, issues: &[IssueId]) -> Result<()> {
        for claim in self.store.claim(issues, &claiming()).await? {
            if let Claim::Won(claimed) = claim {
                let is_held = self.runs.iter().any(|(held, _)| held.issue.id == claimed.issue.id);
                assert!(!is_held, "an issue in flight was claimed again");
                self.runs.push((*claimed, self.clock.monotonic()));
            }
        }
        Ok(())
    }

    async fn take(&mut self) -> Result<()> {
        for row in self.store.take_outbox(WORKER, 10, TTL).await? {
            let is_held = self.rows.iter().any(|(held, _)| held.id == row.id);
            assert!(!is_held, "a reply in flight was taken by another deliverer");
            self.rows.push((row, self.clock.monotonic()));
        }
        Ok(())
    }

    async fn settle(&mut self, index: usize) -> Result<()> {
        let (row, _) = self.rows.swap_remove(index);
        let fails = self.may_fail && self.random.below(4) == 0;
        let delivery = if fails {
            OutboxDelivery::Unavailable { after: Duration::from_secs(30), error: "busy".into() }
        } else {
            *self.sent.entry(row.payload.clone()).or_default() += 1;
            OutboxDelivery::Delivered
        };
        let settlement = OutboxSettlement { id: row.id, deliveries: row.deliveries, delivery };
        let settled = self.store.settle_outbox(&[settlement]).await?;
        assert_eq!(settled, [OutboxSettled::Done], "a live deliverer lost its row");
        Ok(())
    }

    async fn end_run(&mut self, index: usize) -> Result<()> {
        let (claimed, _) = self.runs.swap_remove(index);
        let (issue_id, epoch) = (claimed.issue.id, claimed.epoch);
        match self.random.below(8) {
            // The run crashes; the other runs of the worker continue.
            0 => {}
            1 => {
                let then = AfterFailure::Defer { after: Duration::from_secs(20) };
                let failure = RunFailure { issue_id, epoch, error: "busy".into(), then };
                self.store.fail(&[failure], 1_000_000).await?;
            }
            _ => {
                let completed = self.store.complete(&[completion(&claimed)]).await?;
                assert!(
                    matches!(completed[0], headwater_issue::CompletionOutcome::Committed { .. }),
                    "the completion of a live worker was fenced"
                );
            }
        }
        Ok(())
    }

    /// Steps the clock, and checks at once that no live worker is reported as dead.
    async fn step_clock(&mut self) -> Result<()> {
        let by = [HOUR, HOUR * 24 * 30, Duration::from_secs(30)][self.random.index(3)];
        if self.random.below(2) == 0 {
            self.clock.step_back(by);
        } else {
            self.clock.step_forward(by);
        }
        let workers = self.store.workers().await?;
        assert!(workers.iter().any(|worker| worker.worker == WORKER), "a worker counts as dead");
        for issue in &self.issues {
            let diagnosis = explain(self.store.as_ref(), *issue).await?;
            assert!(!matches!(diagnosis.reason, DiagnosisReason::NoWorker), "{diagnosis}");
        }
        Ok(())
    }

    async fn act(&mut self) -> Result<()> {
        match self.random.below(20) {
            0..4 => self.record().await?,
            4..8 => {
                let time = Duration::from_millis(self.random.below(3000));
                self.advance(time).await?;
            }
            8 => self.step_clock().await?,
            9..12 => self.sweep_and_claim().await?,
            12 => {
                let all: Vec<IssueId> = self.issues.iter().copied().collect();
                self.claim(&all).await?;
            }
            13..15 if !self.runs.is_empty() => {
                let index = self.random.index(self.runs.len());
                self.end_run(index).await?;
            }
            15..17 => self.take().await?,
            17 | 18 if !self.rows.is_empty() => {
                let index = self.random.index(self.rows.len());
                self.settle(index).await?;
            }
            // A delivery crashes before it is sent; the other rows continue.
            19 if !self.rows.is_empty() => {
                let index = self.random.index(self.rows.len());
                self.rows.swap_remove(index);
            }
            _ => {}
        }
        Ok(())
    }

    /// Everything completes within a time that does not depend on clock steps.
    async fn finish(&mut self) -> Result<()> {
        self.may_fail = false;
        let began = self.clock.monotonic();
        loop {
            self.sweep_and_claim().await?;
            while !self.runs.is_empty() {
                let (claimed, _) = self.runs.swap_remove(0);
                self.store.complete(&[completion(&claimed)]).await?;
            }
            self.take().await?;
            while !self.rows.is_empty() {
                self.settle(0).await?;
            }
            let (report, backlog) =
                (self.store.check_consistency(10).await?, self.store.backlog().await?);
            if report.pending == 0 && backlog.outbox_pending == 0 {
                return Ok(());
            }
            let waited = self.clock.monotonic() - began;
            assert!(waited < BOUND, "stalled: {report:?} {backlog:?}");
            self.advance(Duration::from_millis(500)).await?;
        }
    }
}

#[tokio::test]
async fn random_clock_steps_neither_stall_lose_nor_duplicate_work() -> Result<()> {
    let mut random = SeededRandom::new();
    for _ in 0..40 {
        let mut simulation = Simulation::new(SeededRandom(random.below(u64::MAX))).await?;
        for _ in 0..300 {
            simulation.act().await?;
        }
        simulation.step_clock().await?;
        simulation.finish().await?;
        let expected: BTreeMap<String, usize> =
            simulation.recorded.iter().map(|id| (format!(r#"{{"event":{id}}}"#), 1)).collect();
        assert_eq!(simulation.sent, expected, "each event has one reply");
    }
    Ok(())
}

#[tokio::test]
async fn waiting_issues_are_due_in_time_after_a_clock_step_back_before_a_restart() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let url = format!("sqlite:{}", directory.path().join("issues.db").display());
    let clock = TestClock::default();
    let options = StoreOptions { clock: Arc::new(clock.clone()), ..StoreOptions::default() };
    let store = connect(&url, &options).await?;
    store.ensure_integration("main", "gitlab").await?;
    let issue = store.record(&[event_of("1", "a")], &DEBOUNCE).await.remove(0)?.issue_id;
    store.sweep(&sweeping()).await?;
    store.close().await;

    clock.step_back(HOUR);
    let store = connect(&url, &options).await?;
    clock.advance(DEBOUNCE.quiet_for);
    let claim = store.claim(&[issue], &claiming()).await?.remove(0);
    assert!(matches!(claim, Claim::Won(_)), "{claim:?}");
    Ok(())
}

#[tokio::test]
async fn a_clock_step_forward_does_not_remove_fresh_rows() -> Result<()> {
    let mut simulation = Simulation::new(SeededRandom(1)).await?;
    simulation.record().await?;
    simulation.clock.advance(DEBOUNCE.quiet_for);
    simulation.finish().await?;
    let options = sweeping();
    simulation.clock.step_forward(options.keep * 2);
    assert_eq!(simulation.store.sweep(&options).await?.pruned, 0);
    simulation.clock.advance(options.keep);
    assert_eq!(simulation.store.sweep(&options).await?.pruned, 1);
    Ok(())
}

/// Opens a store on a server whose clock the test sets.
async fn open(url: &str) -> Result<Arc<dyn Store>> {
    let options = StoreOptions { call_deadline: LONG, ..StoreOptions::default() };
    let store = connect(url, &options).await?;
    store.ensure_integration("main", "gitlab").await?;
    store.heartbeat_worker(WORKER, LONG * 10).await?;
    Ok(store)
}

/// Long TTL, because these tests use real time on a possibly slow machine.
const LONG_TTL: Duration = Duration::from_secs(600);

fn claiming_with_long_ttl() -> ClaimOptions {
    ClaimOptions { ttl: LONG_TTL, ..claiming() }
}

fn offset(is_back: bool) -> i64 {
    if is_back { -3600 } else { 3600 }
}

#[tokio::test(flavor = "multi_thread")]
async fn on_postgres_a_clock_step_ends_waits_and_keeps_claims_and_taken_rows() -> Result<()> {
    for is_back in [true, false] {
        let clock = WallClock::start()?;
        let server = Postgres::start_at(&clock)?;
        let database = server.database()?;
        let (store, other) = (open(&database.url()).await?, open(&database.url()).await?);
        let record = async |issue: &str, debounce: &DebounceWindow| {
            store.record(&[event_of(issue, "a")], debounce).await.remove(0)
        };
        // One issue waits, one is in a run; of three replies one is in flight, one waits behind it, and one has failed.
        let long = DebounceWindow { quiet_for: LONG * 30, max_wait: LONG * 30, ..DEBOUNCE };
        let waits = record("1", &long).await?.issue_id;
        let held = record("2", &DebounceWindow::default()).await?.issue_id;
        let answered = [
            record("3", &DebounceWindow::default()).await?.issue_id,
            record("4", &DebounceWindow::default()).await?.issue_id,
        ];
        let mut completions = Vec::new();
        for claim in store.claim(&answered, &claiming_with_long_ttl()).await? {
            let Claim::Won(claimed) = claim else { panic!("{claim:?}") };
            completions.push(completion(&claimed));
        }
        let behind = completions[0].outbox[0].clone();
        completions[0].outbox.push(NewOutboxRow { payload: r#"{"event":0}"#.into(), ..behind });
        store.complete(&completions).await?;
        let claim = store.claim(&[held], &claiming_with_long_ttl()).await?.remove(0);
        let Claim::Won(claimed) = claim else { panic!("{claim:?}") };
        let mut rows = store.take_outbox(WORKER, 10, LONG_TTL).await?;
        assert_eq!(rows.len(), 2);
        let failed = rows.pop().context("two rows")?;
        let delivery = OutboxDelivery::Unavailable { after: LONG * 30, error: "busy".into() };
        let (id, deliveries) = (failed.id, failed.deliveries);
        store.settle_outbox(&[OutboxSettlement { id, deliveries, delivery }]).await?;
        // Both processes read the clock.
        for store in [&store, &other] {
            assert_eq!(store.sweep(&sweeping()).await?.requeued, 0);
        }

        clock.set(offset(is_back))?;
        // In any order of calls, live workers are alive and keep their claims and rows.
        for store in [&other, &store] {
            assert_eq!(store.workers().await?.len(), 1, "back: {is_back}");
            let diagnosis = explain(store.as_ref(), waits).await?;
            assert!(!matches!(diagnosis.reason, DiagnosisReason::NoWorker), "{diagnosis}");
            let again = store.take_outbox("other", 10, LONG_TTL).await?;
            assert!(again.iter().all(|row| row.id != rows[0].id), "it is in flight: {again:?}");
            let swept = store.sweep(&sweeping()).await?;
            assert_eq!(swept.requeued, 0, "the claim is held; back: {is_back}");
        }
        let renewal = store.heartbeat(&[(held, claimed.epoch)], LONG_TTL).await?;
        assert!(matches!(renewal[0], ClaimRenewal::Kept { .. }), "{renewal:?}");
        if is_back {
            // An issue whose wait now ends an hour ahead is due.
            let claim = store.claim(&[waits], &claiming_with_long_ttl()).await?.remove(0);
            assert!(matches!(claim, Claim::Won(_)), "{claim:?}");
        }
        let (id, deliveries) = (rows[0].id, rows[0].deliveries);
        let delivery = OutboxDelivery::Delivered;
        let settled = store.settle_outbox(&[OutboxSettlement { id, deliveries, delivery }]).await?;
        assert_eq!(settled, [OutboxSettled::Done]);
        // The row behind it can be taken now, although it was written before the step.
        let next = other.take_outbox("other", 10, LONG_TTL).await?;
        assert!(next.iter().any(|row| row.issue_id == answered[0]), "{next:?}; back: {is_back}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn on_postgres_a_clock_step_right_after_the_opening_is_detected() -> Result<()> {
    let clock = WallClock::start()?;
    let server = Postgres::start_at(&clock)?;
    let database = server.database()?;
    let working = open(&database.url()).await?;
    let unused = connect(&database.url(), &StoreOptions::default()).await?;
    clock.set(3600)?;
    assert_eq!(unused.workers().await?.len(), 1);
    working.close().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn on_postgres_a_process_started_after_a_clock_step_back_ends_waits() -> Result<()> {
    let clock = WallClock::start()?;
    let server = Postgres::start_at(&clock)?;
    let database = server.database()?;
    let store = open(&database.url()).await?;
    let issue = store.record(&[event_of("1", "a")], &DEBOUNCE).await.remove(0)?.issue_id;
    store.sweep(&sweeping()).await?;
    store.close().await;
    clock.set(-3600)?;
    let store = open(&database.url()).await?;
    let swept = store.sweep(&sweeping()).await?;
    assert_eq!(swept.nudges.len(), 1, "{swept:?}");
    let claim = store.claim(&[issue], &claiming_with_long_ttl()).await?.remove(0);
    assert!(matches!(claim, Claim::Won(_)), "{claim:?}");
    Ok(())
}
