//! A session of process 1 is recovered in process 2.

use std::env;
use std::sync::Arc;

use headwater_bus::{
    EventRegistry, Folds, SessionId, Sessions, SessionsConfig, StreamedBus, StreamedBusConfig,
    ToolInvoked, ToolResult,
};
use headwater_stream::{Options, connect};
use headwater_testkit::{Child, Cluster, Redis};
use serde_json::json;

use crate::fixture::{Fixture, LIMIT};

fn invoked(session: &SessionId) -> ToolInvoked {
    ToolInvoked {
        prompt_name: "test".to_owned(),
        adapter: "openai".to_owned(),
        name: "my_tool".to_owned(),
        params: json!({ "depth": 3 }),
        result: ToolResult { message: "ok".to_owned(), success: true, value: json!(null) },
        session_id: Some(session.to_string()),
        ..Default::default()
    }
}

async fn sessions(url: &str, prefix: &str) -> Sessions {
    let backend = connect(url, &Options::default()).await.unwrap();
    let config = StreamedBusConfig { prefix: prefix.to_owned(), ..Default::default() };
    let bus = StreamedBus::open(backend, EventRegistry::builtin(), config).await.unwrap();
    let folds = Folds::none().latest::<ToolInvoked>();
    Sessions::new(Arc::new(bus), folds, SessionsConfig::default()).await.unwrap()
}

async fn a_session_in_process_1_is_state_in_process_2(url: String) {
    let fixture = Fixture::at(url.clone());
    let environment =
        [("URL", url.as_str()), ("PREFIX", &fixture.prefix), ("SESSION", fixture.session.as_str())];
    let child = Child::spawn_self("processes::process_1", &environment).unwrap();
    child.line_after("PUBLISHED", LIMIT).unwrap();
    child.kill9().unwrap();

    let session = sessions(&url, &fixture.prefix).await.recover(&fixture.session).await.unwrap();
    assert_eq!(*session.latest::<ToolInvoked>().unwrap(), invoked(&fixture.session));
}

#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn process_1() {
    let Ok(url) = env::var("URL") else { return };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let id = SessionId::new(env::var("SESSION").unwrap()).unwrap();
        let sessions = sessions(&url, &env::var("PREFIX").unwrap()).await;
        let session = sessions.create(&id).await.unwrap();
        session.publish(invoked(&id)).await.unwrap().into_result().unwrap();
        println!("PUBLISHED");
        std::future::pending::<()>().await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_in_process_1_is_state_in_process_2_on_redis() {
    a_session_in_process_1_is_state_in_process_2(Redis::shared().unwrap().url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_in_process_1_is_state_in_process_2_on_a_cluster() {
    a_session_in_process_1_is_state_in_process_2(Cluster::shared().unwrap().url()).await;
}

/// Two processes cannot open an embedded backend at the same time, but one after the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_in_process_1_is_state_in_process_2_embedded() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("embedded:{}", directory.path().join("streams").display());
    a_session_in_process_1_is_state_in_process_2(url).await;
}
