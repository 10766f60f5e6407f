//! Two consumers share the streams of a service; one dies, and the other takes over.
//!
//! `cargo run -p headwater-assignment --example own_a_stream`, or with the URL of a Redis behind `--` and `--features redis`.

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
    // A lease lives two heartbeats. The hash tag lets the same service run on a Redis Cluster.
    let config =
        AssignmentConfig { heartbeat_every: Duration::from_millis(500), ..Default::default() };
    let service = "{own-a-stream}";
    let (ada, mut heard_by_ada) =
        Assignment::start(backend.clone(), service, "ada", config.clone()).await?;
    let (bob, mut heard_by_bob) = Assignment::start(backend, service, "bob", config).await?;

    // Somebody has a stream to be processed.
    ada.add(&StreamName::new("clicks:berlin")?, Some(r#"{"tenant": "acme"}"#)).await?;

    // One of the two gets it. Work only while the guard says so, and end it with `done`.
    let (owner, name) = tokio::select! {
        Some(Notification::Added(owned)) = heard_by_ada.recv() => (owned, "ada"),
        Some(Notification::Added(owned)) = heard_by_bob.recv() => (owned, "bob"),
    };
    println!("{name} owns {} {}", owner.stream(), owner.info().unwrap_or_default());

    // It dies without a word ...
    let (survivor, mut heard) = if name == "ada" {
        drop(ada);
        (bob, heard_by_bob)
    } else {
        drop(bob);
        (ada, heard_by_ada)
    };
    println!("{name} dies");

    // ... and the other one claims the stream as soon as the lease has run out.
    while let Some(notification) = heard.recv().await {
        match notification {
            Notification::Expired(stream) => {
                let owned = survivor.claim(&stream).await?;
                println!("{} owns {stream}, as owner {}", survivor.holder(), owned.owners());
                {
                    let _work = owned.work().ok_or("lost it already")?;
                    assert!(owned.guard().is_trusted());
                    // Read `stream` here, and stop when `owned.guard().lost()` returns.
                }
                match survivor.done(&owned).await {
                    Ok(()) => println!("{stream} is done"),
                    Err(EndError::NotOwner { .. }) => println!("{stream} has another owner"),
                    Err(error) => return Err(error.into()),
                }
                survivor.shutdown(Duration::from_secs(1)).await?;
            }
            Notification::Added(owned) => println!("{} is ours", owned.stream()),
            Notification::Disowned { reason: Disowned::Shutdown, .. } => {}
            Notification::Terminated(Terminated::Shutdown) => println!("the end"),
            other => println!("{other:?}"),
        }
    }
    Ok(())
}

#[tokio::test]
async fn the_example_runs() -> Result {
    run("embedded:memory").await
}
