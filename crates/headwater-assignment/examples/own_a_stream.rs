//! Two consumers share the streams of a service; one dies, and the other takes over.
//!
//! Run `cargo run -p headwater-assignment --example own_a_stream`, or add `--features redis -- URL` for a
//! Redis server.

use std::time::Duration;

use headwater_assignment::{
    Assignment, AssignmentConfig, Disowned, EndError, Notification, Terminated,
};
use headwater_stream::{Options, StreamName, connect};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Result {
    let url = std::env::args().nth(1);
    run(url.as_deref().unwrap_or("embedded:memory")).await
}

async fn run(url: &str) -> Result {
    let backend = connect(url, &Options::default()).await?;
    // A lease lasts two heartbeats. The hash tag lets the same service run on a Redis Cluster.
    let config =
        AssignmentConfig { heartbeat_every: Duration::from_millis(500), ..Default::default() };
    let service = "{own-a-stream}";
    let (ada, mut ada_notifications) =
        Assignment::start(backend.clone(), service, "ada", config.clone()).await?;
    let (bob, mut bob_notifications) = Assignment::start(backend, service, "bob", config).await?;

    // A producer adds a stream.
    ada.add(&StreamName::new("clicks:berlin")?, Some(r#"{"tenant": "acme"}"#)).await?;

    // One of the two acquires it. Work only while the guard is valid, and end with `done`.
    let (owner, name) = tokio::select! {
        Some(Notification::Added(owned)) = ada_notifications.recv() => (owned, "ada"),
        Some(Notification::Added(owned)) = bob_notifications.recv() => (owned, "bob"),
    };
    println!("{name} owns {} {}", owner.stream(), owner.info().unwrap_or_default());

    // The owner dies ...
    let (survivor, mut notifications) = if name == "ada" {
        drop(ada);
        (bob, bob_notifications)
    } else {
        drop(bob);
        (ada, ada_notifications)
    };
    println!("{name} dies");

    // ... and the other consumer claims the stream when the lease has expired.
    while let Some(notification) = notifications.recv().await {
        match notification {
            Notification::Expired(stream) => {
                let owned = survivor.claim(&stream).await?;
                println!("{} owns {stream}, as owner {}", survivor.holder(), owned.owners());
                {
                    let _work = owned.work().ok_or("lost it already")?;
                    assert!(owned.guard().is_valid());
                    // Read `stream` here, and stop when `owned.guard().lost()` returns.
                }
                match survivor.done(&owned).await {
                    Ok(()) => println!("{stream} is done"),
                    Err(EndError::NotOwner { .. }) => println!("{stream} has another owner"),
                    Err(error) => return Err(error.into()),
                }
                survivor.shutdown(Duration::from_secs(1)).await?;
            }
            Notification::Added(owned) => println!("acquired {}", owned.stream()),
            Notification::Disowned { reason: Disowned::Shutdown, .. } => {}
            Notification::Terminated(Terminated::Shutdown) => println!("terminated"),
            other => println!("{other:?}"),
        }
    }
    Ok(())
}

#[tokio::test]
async fn the_example_runs() -> Result {
    run("embedded:memory").await
}
