//! A caller is answered at the deadline of its request, or when its own time is up, whatever the servers do.
//!
//! Calls of the backend may take a minute here, and the proxies stay stalled: whoever waits for one of those calls is
//! not answered within [`ANSWERED`].

use std::time::Duration;

use headwater_bus::{MainLoopError, RequestFailure, RequestId, Submission};
use serde_json::Value;
use tokio::time::timeout;

use crate::fixture::{Ask, Loop};
use crate::proxied_fixture::ProxiedFixture;

/// Far more than a deadline of these tests, far less than a call of the backend may take.
const ANSWERED: Duration = Duration::from_secs(30);

tests_in!(
    redis,
    crate::proxied_fixture::ProxiedFixture::redis(),
    (flavor = "multi_thread", worker_threads = 2),
    a_request_that_cannot_be_submitted_fails_at_its_deadline,
    a_request_whose_reply_cannot_be_read_fails_at_its_deadline,
    a_wait_times_out_while_the_backend_is_unavailable,
);

tests_in!(
    cluster,
    crate::proxied_fixture::ProxiedFixture::cluster().await,
    (flavor = "multi_thread", worker_threads = 2),
    a_request_that_cannot_be_submitted_fails_at_its_deadline,
    a_request_whose_reply_cannot_be_read_fails_at_its_deadline,
    a_wait_times_out_while_the_backend_is_unavailable,
);

fn deadline_passed(asked: Result<headwater_bus::CompletedRequest<Value>, MainLoopError>) {
    let error = asked.unwrap_err();
    assert_eq!(error.failure(), Some(RequestFailure::DeadlinePassed), "{error}");
}

async fn a_request_that_cannot_be_submitted_fails_at_its_deadline(proxied: ProxiedFixture) {
    let client = proxied.fixture.client("desk").await;
    let backend = proxied.fixture.backend().await;
    let soon = backend.now().await.unwrap().after(Duration::from_millis(300));
    proxied.stall();
    let submit = || Submission::new(Ask::Echo("a".to_owned()));
    for submit in [submit().within(Duration::from_millis(300)), submit().deadline(soon)] {
        let asked = client.submit::<_, Value>(submit);
        deadline_passed(timeout(ANSWERED, asked).await.expect("answered at its deadline"));
    }
    // Without a deadline, the caller's own time ends it.
    let asked = client.submit::<_, Value>(submit().timeout(Duration::from_millis(300)));
    let error = timeout(ANSWERED, asked).await.expect("answered in time").unwrap_err();
    assert!(matches!(error, MainLoopError::NotSubmitted { .. }), "{error}");
    assert!(error.is_transient());
}

async fn a_request_whose_reply_cannot_be_read_fails_at_its_deadline(proxied: ProxiedFixture) {
    // The worker goes through the proxies, too: it cannot answer any more.
    let main_loop = Loop::default();
    let worker = proxied.fixture.worker(&main_loop).await;
    let client = proxied.fixture.client("desk").await;
    let id = RequestId::new("late").unwrap();
    let submit = Submission::new(Ask::Wait("a".to_owned())).id(id.clone());
    let asked = client.submit::<_, Value>(submit.within(Duration::from_secs(3)));
    let stalled = async {
        main_loop.begun.notified().await;
        proxied.stall();
    };
    let (asked, ()) = timeout(ANSWERED, async { tokio::join!(asked, stalled) })
        .await
        .expect("answered at its deadline");
    deadline_passed(asked);
    // The run was ended at its deadline, and its reply is there when the servers are back.
    proxied.heal();
    let reply = client.wait::<Value>(&id, ANSWERED * 2).await;
    deadline_passed(reply);
    let dropped = main_loop.log.lines().iter().any(|line| line == "dropped late");
    assert!(dropped, "{:?}", main_loop.log.lines());
    worker.stop().await.unwrap();
}

async fn a_wait_times_out_while_the_backend_is_unavailable(proxied: ProxiedFixture) {
    let client = proxied.fixture.client("desk").await;
    proxied.stall();
    let id = RequestId::new("never").unwrap();
    let waited = client.wait::<Value>(&id, Duration::from_millis(300));
    let error = timeout(ANSWERED, waited).await.expect("answered in time").unwrap_err();
    assert!(matches!(error, MainLoopError::TimedOut { .. }), "{error}");
}
