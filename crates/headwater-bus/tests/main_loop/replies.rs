//! Late replies, many replies, and the retention of replies.

use std::time::Duration;

use headwater_bus::{
    MainLoopClientConfig, MainLoopConfig, MainLoopError, ReplyConfig, RequestId, Submission,
};
use headwater_stream::SetName;

use crate::fixture::{Ask, Fixture, LIMIT, Loop, fast_config};

on_streams![
    a_late_reply_can_be_fetched_by_any_process_of_the_requester,
    a_waiter_gets_the_reply_whenever_it_started_to_wait,
    a_missing_reply_is_none_and_an_undecodable_one_is_an_error,
];

mod on_backends {
    use super::*;
    on_streams![
        a_stream_of_replies_is_bounded,
        replies_whose_time_is_up_go_and_so_do_their_streams,
    ];
}

use self::bounds::*;

fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

async fn a_late_reply_can_be_fetched_by_any_process_of_the_requester(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let submit =
        Submission::new(Ask::Wait("late".to_owned())).id(id("r1")).timeout(Duration::from_secs(2));
    let error = client.submit::<_, String>(submit).await.unwrap_err();
    assert!(matches!(error, MainLoopError::TimedOut { .. }), "{error}");
    assert!(error.is_transient());
    assert_eq!(client.reply::<String>(&id("r1")).await.unwrap(), None);

    let other = fixture.client("desk").await;
    let request = id("r1");
    let (waited, ()) = tokio::join!(other.wait::<String>(&request, LIMIT), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        main_loop.open_gate();
    });
    assert_eq!(waited.unwrap().output, "late");
    // A process that was not running when the reply arrived.
    let third = fixture.client("desk").await;
    assert_eq!(third.reply::<String>(&id("r1")).await.unwrap().unwrap().output, "late");
    assert_eq!(third.wait::<String>(&id("r1"), LIMIT).await.unwrap().output, "late");
    let stranger = fixture.client("shop").await;
    assert_eq!(stranger.reply::<String>(&id("r1")).await.unwrap(), None, "it is not theirs");
    worker.stop().await.unwrap();
}

async fn a_waiter_gets_the_reply_whenever_it_started_to_wait(fixture: Fixture) {
    // Replies arrive while others start to wait; none may be missed.
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    for round in 0..20 {
        let request = id(&round.to_string());
        let submit = || Submission::new(Ask::Echo(round.to_string())).id(request.clone());
        let (one, two, three) = tokio::join!(
            client.submit::<_, String>(submit()),
            client.wait::<String>(&request, LIMIT),
            async {
                tokio::task::yield_now().await;
                client.submit::<_, String>(submit()).await
            }
        );
        for completed in [one, two, three] {
            assert_eq!(completed.unwrap().output, round.to_string());
        }
    }
    assert_eq!(main_loop.log.lines().len(), 20);
    worker.stop().await.unwrap();
}

async fn a_missing_reply_is_none_and_an_undecodable_one_is_an_error(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    assert_eq!(client.reply::<String>(&id("nothing")).await.unwrap(), None);
    let error = client.wait::<String>(&id("nothing"), Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(error, MainLoopError::TimedOut { .. }), "{error}");
    let submit = Submission::new(Ask::Echo("text".to_owned())).id(id("text"));
    let error = client.submit::<_, u64>(submit).await.unwrap_err();
    assert!(matches!(error, MainLoopError::Unreadable { .. }), "{error}");
    assert_eq!(client.reply::<String>(&id("text")).await.unwrap().unwrap().output, "text");
    worker.stop().await.unwrap();
}

mod bounds {
    use super::*;

    pub(super) async fn a_stream_of_replies_is_bounded(fixture: Fixture) {
        const REPLIES: usize = 600;
        let replies = ReplyConfig { max_len: 10, ..Default::default() };
        let main_loop = Loop::default();
        let config = MainLoopConfig { replies, concurrency: 32, ..fast_config() };
        let worker = fixture.worker_with(&main_loop, config).await;
        let client = fixture.client("desk").await;
        // Fewer at once than are kept, or a reply might be trimmed before it is read.
        for first in (0..REPLIES).step_by(8) {
            let asking = (first..first + 8).map(|number| {
                let submit =
                    Submission::new(Ask::Echo(number.to_string())).id(id(&number.to_string()));
                client.submit::<_, String>(submit)
            });
            for completed in futures_util::future::join_all(asking).await {
                completed.unwrap();
            }
        }
        let length = fixture.entries(&fixture.replies("desk")).await.len();
        println!("{length} of {REPLIES} replies kept");
        // A server trims a page at a time.
        assert!(length < 300, "{length}");
        let first = id("0");
        let gone = client.reply::<String>(&first).await.unwrap_err();
        assert!(matches!(gone, MainLoopError::ReplyGone { .. }), "{gone}");
        assert!(!gone.is_transient());
        worker.stop().await.unwrap();
    }

    pub(super) async fn replies_whose_time_is_up_go_and_so_do_their_streams(fixture: Fixture) {
        // Long enough for a busy machine to read it in time, and at least the call deadline.
        let keep = Duration::from_secs(8);
        let fixture = fixture.with_call_deadline(keep);
        let replies = ReplyConfig { ttl: keep, ..Default::default() };
        let main_loop = Loop::default();
        let worker =
            fixture.worker_with(&main_loop, MainLoopConfig { replies, ..fast_config() }).await;
        let config = MainLoopClientConfig { replies, timeout: LIMIT };
        let client = fixture.client_with("desk", config).await;
        let submit = || Submission::new(Ask::Echo("a".to_owned())).id(id("r1"));
        client.submit::<_, String>(submit()).await.unwrap();
        worker.sweep().await.unwrap();
        assert_eq!(
            fixture.entries(&fixture.replies("desk")).await.len(),
            1,
            "it is kept for a while"
        );

        let backend = fixture.backend().await;
        let set = SetName::new(format!("{}:requesters", fixture.control())).unwrap();
        assert_eq!(backend.set_members(&set).await.unwrap(), ["desk"]);
        let deadline = tokio::time::Instant::now() + LIMIT;
        while backend.stats(&fixture.replies("desk")).await.unwrap().is_some() {
            assert!(tokio::time::Instant::now() < deadline, "the stream is still there");
            tokio::time::sleep(Duration::from_millis(100)).await;
            worker.sweep().await.unwrap();
        }
        assert!(backend.set_members(&set).await.unwrap().is_empty());
        assert_eq!(client.reply::<String>(&id("r1")).await.unwrap(), None);
        // A client whose stream was deleted continues.
        let submit = Submission::new(Ask::Echo("b".to_owned())).id(id("r2"));
        assert_eq!(client.submit::<_, String>(submit).await.unwrap().output, "b");
        worker.stop().await.unwrap();
    }
}
