//! What keeps working while a dependency fails: the table of docs/reliability.md, one row per fault.
//!
//! Each test runs a server, a worker and a consumer on PostgreSQL and Redis behind proxies, with a model and a receiver
//! of replies. The server handles an issue of its own all the time, so the worker answers. The test causes one fault,
//! checks what each role does meanwhile, ends the fault, and checks that everything that was confirmed is handled.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod sql_database;
mod stream_servers;
#[path = "../support/mod.rs"]
mod support;
mod system;

use std::time::Duration;

use headwater_testkit::ChaosCounts;
use rustix::process::Signal;

use crate::support::{LIMIT, eventually};
use crate::system::System;

/// What a role does during a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// It works as always.
    Works,
    /// It stops, and continues by itself afterwards. Nothing is lost.
    Waits,
    /// It rejects the request with an error, and nothing was done.
    Rejects,
}
use Effect::{Rejects, Waits, Works};

/// The roles, in the order of the columns.
const ROLES: [&str; 8] = [
    "server: webhooks",
    "worker: answers",
    "server: messages",
    "consumer",
    "`issue list`",
    "`topic list`",
    "`ticket new`",
    "`produce`",
];

/// The faults: the test of each, its row, and what each role does meanwhile.
macro_rules! matrix {
    ($($test:ident $fault:ident $row:literal $($effect:ident)+;)+) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Fault {
            $($fault,)+
        }

        const MATRIX: &[(Fault, &str, [Effect; ROLES.len()])] =
            &[$((Fault::$fault, $row, [$(Effect::$effect),+]),)+];

        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                matrix_row(Fault::$fault).await;
            }
        )+
    };
}
matrix! {
    redis_is_unreachable RedisDown "Redis is unreachable"
        Works Works Rejects Waits Works Rejects Works Rejects;
    redis_does_not_answer RedisStalls "Redis does not answer"
        Works Works Rejects Waits Works Rejects Works Rejects;
    redis_is_slow RedisSlow "Redis answers 100 ms late"
        Works Works Works Works Works Works Works Works;
    redis_is_full RedisFull "Redis is full (`noeviction`)"
        Works Works Rejects Works Works Works Works Rejects;
    redis_is_read_only RedisReadOnly "Redis is a read-only replica"
        Works Works Rejects Waits Works Works Works Rejects;
    redis_rejects_the_password RedisDenies "Redis rejects the password"
        Works Works Rejects Waits Works Rejects Works Rejects;
    a_redis_cluster_is_unreachable ClusterDown "a Redis Cluster is unreachable"
        Works Works Rejects Waits Works Rejects Works Rejects;
    a_redis_cluster_does_not_answer ClusterStalls "a Redis Cluster does not answer"
        Works Works Rejects Waits Works Rejects Works Rejects;
    a_redis_cluster_is_slow ClusterSlow "a Redis Cluster answers 100 ms late"
        Works Works Works Works Works Works Works Works;
    a_redis_cluster_is_full ClusterFull "a Redis Cluster is full (`noeviction`)"
        Works Works Rejects Works Works Works Works Rejects;
    a_redis_cluster_is_read_only ClusterReadOnly "a Redis Cluster lacks replicas (`min-replicas-to-write`)"
        Works Works Rejects Waits Works Works Works Rejects;
    a_redis_cluster_rejects_the_password ClusterDenies "a Redis Cluster rejects the password"
        Works Works Rejects Waits Works Rejects Works Rejects;
    a_shard_of_a_redis_cluster_is_down ShardDown "a shard of a Redis Cluster is down, for topics on the others"
        Works Works Works Works Works Works Works Works;
    a_shard_of_a_redis_cluster_does_not_answer ShardHangs "a shard of a Redis Cluster does not answer, for topics on the others"
        Works Works Works Works Works Works Works Works;
    sentinels_are_unreachable SentinelsDown "the Sentinels of Redis are unreachable"
        Works Works Works Works Works Rejects Works Rejects;
    sentinels_do_not_answer SentinelsHang "the Sentinels of Redis do not answer"
        Works Works Works Works Works Rejects Works Rejects;
    sentinels_reject_the_password SentinelsDeny "the Sentinels of Redis reject the password"
        Works Works Works Works Works Rejects Works Rejects;
    the_embedded_log_is_full EmbeddedFull "the embedded log has no disk space left"
        Works Works Rejects Waits Works Rejects Works Rejects;
    postgres_is_unreachable PostgresDown "PostgreSQL is unreachable"
        Rejects Waits Works Works Rejects Works Rejects Works;
    postgres_does_not_answer PostgresStalls "PostgreSQL does not answer"
        Rejects Waits Works Works Rejects Works Rejects Works;
    postgres_is_slow PostgresSlow "PostgreSQL answers 100 ms late"
        Works Works Works Works Works Works Works Works;
    postgres_is_read_only PostgresReadOnly "PostgreSQL is read-only"
        Rejects Waits Works Works Works Works Rejects Works;
    postgres_rejects_connections PostgresDenies "PostgreSQL rejects connections"
        Rejects Waits Works Works Rejects Works Rejects Works;
    postgres_is_full PostgresFull "PostgreSQL has no disk space left"
        Rejects Waits Works Works Works Works Rejects Works;
    postgres_rejects_the_password PostgresWrongPassword "PostgreSQL rejects the password"
        Rejects Waits Works Works Rejects Works Rejects Works;
    sqlite_is_locked SqliteLocked "another program keeps SQLite locked"
        Rejects Waits Works Works Works Works Rejects Works;
    sqlite_is_full SqliteFull "SQLite has no disk space left"
        Rejects Waits Works Works Works Works Rejects Works;
    the_model_is_unreachable ModelDown "the model is unreachable"
        Works Waits Works Works Works Works Works Works;
    the_model_does_not_answer ModelStalls "the model does not answer"
        Works Waits Works Works Works Works Works Works;
    the_model_is_slow ModelSlow "the model answers 100 ms late"
        Works Works Works Works Works Works Works Works;
    the_model_rejects_the_key ModelDenies "the model rejects the API key"
        Works Waits Works Works Works Works Works Works;
    the_receiver_is_unreachable ReceiverDown "the receiver of replies is unreachable"
        Works Waits Works Works Works Works Works Works;
    the_receiver_does_not_answer ReceiverStalls "the receiver of replies does not answer"
        Works Waits Works Works Works Works Works Works;
    the_receiver_is_slow ReceiverSlow "the receiver of replies answers 100 ms late"
        Works Works Works Works Works Works Works Works;
    the_receiver_rejects_the_token ReceiverDenies "the receiver of replies rejects the token"
        Works Waits Works Works Works Works Works Works;
}

/// A ticket, which does not concern the issues of the webhooks.
const NEW_TICKET: [&str; 8] =
    ["ticket", "new", "--title", "by the verb", "--content", "Hello", "--user", "ada"];

/// Long enough that a role which works would have finished on a quiet machine.
const WINDOW: Duration = Duration::from_secs(3);

/// Works if the condition holds during the fault, otherwise waits.
async fn works_or_waits(expected: Effect, what: &str, condition: impl Fn() -> bool) -> Effect {
    if expected == Works {
        eventually(what, &condition).await.unwrap();
        return Works;
    }
    tokio::time::sleep(WINDOW).await;
    if condition() { Works } else { Waits }
}

fn works_or_rejects(is_done: bool) -> Effect {
    if is_done { Works } else { Rejects }
}

async fn matrix_row(fault: Fault) {
    let (_, name, expected) = MATRIX.iter().find(|(row, ..)| *row == fault).unwrap();
    let Some(mut system) = System::start(fault).await else { return };
    // A run that is asking its model, and a message that is not consumed yet, when the fault begins.
    system.to_model.stall().unwrap();
    assert!(system.webhook("before").await);
    system.signal_consumer(Signal::STOP);
    // The first one reaches the consumer, whose read is waiting for it.
    assert!(system.produce("before").await && system.produce("unread").await);
    match fault {
        Fault::ModelDown | Fault::ModelStalls => system.cause(fault).await,
        Fault::ModelSlow => {
            system.to_model.heal().unwrap();
            system.cause(fault).await;
        }
        _ => {
            system.cause(fault).await;
            system.to_model.heal().unwrap();
        }
    }
    system.signal_consumer(Signal::CONT);

    let is_confirmed = system.webhook("during").await;
    let is_sent = system.produce("during").await;
    let seen = [
        works_or_rejects(is_confirmed),
        works_or_waits(expected[1], "the answer", || system.answers("before") > 0).await,
        works_or_rejects(is_sent),
        works_or_waits(expected[3], "the message", || system.has_handled("unread")).await,
        works_or_rejects(system.verb(&["issue", "list"])),
        works_or_rejects(system.verb(&["topic", "list"])),
        works_or_rejects(system.verb(&NEW_TICKET)),
        works_or_rejects(system.verb(&["produce", "sales", "--payload", "by the verb"])),
    ];
    let (has_ticket, is_produced) = (seen[6] == Works, seen[7] == Works);
    assert_eq!(seen, *expected, "{name}: {ROLES:?}\n{}", system.server.log());
    // Until here the server waits for its model, so it was the worker that worked.
    assert!(expected[1] != Works || system.is_answered_by_worker("before"), "{name}");

    system.heal(fault).await;
    eventually("the answer to the first event", || system.answers("before") > 0).await.unwrap();
    for message in ["before", "unread"] {
        eventually("a message", || system.has_handled(message)).await.unwrap();
    }
    if is_confirmed {
        eventually("the answer to the second event", || system.answers("during") > 0)
            .await
            .unwrap();
    }
    for (is_sent, message) in [(is_sent, "during"), (is_produced, "by the verb")] {
        let what = format!("the message {message}");
        eventually(&what, || !is_sent || system.has_handled(message)).await.unwrap();
    }
    assert_eq!(system.has_ticket().await, has_ticket);
    assert!(system.webhook("after").await && system.produce("after").await);
    eventually("the answer to the last event", || system.answers("after") > 0).await.unwrap();
    eventually("the last message", || system.has_handled("after")).await.unwrap();
    eventually("the answers of the server", || system.are_occupying_answered()).await.unwrap();
    system.assert_answered_once(fault);
    // Three events and six messages, but for those that were rejected during the fault.
    let during = [is_confirmed, is_sent, is_produced];
    let sent = 6 + during.into_iter().map(u64::from).sum::<u64>();
    let repeated = |id| system.answers(id).saturating_sub(1) as u64;
    let doubled = ["before", "during", "after"].map(repeated).iter().sum();
    let counts = ChaosCounts { sent, handled: sent, doubled, ..Default::default() };
    counts.report(name).unwrap();
}

/// The table as docs/reliability.md shows it.
fn table() -> String {
    let mut lines = vec![
        format!("| while | {} |", ROLES.join(" | ")),
        format!("|{}", "---|".repeat(1 + ROLES.len())),
    ];
    for (_, name, effects) in MATRIX {
        let effects = effects.map(|effect| format!("{effect:?}").to_lowercase());
        lines.push(format!("| {name} | {} |", effects.join(" | ")));
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_documented_table_is_this_one() {
    let page = include_str!("../../../../docs/reliability.md");
    assert!(page.contains(&table()), "docs/reliability.md lacks this table:\n{}", table());
    assert!(LIMIT > WINDOW);
}
