//! Claims and heartbeats.

use std::time::Duration;

use super::env::{StoreTestEnv, TTL, event, ids, options, won};
use crate::TestResult;
use headwater_issue::limits::{PAYLOAD_BYTES_MAX, RUN_BYTES_MAX};
use headwater_issue::{
    Claim, ClaimEpoch, ClaimOptions, ClaimRenewal, DebounceWindow, IssueId, NewEvent,
    ProcessingStatus,
};

pub async fn a_claim_returns_all_pending_events_in_order(env: StoreTestEnv) -> TestResult {
    let mut recorded = Vec::new();
    for key in ["a", "b", "c"] {
        recorded.push(env.record("42", key).await?);
    }
    let claimed = env.claim(recorded[0].issue_id).await?;
    assert_eq!(ids(&claimed), recorded.iter().map(|one| one.event_log_id).collect::<Vec<_>>());
    assert_eq!(claimed.epoch, ClaimEpoch(1));
    assert_eq!(
        (claimed.issue.status, claimed.issue.pending_events),
        (ProcessingStatus::Processing, 3)
    );
    assert_eq!(claimed.issue.claim_owner.as_deref(), Some("a"));
    assert!(claimed.issue.processing_started_at.is_some());
    assert!(claimed.expires_at > claimed.issue.updated_at);
    env.assert_consistent().await
}

pub async fn a_claim_returns_at_most_events_max_events(env: StoreTestEnv) -> TestResult {
    let mut recorded = Vec::new();
    for key in ["a", "b", "c"] {
        recorded.push(env.record("42", key).await?);
    }
    let options = ClaimOptions { events_max: 2, ..options("a") };
    let claimed = won(env.store.claim(&[recorded[0].issue_id], &options).await?.remove(0));
    assert_eq!(ids(&claimed), [recorded[0].event_log_id, recorded[1].event_log_id]);
    Ok(())
}

pub async fn a_claim_is_limited_in_bytes_and_never_empty(env: StoreTestEnv) -> TestResult {
    let payload = format!("\"{}\"", "x".repeat(PAYLOAD_BYTES_MAX - 2));
    let most = RUN_BYTES_MAX / PAYLOAD_BYTES_MAX;
    let events: Vec<NewEvent> = (0..most + 3)
        .map(|n| NewEvent { payload: payload.clone(), ..event("42", &n.to_string()) })
        .collect();
    let issue = env.record_all(&events).await?[0].issue_id;
    assert_eq!(env.claim(issue).await?.events.len(), most);
    Ok(())
}

pub async fn a_second_worker_gets_the_owner_of_the_claim(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    let second = env.second.claim(&[issue], &options("b")).await?.remove(0);
    assert_eq!(second, Claim::Taken { owner: "a".into(), expires_at: claimed.expires_at });
    Ok(())
}

pub async fn a_claim_of_an_idle_or_missing_issue_reports_so(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    env.complete(super::env::completion(&claimed)).await?;
    let claims = env.store.claim(&[issue, IssueId(987_654)], &options("a")).await?;
    assert_eq!(claims, [Claim::Idle, Claim::Missing]);
    Ok(())
}

pub async fn an_issue_named_twice_is_claimed_once(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claims = env.store.claim(&[issue, issue], &options("a")).await?;
    assert!(matches!(claims[0], Claim::Won(_)), "{claims:?}");
    assert!(matches!(claims[1], Claim::Taken { .. }), "{claims:?}");
    Ok(())
}

pub async fn results_of_a_batch_of_claims_are_in_order(env: StoreTestEnv) -> TestResult {
    let mut issues = Vec::new();
    for name in ["1", "2", "3"] {
        issues.push(env.record(name, name).await?.issue_id);
    }
    env.claim(issues[1]).await?;
    let asked = [issues[2], IssueId(987_654), issues[1], issues[0]];
    let claims = env.second.claim(&asked, &options("b")).await?;
    assert_eq!(won(claims[0].clone()).issue.id, issues[2]);
    assert_eq!(claims[1], Claim::Missing);
    assert!(matches!(claims[2], Claim::Taken { .. }));
    assert_eq!(won(claims[3].clone()).issue.id, issues[0]);
    assert_eq!(won(claims[3].clone()).events.len(), 1);
    Ok(())
}

pub async fn an_expired_claim_goes_to_the_next_worker_with_a_new_epoch(
    env: StoreTestEnv,
) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let first = env.claim(issue).await?;
    env.advance(TTL).await?;
    let second = won(env.second.claim(&[issue], &options("b")).await?.remove(0));
    assert!(second.epoch > first.epoch);
    assert_eq!(ids(&second), ids(&first));
    assert_eq!((second.issue.crashes, second.issue.attempts), (1, 0));
    assert_eq!(second.issue.last_error.as_deref(), Some("claim of worker `a` expired"));
    env.assert_consistent().await
}

pub async fn too_many_expired_claims_quarantine_the_issue(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let options = ClaimOptions { crashes_max: 2, ..options("a") };
    for _ in 0..2 {
        won(env.store.claim(&[issue], &options).await?.remove(0));
        env.advance(TTL).await?;
    }
    let claim = env.store.claim(&[issue], &options).await?.remove(0);
    assert!(matches!(claim, Claim::Quarantined { just_now: true, .. }), "{claim:?}");
    let claim = env.store.claim(&[issue], &options).await?.remove(0);
    assert!(matches!(claim, Claim::Quarantined { just_now: false, .. }), "{claim:?}");
    env.assert_consistent().await
}

pub async fn a_heartbeat_renews_a_claim_and_reports_newer_events(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    env.advance(TTL / 2).await?;
    let renewal = env.store.heartbeat(&[(issue, claimed.epoch)], TTL).await?.remove(0);
    let ClaimRenewal::Kept { expires_at, pending_events } = renewal else { panic!("{renewal:?}") };
    assert!(!claimed.has_newer_events(pending_events));
    let before = env.issue(issue).await?;
    assert_eq!(before.claim_expires_at, Some(expires_at));
    let checked = env.store.check_claims(&[(issue, claimed.epoch)]).await?;
    assert_eq!(checked, [ClaimRenewal::Kept { expires_at, pending_events }]);
    assert_eq!(env.issue(issue).await?, before, "a check changes nothing");
    env.advance(TTL / 2 + Duration::from_secs(10)).await?;
    let second = env.second.claim(&[issue], &options("b")).await?.remove(0);
    assert!(matches!(second, Claim::Taken { .. }), "{second:?}");

    env.store.record(&[event("42", "b")], &DebounceWindow::default()).await.remove(0)?;
    let checked = env.store.check_claims(&[(issue, claimed.epoch)]).await?;
    let ClaimRenewal::Kept { pending_events, .. } = checked[0] else { panic!("{checked:?}") };
    assert!(claimed.has_newer_events(pending_events));
    let renewal = env.store.heartbeat(&[(issue, claimed.epoch)], TTL).await?.remove(0);
    let ClaimRenewal::Kept { pending_events, .. } = renewal else { panic!("{renewal:?}") };
    assert!(claimed.has_newer_events(pending_events));
    Ok(())
}

pub async fn a_heartbeat_of_a_lost_claim_reports_the_loss_and_changes_nothing(
    env: StoreTestEnv,
) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let other = env.record("43", "b").await?.issue_id;
    let lost = env.claim(issue).await?;
    env.advance(TTL).await?;
    won(env.second.claim(&[issue], &options("b")).await?.remove(0));
    let kept = env.claim(other).await?;
    let before = env.issue(issue).await?;
    let claims = [(issue, lost.epoch), (other, kept.epoch), (IssueId(987_654), ClaimEpoch(1))];
    for renewals in
        [env.store.check_claims(&claims).await?, env.store.heartbeat(&claims, TTL).await?]
    {
        assert_eq!((renewals[0], renewals[2]), (ClaimRenewal::Lost, ClaimRenewal::Lost));
        assert!(matches!(renewals[1], ClaimRenewal::Kept { .. }));
    }
    assert_eq!(env.issue(issue).await?, before);
    Ok(())
}

pub async fn each_issue_of_a_batch_is_claimed_with_its_own_events(env: StoreTestEnv) -> TestResult {
    let taken = env.record("taken", "t").await?.issue_id;
    won(env.second.claim(&[taken], &options("b")).await?.remove(0));
    let mut expected = Vec::new();
    // From the newest issue to the oldest, which is not the order of ids.
    for issue in (0..5).rev() {
        let mut recorded = Vec::new();
        for event in 0..=issue {
            recorded.push(env.record(&issue.to_string(), &format!("{issue}-{event}")).await?);
        }
        let ids: Vec<_> = recorded.iter().map(|one| one.event_log_id).collect();
        expected.push((recorded[0].issue_id, ids));
    }
    expected.reverse();
    let mut asked: Vec<IssueId> = expected.iter().map(|(issue, _)| *issue).collect();
    asked.insert(2, taken);
    asked.insert(4, IssueId(i64::MAX));
    asked.push(asked[0]);
    let options = ClaimOptions { events_max: 3, ..options("a") };
    let mut claims = env.store.claim(&asked, &options).await?;
    assert!(matches!(&claims[7], Claim::Taken { owner, .. } if owner == "a"), "{:?}", claims[7]);
    claims.truncate(7);
    assert_eq!(claims.remove(4), Claim::Missing);
    let second = claims.remove(2);
    assert!(matches!(&second, Claim::Taken { owner, .. } if owner == "b"), "{second:?}");
    for ((issue, events), claim) in expected.iter().zip(claims) {
        let claimed = won(claim);
        assert_eq!(claimed.issue.id, *issue);
        assert_eq!(ids(&claimed), events[..events.len().min(3)]);
        assert_eq!(claimed.issue.pending_events, events.len() as u64);
        let read = env.issue(*issue).await?;
        assert_eq!(claimed.issue, read, "the claim returns the issue as it is read");
    }
    env.assert_consistent().await
}
