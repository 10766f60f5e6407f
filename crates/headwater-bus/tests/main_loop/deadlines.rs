//! A caller gets an answer at the deadline of its request or at its timeout, whatever the servers do.
//!
//! Backend calls may take a minute here, and the proxies stay stalled: a caller that waited for one of those calls
//! would not be answered within [`ANSWERED`].

use std::time::Duration;

use headwater_bus::{MainLoopError, RequestFailure, RequestId, Submission};
use serde_json::Value;
use tokio::time::timeout;

use crate::fixture::{Ask, Loop};
use crate::proxied_fixture::ProxiedFixture;

/// Far more than any deadline in these tests, far less than a backend call may take.
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
    // Without a deadline, the caller's timeout ends it.
    let asked = client.submit::<_, Value>(submit().timeout(Duration::from_millis(300)));
    let error = timeout(ANSWERED, asked).await.expect("answered in time").unwrap_err();
    assert!(matches!(error, MainLoopError::NotSubmitted { .. }), "{error}");
    assert!(error.is_transient());
}

async fn a_request_whose_reply_cannot_be_read_fails_at_its_deadline(proxied: ProxiedFixture) {
    // The worker connects through the proxies, too: it cannot reply any more.
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
    // The run was ended at its deadline, and its reply is available when the servers are.
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
