//! A conversation as a session: one process starts it, a second one recovers it, and a third one forks it.
//!
//! `cargo run -p headwater-bus --example recover_a_session`, or with a Redis URL after `--` and
//! `--features redis`.

use std::sync::Arc;

use headwater_bus::{
    Event, EventRegistry, Fold, Folds, ReplayUntil, Scope, SessionEvent, SessionId, Sessions,
    SessionsConfig, StreamedBus, StreamedBusConfig,
};
use headwater_stream::{Backend, Options, connect};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A statement in a conversation.
#[derive(Serialize, Deserialize, JsonSchema)]
struct Said {
    who: String,
    words: String,
}

impl Event for Said {
    const TYPE: &'static str = "conversation.Said";
    const SCOPE: Scope = Scope::Session;
}

/// Number of statements per speaker: a custom fold.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Turns(std::collections::BTreeMap<String, u64>);

impl Fold for Turns {
    const NAME: &'static str = "conversation.Turns";

    fn apply(&mut self, event: &SessionEvent) {
        if let Some(said) = event.get::<Said>() {
            *self.0.entry(said.who.clone()).or_default() += 1;
        }
    }
}

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Result {
    let url = std::env::args().nth(1);
    run(url.as_deref().unwrap_or("embedded:memory")).await.map(drop)
}

/// Opens the sessions; the same in every process.
async fn open(backend: Arc<dyn Backend>) -> Result<Sessions> {
    let registry = EventRegistry::empty().with::<Said>()?;
    let bus = StreamedBus::open(backend, registry, StreamedBusConfig::default()).await?;
    let folds = Folds::none().latest::<Said>().all::<Said>(100).with::<Turns>();
    Ok(Sessions::new(Arc::new(bus), folds, SessionsConfig::default()).await?)
}

fn said(who: &str, words: &str) -> Said {
    Said { who: who.to_owned(), words: words.to_owned() }
}

async fn run(url: &str) -> Result<Vec<String>> {
    let backend = connect(url, &Options::default()).await?;
    let id = SessionId::random();

    // The first process starts a conversation and ends.
    let session = open(Arc::clone(&backend)).await?.create(&id).await?;
    session.publish(said("Ada", "Can it compose music?")).await?;
    let question = session.publish(said("Charles", "If you give it notes.")).await?.entry_id();
    session.publish(said("Ada", "Then it is no mere calculator.")).await?;
    drop(session);

    // A second process recovers it. The snapshot saves the next one a full replay.
    let sessions = open(Arc::clone(&backend)).await?;
    let session = sessions.recover(&id).await?;
    let last = session.latest::<Said>().ok_or("the session has no events")?;
    println!("{} said last: {}", last.who, last.words);
    println!("turns: {:?}", session.get::<Turns>());
    session.snapshot().await?;

    // A third process forks it at an earlier entry.
    let until = question.map_or(ReplayUntil::End, ReplayUntil::Entry);
    let fork = sessions.fork(&id, until, &SessionId::random()).await?;
    fork.publish(said("Ada", "And if nobody does?")).await?;
    let words = |session: &headwater_bus::Session| -> Vec<String> {
        let all = session.all::<Said>().map(|all| all.events).unwrap_or_default();
        all.iter().map(|said| format!("{}: {}", said.who, said.words)).collect()
    };
    println!("first:\n  {}\nfork:\n  {}", words(&session).join("\n  "), words(&fork).join("\n  "));
    let both = [words(&sessions.recover(&id).await?), words(&fork)].concat();
    sessions.delete(&id).await?;
    sessions.delete(fork.id()).await?;
    Ok(both)
}

#[tokio::test]
async fn a_session_is_recovered_and_forked() -> Result {
    let lines = run("embedded:memory").await?;
    assert_eq!(lines.len(), 6);
    assert_eq!(lines[2], "Ada: Then it is no mere calculator.");
    assert_eq!(lines[5], "Ada: And if nobody does?");
    Ok(())
}
