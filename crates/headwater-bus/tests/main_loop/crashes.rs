//! Workers that are killed, that crash during a request, and that resume after they were replaced.

use std::env;
use std::sync::Arc;

use headwater_bus::{
    CompletedRequest, Event, EventBus, EventBusExt, MainLoopClient, MainLoopCompleted,
    MainLoopConfig, MainLoopError, MainLoopFailed, ReceivedEvent, RequestFailure, RequestId,
    Requester, Submission, SubscribeOptions,
};
use headwater_testkit::{Child, Cluster, Redis};
use tokio::task::JoinHandle;

use crate::backends::new_prefix;
use crate::fixture::{Ask, Fixture, LIMIT, Loop, Mute, begun, fast_config, quick_lease};

/// Runs each scenario where processes can share a backend.
macro_rules! between_processes {
    ($($scenario:ident),* $(,)?) => {
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(super::Redis::shared().unwrap().url()).await;
            })*
        }
        mod cluster {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(super::Cluster::shared().unwrap().url()).await;
            })*
        }
    };
}

between_processes![
    a_request_completes_once_if_one_of_two_workers_is_killed,
    a_request_is_not_executed_again_if_its_worker_crashes_after_the_reply,
    another_worker_publishes_the_copy_of_a_reply_if_its_worker_is_killed,
    a_request_that_crashes_its_workers_fails_at_the_crash_limit,
    a_worker_resumed_after_it_was_replaced_has_no_effect,
    a_cancellation_of_a_killed_requester_is_published_by_the_worker,
];

fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

fn spawn(fixture: &Fixture, url: &str, role: &str) -> Child {
    let environment = [("URL", url), ("PREFIX", fixture.prefix.as_str()), ("ROLE", role)];
    let child = Child::spawn_self("crashes::worker", &environment).unwrap();
    child.line_after("READY", LIMIT).unwrap();
    child
}

/// A worker in its own process.
#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn worker() {
    let (Ok(url), Ok(prefix), Ok(role)) = (env::var("URL"), env::var("PREFIX"), env::var("ROLE"))
    else {
        return;
    };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let fixture = match url.starts_with("embedded:") {
            true => Fixture::in_directory(&url, prefix).await.with_short_leases(),
            false => Fixture::with_prefix(url, prefix).with_short_leases(),
        };
        let main_loop = Loop { dies: role == "dies", ..Loop::default() };
        if role == "open" {
            main_loop.open_gate();
        }
        let bus = fixture.bus().await;
        if role == "cancels" {
            let mute = Arc::new(Mute { bus, refuses: false });
            let requester = Requester::new("desk").unwrap();
            let client = MainLoopClient::open(mute, requester, Default::default()).await.unwrap();
            println!("READY");
            return drop(client.cancel(&id("r1")).await);
        }
        if role == "dies after replying" {
            // Handlers of the process run when the copy of the reply is stored, before the request is acknowledged.
            let die = |_: ReceivedEvent<MainLoopCompleted>| {
                std::process::abort();
                #[allow(unreachable_code, reason = "a handler has a future")]
                std::future::ready(())
            };
            bus.subscribe::<MainLoopCompleted>(SubscribeOptions::live(), die).await.unwrap();
        }
        let bus: Arc<dyn EventBus> = match role.as_str() {
            "stays at the copy" => Arc::new(Mute { bus, refuses: false }),
            _ => bus,
        };
        let sessions = crate::fixture::sessions(bus).await;
        let _worker =
            headwater_bus::MainLoopWorker::start(sessions, main_loop.clone(), config()).await;
        if role == "asks itself" {
            let client = Arc::new(fixture.client("desk").await);
            drop(ask(&client, Submission::new(Ask::Wait("a".to_owned())).id(id("r1"))));
        }
        println!("READY");
        loop {
            main_loop.begun.notified().await;
            println!("BEGUN {}", main_loop.log.lines().last().unwrap());
        }
    });
}

/// Submits in its own task, so that the test can wait for children meanwhile.
fn ask(client: &Arc<MainLoopClient>, submit: Submission<Ask>) -> JoinHandle<Asked> {
    let client = Arc::clone(client);
    tokio::spawn(async move { client.submit(submit).await })
}

type Asked = Result<CompletedRequest<String>, MainLoopError>;

fn config() -> MainLoopConfig {
    MainLoopConfig { max_crashes: 2, lease: quick_lease(), ..fast_config() }
}

async fn a_request_completes_once_if_one_of_two_workers_is_killed(url: String) {
    let fixture = Fixture::at(url.clone()).with_short_leases();
    let client = Arc::new(fixture.client("desk").await);
    let first = spawn(&fixture, &url, "waits");
    let submit = Submission::new(Ask::Wait("a".to_owned())).id(id("r1"));
    let asking = ask(&client, submit);
    let second = tokio::task::block_in_place(|| {
        first.line_after("BEGUN begun r1", LIMIT).unwrap();
        let second = spawn(&fixture, &url, "open");
        first.kill9().unwrap();
        second.line_after("BEGUN begun r1", LIMIT).unwrap();
        second
    });
    assert_eq!(asking.await.unwrap().unwrap().output, "a");
    fixture.control_settles_at(MainLoopCompleted::TYPE, 1).await;
    assert_eq!(fixture.entries(&fixture.replies("desk")).await.len(), 1);
    second.kill9().unwrap();
}

/// On a backend that one process at a time can open: the next start takes the request over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pending_events_of_a_killed_process_are_handled_after_restart_embedded() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("embedded:{}", directory.path().join("streams").display());
    let prefix = new_prefix();
    let environment = [("URL", url.as_str()), ("PREFIX", &prefix), ("ROLE", "asks itself")];
    let first = Child::spawn_self("crashes::worker", &environment).unwrap();
    tokio::task::block_in_place(|| {
        first.line_after("BEGUN begun r1", LIMIT).unwrap();
        first.kill9().unwrap();
    });
    let fixture = Fixture::in_directory(&url, prefix).await.with_short_leases();
    let main_loop = Loop::default();
    main_loop.open_gate();
    let worker = fixture.worker_with(&main_loop, config()).await;
    let client = fixture.client("desk").await;
    let done = client.wait::<String>(&id("r1"), LIMIT).await.unwrap();
    assert_eq!(done.output, "a");
    assert_eq!(begun(&main_loop, "r1"), 1);
    fixture.control_settles_at(MainLoopCompleted::TYPE, 1).await;
    assert_eq!(fixture.entries(&fixture.replies("desk")).await.len(), 1);
    worker.stop().await.unwrap();
}

async fn a_request_is_not_executed_again_if_its_worker_crashes_after_the_reply(url: String) {
    let fixture = Fixture::at(url.clone()).with_short_leases();
    let client = Arc::new(fixture.client("desk").await);
    let first = spawn(&fixture, &url, "dies after replying");
    let submit = || Submission::new(Ask::Note(7)).id(id("r1"));
    let done = client.submit::<_, Vec<u64>>(submit()).await.unwrap();
    assert_eq!(done.output, [7]);
    tokio::task::block_in_place(|| first.wait(LIMIT)).unwrap();

    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    // When the request of the crashed worker is acknowledged, all requests are.
    fixture.requests_settle().await;
    assert!(main_loop.log.lines().is_empty(), "{:?}", main_loop.log.lines());
    fixture.control_settles_at(MainLoopCompleted::TYPE, 1).await;
    assert_eq!(client.submit::<_, Vec<u64>>(submit()).await.unwrap().output, [7]);
    worker.stop().await.unwrap();
}

async fn another_worker_publishes_the_copy_of_a_reply_if_its_worker_is_killed(url: String) {
    let fixture = Fixture::at(url.clone()).with_short_leases();
    let client = Arc::new(fixture.client("desk").await);
    let first = spawn(&fixture, &url, "stays at the copy");
    let submit = Submission::new(Ask::Echo("a".to_owned())).id(id("r1"));
    // The requester has the reply, whether or not the copy is published.
    let done = client.submit::<_, String>(submit).await.unwrap();
    assert_eq!(done.output, "a");
    tokio::task::block_in_place(|| {
        first.line_after("PUBLISHING", LIMIT).unwrap();
        first.kill9().unwrap();
    });
    let copies = |entries: Vec<headwater_stream::Entry>| {
        let is_copy = |entry: &headwater_stream::Entry| {
            entry.fields.get("type").is_some_and(|name| name == MainLoopCompleted::TYPE)
        };
        entries.into_iter().filter(is_copy).count()
    };
    assert_eq!(copies(fixture.entries(&fixture.control()).await), 0);

    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    fixture.control_settles_at(MainLoopCompleted::TYPE, 1).await;
    assert!(main_loop.log.lines().is_empty(), "it must not be executed again");
    assert_eq!(fixture.entries(&fixture.replies("desk")).await.len(), 1);
    worker.stop().await.unwrap();
}

async fn a_request_that_crashes_its_workers_fails_at_the_crash_limit(url: String) {
    let fixture = Fixture::at(url.clone()).with_short_leases();
    let client = Arc::new(fixture.client("desk").await);
    let victims = [spawn(&fixture, &url, "dies"), spawn(&fixture, &url, "dies")];
    let asking = ask(&client, Submission::new(Ask::Die).id(id("r1")));
    tokio::task::block_in_place(|| {
        victims.iter().for_each(|victim| {
            victim.wait(LIMIT).unwrap();
        });
    });
    let main_loop = Loop::default();
    let worker = fixture.worker_with(&main_loop, config()).await;
    let failed = asking.await.unwrap().unwrap_err();
    assert_eq!(failed.failure(), Some(RequestFailure::Crashed), "{failed}");
    assert!(main_loop.log.lines().is_empty(), "two may die, and no more");
    fixture.control_settles_at(MainLoopFailed::TYPE, 1).await;
    worker.stop().await.unwrap();
}

async fn a_worker_resumed_after_it_was_replaced_has_no_effect(url: String) {
    let fixture = Fixture::at(url.clone()).with_short_leases();
    let client = Arc::new(fixture.client("desk").await);
    let first = spawn(&fixture, &url, "waits");
    let main_loop = Loop::default();
    main_loop.open_gate();
    let submit = Submission::new(Ask::Wait("a".to_owned())).id(id("r1"));
    let asking = ask(&client, submit);
    tokio::task::block_in_place(|| {
        first.line_after("BEGUN begun r1", LIMIT).unwrap();
        first.pause().unwrap();
    });
    let worker = fixture.worker(&main_loop).await;
    assert_eq!(asking.await.unwrap().unwrap().output, "a");
    assert_eq!(begun(&main_loop, "r1"), 1);
    first.resume().unwrap();
    // It takes part again without its old requests: submit until it answers, which it does while its gate is closed.
    worker.stop().await.unwrap();
    let next = Submission::new(Ask::Echo("b".to_owned())).id(id("r2"));
    let done = client.submit::<_, String>(next).await.unwrap();
    assert_eq!(done.output, "b");
    fixture.control_settles_at(MainLoopCompleted::TYPE, 2).await;
    assert_eq!(fixture.entries(&fixture.replies("desk")).await.len(), 2);
    first.kill9().unwrap();
}

async fn a_cancellation_of_a_killed_requester_is_published_by_the_worker(url: String) {
    let fixture = Fixture::at(url.clone());
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = Arc::new(fixture.client("desk").await);
    let asking = ask(&client, Submission::new(Ask::Wait("a".to_owned())).id(id("r1")));
    main_loop.begun.notified().await;
    let requester = spawn(&fixture, &url, "cancels");
    tokio::task::block_in_place(|| {
        requester.line_after("PUBLISHING", LIMIT).unwrap();
        requester.kill9().unwrap();
    });
    let failed = asking.await.unwrap().unwrap_err();
    assert_eq!(failed.failure(), Some(RequestFailure::Cancelled), "{failed}");
    main_loop.open_gate();
    fixture.control_settles_at(MainLoopFailed::TYPE, 1).await;
    assert_eq!(fixture.entries(&fixture.replies("desk")).await.len(), 1);
    worker.stop().await.unwrap();
}
