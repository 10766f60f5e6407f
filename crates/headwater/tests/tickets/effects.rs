//! The effect ledger in SQL: intents, outcomes and fencing.

use std::time::Duration;

use headwater::desk::EffectLedger;
use headwater::desk::effects::{Effect, EffectBegin, EffectOutcome, EffectStatus, PlannedCall};
use headwater_issue::{Claim, ClaimEpoch, ClaimOptions, EventLogId, IssueId};
use serde_json::json;

use crate::{Fixture, open_ticket};

const LEASE: Duration = Duration::from_secs(30);

fn refund(order: u64) -> PlannedCall {
    PlannedCall { tool: "refund".into(), arguments: json!({"order": order}), request: 1 }
}

async fn claim(fixture: &Fixture, issue_id: IssueId, worker: &str, ttl: Duration) -> ClaimEpoch {
    let options = ClaimOptions { ttl, ..ClaimOptions::new(worker) };
    match fixture.store.claim(&[issue_id], &options).await.unwrap().remove(0) {
        Claim::Won(claimed) => claimed.epoch,
        other => panic!("{other:?}"),
    }
}

fn started(begun: EffectBegin) -> Effect {
    match begun {
        EffectBegin::Started(effect) => effect,
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn a_run_that_has_lost_its_claim_begins_no_effect(fixture: Fixture) {
    let issue = open_ticket(&fixture).await.issue_id;
    let begin = async |epoch, order| {
        fixture.tickets.begin_effect(issue, epoch, &refund(order), LEASE).await.unwrap()
    };
    assert_eq!(begin(ClaimEpoch(0), 1).await, EffectBegin::Fenced, "nobody has claimed it");
    let first = claim(&fixture, issue, "one", Duration::from_millis(50)).await;
    started(begin(first, 1).await);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let second = claim(&fixture, issue, "two", LEASE).await;
    assert_eq!(begin(first, 2).await, EffectBegin::Fenced, "another worker has claimed it");
    started(begin(second, 2).await);
    let all = fixture.tickets.effects_of(issue, EventLogId(1)).await.unwrap();
    assert_eq!(all.iter().map(|one| &one.call).collect::<Vec<_>>(), [&refund(1), &refund(2)]);
}

pub(crate) async fn a_call_has_one_row_one_key_and_one_outcome(fixture: Fixture) {
    let issue = open_ticket(&fixture).await.issue_id;
    let epoch = claim(&fixture, issue, "one", LEASE).await;
    let begin = async |call: &PlannedCall, lease| {
        fixture.tickets.begin_effect(issue, epoch, call, lease).await.unwrap()
    };
    let end = async |effect: &Effect, attempt, outcome: EffectOutcome| {
        fixture.tickets.end_effect(effect.key, attempt, &outcome).await.unwrap();
    };
    let all = async || fixture.tickets.effects_of(issue, EventLogId(1)).await.unwrap();
    // While an attempt may be in progress there is no other one.
    let call = refund(1);
    let first = started(begin(&call, LEASE).await);
    assert!(matches!(begin(&call, LEASE).await, EffectBegin::InProgress(left) if left <= LEASE));
    // Without an outcome the next attempt has the same key.
    end(&first, 1, EffectOutcome::Open("no response".into())).await;
    let open = all().await.remove(0);
    assert_eq!(
        (open.status, open.problem.as_deref()),
        (EffectStatus::Started, Some("no response"))
    );
    let again = started(begin(&call, LEASE).await);
    assert_eq!((again.key, again.attempts, again.number), (first.key, 2, first.number));
    // A failure of the first attempt says nothing about the second one.
    end(&first, 1, EffectOutcome::Failed("{}".into())).await;
    assert_eq!(all().await[0].status, EffectStatus::Started);
    // Success is success, whoever tells it, and stays.
    end(&first, 1, EffectOutcome::Done("{\"ok\":true}".into())).await;
    end(&again, 2, EffectOutcome::Unknown("late".into())).await;
    match begin(&call, LEASE).await {
        EffectBegin::Ended(effect) => {
            assert_eq!(
                (effect.status, effect.result.as_deref()),
                (EffectStatus::Done, Some("{\"ok\":true}"))
            );
        }
        other => panic!("{other:?}"),
    }
    // Another request is another call.
    let other = PlannedCall { request: 2, ..call.clone() };
    assert_ne!(started(begin(&other, LEASE).await).key, first.key);
    // It has no outcome, so every run of the issue sees it.
    assert_eq!(all().await.len(), 2);
    // Concurrent attempts of one call: one begins.
    let third = PlannedCall { request: 3, ..call };
    let attempts = (0..8).map(|_| {
        let (tickets, call) = (fixture.tickets.clone(), third.clone());
        tokio::spawn(async move { tickets.begin_effect(issue, epoch, &call, LEASE).await.unwrap() })
    });
    let mut begun = 0;
    for attempt in attempts.collect::<Vec<_>>() {
        begun += usize::from(matches!(attempt.await.unwrap(), EffectBegin::Started(_)));
    }
    assert_eq!(begun, 1);
}
