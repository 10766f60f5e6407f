//! `kill -9` of the real binary inside the transactions of the effect ledger: intent, outcome and approval, each before and
//! during the commit. A second service counts its calls: no effect happens twice, none is lost, none without an approval.

mod support;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Database, Postgres};
use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, SqliteConnection};

use crate::support::tool_desk::{
    SQLITE, ToolDesk, ask, decide, effects, end_sessions, only_answer, planned,
};
use crate::support::tool_service::CallPlan;
use crate::support::{LIMIT, Server, eventually};

/// The transaction in which the process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KilledIn {
    /// Approves the draft of a call, and adds the call to the ledger.
    Approval,
    /// Commits the intent, before the call.
    Intent,
    /// Records the outcome, after the call.
    Outcome,
}

/// Where in the transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KillMoment {
    /// During the insertion of the row.
    Insert,
    /// During the change of the row.
    Update,
    /// While it commits; the database undoes it.
    UndoneCommit,
    /// While it commits; the database completes it.
    Commit,
}

use KillMoment::{Commit, Insert, UndoneCommit, Update};
use KilledIn::{Approval, Intent, Outcome};

type KillPoint = (KilledIn, KillMoment);

/// The status of the rows that the transaction writes.
fn status_of(killed_in: KilledIn) -> &'static str {
    match killed_in {
        Approval => "approved",
        Intent => "started",
        Outcome => "done",
    }
}

/// Stops the transaction of a kill point, until the process is dead.
struct Gate<'a> {
    database: &'a Database,
    session: PgConnection,
}

/// Any number that the server does not use.
const GATE: &str = "471147114711";

impl<'a> Gate<'a> {
    async fn close(database: &'a Database, (killed_in, moment): KillPoint) -> Result<Self> {
        let mut session = PgConnection::connect(&database.url()).await?;
        sqlx::query("SET application_name = 'gate'").execute(&mut session).await?;
        let lock = format!("SELECT pg_advisory_lock({GATE})");
        sqlx::query(AssertSqlSafe(lock)).execute(&mut session).await?;
        let status = status_of(killed_in);
        // An approval writes its row with one statement; an intent inserts it, if it is new, and changes it.
        let begin = match moment {
            Insert => "TRIGGER gate BEFORE INSERT ON tool_effects",
            Update => "TRIGGER gate BEFORE UPDATE ON tool_effects",
            UndoneCommit | Commit => {
                "CONSTRAINT TRIGGER gate AFTER INSERT OR UPDATE ON tool_effects DEFERRABLE INITIALLY DEFERRED"
            }
        };
        database.query(&format!(
            // The server limits how long it waits for a lock.
            "CREATE OR REPLACE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS
                 'BEGIN PERFORM pg_advisory_xact_lock({GATE}); RETURN NEW; END';
             CREATE {begin} FOR EACH ROW WHEN (NEW.status = '{status}') EXECUTE FUNCTION gate()"
        ))?;
        Ok(Self { database, session })
    }

    fn waiting(&self) -> usize {
        // Other tests have gates in their databases on the same server.
        let waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
             AND (classid::bigint << 32) + objid::bigint =";
        let counted = self.database.query(&format!("{waiting} {GATE}"));
        counted.ok().and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }

    /// Kills the server inside the transaction, which then ends as `moment` says.
    async fn kill(mut self, server: &mut Server, moment: KillMoment) -> Result<()> {
        // At most one transaction waits here: a second one for the same call waits for the row that the first one has locked,
        // its issue or its effect. But the kill is as real with more of them, so that the test does not depend on it.
        eventually("the transaction at its gate", || self.waiting() >= 1).await?;
        server.kill9()?;
        if moment != Commit {
            end_sessions(Some(self.database))?;
            eventually("no transaction at the gate", || self.waiting() == 0).await?;
        }
        let open = format!("SELECT pg_advisory_unlock({GATE})");
        sqlx::query(AssertSqlSafe(open)).execute(&mut self.session).await?;
        let running = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state <> 'idle'
             AND pid <> pg_backend_pid()";
        let has_ended = || self.database.query(running).is_ok_and(|count| count.trim() == "0");
        eventually("the transaction to end", has_ended).await?;
        end_sessions(Some(self.database))?;
        self.database.query("DROP TRIGGER gate ON tool_effects").map(drop)
    }
}

/// Whether the ledger has the row of the transaction after the kill.
fn is_committed(point: KillPoint) -> bool {
    point.1 == Commit
}

/// What must hold after the process was killed at `point` and started again.
async fn check(
    desk: &ToolDesk,
    server: &Server,
    tool: &str,
    (order, ticket, issue): (&str, &str, i64),
    point: KillPoint,
) -> Result<()> {
    let answer = only_answer(server, ticket).await?;
    let requests = desk.service.requests(order);
    let keys: Vec<&String> = requests.iter().map(|(key, _)| key).collect();
    assert!(keys.windows(2).all(|two| two[0] == two[1]), "{order} {point:?}: {requests:?}");
    let effects = effects(server, issue).await?;
    assert_eq!(effects.len(), 1, "{order} {point:?}: {effects:#?}");
    let (status, done) = (&effects[0]["status"], desk.service.done(order));
    let has_no_outcome = match point.0 {
        Approval => false,
        Intent => is_committed(point),
        Outcome => !is_committed(point),
    };
    if tool == "personal" && has_no_outcome {
        // It is not made again, and a person gets the facts.
        let calls = usize::from(point.0 == Outcome);
        assert_eq!((status, requests.len()), (&json!("unknown"), calls), "{order} {point:?}");
        let path = format!("/api/v1/tickets/{ticket}");
        let shown = server.until(&path, |_, shown| shown["handed_over"] == true).await?;
        let reason = shown["hand_over_reason"].as_str().context("a reason")?;
        assert!(reason.contains(order), "{reason}");
        return Ok(());
    }
    assert_eq!((status, done), (&json!("done"), 1), "{order} {point:?}: {effects:#?}");
    assert!(answer.contains(order), "{order} {point:?}: {answer}");
    // Only a call whose outcome was lost, and that has no look-up, is repeated.
    let is_repeated = point.0 == Outcome && has_no_outcome && tool != "looked_up";
    assert_eq!(requests.len(), 1 + usize::from(is_repeated), "{order} {point:?}: {requests:?}");
    Ok(())
}

/// Approves the only pending draft of an issue. The process may be killed before it answers.
fn approve_soon(server: &Server, draft: &Value) {
    let path = server.url(&format!("/api/v1/drafts/{}/approve", draft["id"]));
    tokio::spawn(server.client.post(path).json(&json!({})).send());
}

async fn is_pending(server: &Server, draft: &Value) -> Result<bool> {
    let (_, shown) = server.get(&format!("/api/v1/drafts/{}", draft["id"])).await?;
    Ok(shown["status"] == "pending")
}

const CALLS: &[CallPlan] = &[
    ("repeated-0", &[("repeated", r#"{"order": "repeated-0"}"#)]),
    ("repeated-1", &[("repeated", r#"{"order": "repeated-1"}"#)]),
    ("repeated-2", &[("repeated", r#"{"order": "repeated-2"}"#)]),
    ("repeated-3", &[("repeated", r#"{"order": "repeated-3"}"#)]),
    ("repeated-4", &[("repeated", r#"{"order": "repeated-4"}"#)]),
    ("repeated-5", &[("repeated", r#"{"order": "repeated-5"}"#)]),
    ("repeated-6", &[("repeated", r#"{"order": "repeated-6"}"#)]),
    ("looked_up-0", &[("looked_up", r#"{"order": "looked_up-0"}"#)]),
    ("looked_up-1", &[("looked_up", r#"{"order": "looked_up-1"}"#)]),
    ("looked_up-2", &[("looked_up", r#"{"order": "looked_up-2"}"#)]),
    ("personal-0", &[("personal", r#"{"order": "personal-0"}"#)]),
    ("personal-1", &[("personal", r#"{"order": "personal-1"}"#)]),
    ("personal-2", &[("personal", r#"{"order": "personal-2"}"#)]),
    ("approved-0", &[("approved", r#"{"order": "approved-0"}"#)]),
    ("approved-1", &[("approved", r#"{"order": "approved-1"}"#)]),
    ("approved-2", &[("approved", r#"{"order": "approved-2"}"#)]),
    ("approved-3", &[("approved", r#"{"order": "approved-3"}"#)]),
    ("approved-4", &[("approved", r#"{"order": "approved-4"}"#)]),
    ("approved-5", &[("approved", r#"{"order": "approved-5"}"#)]),
    // The model asks for it again when it learns that it was not made.
    (
        "expired",
        &[("approved", r#"{"order": "expired"}"#), ("approved", r#"{"order": "expired"}"#)],
    ),
];

async fn kills_on_postgres(tool: &str, points: &[KillPoint]) -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let desk = ToolDesk::new(CALLS, &database.url()).await?;
    let mut server = desk.serve()?;
    for (number, point) in points.iter().copied().enumerate() {
        let order = format!("{tool}-{number}");
        let gate = Gate::close(&database, point).await?;
        let (ticket, issue) = ask(&server, &order).await?;
        let mut draft = None;
        if tool == "approved" {
            draft = Some(planned(&server, issue).await?);
            draft.iter().for_each(|draft| approve_soon(&server, draft));
        }
        gate.kill(&mut server, point.1).await?;
        // Nothing is called before its intent is committed, and before it is approved.
        let calls = usize::from(point.0 == Outcome);
        assert_eq!(desk.service.requests(&order).len(), calls, "{order} {point:?}");
        server = desk.serve()?;
        if let Some(draft) = draft {
            let is_undone = point.0 == Approval && !is_committed(point);
            assert_eq!(is_pending(&server, &draft).await?, is_undone, "{order} {point:?}");
            if is_undone {
                let approved = decide(&server, &draft, "approve", json!({})).await?;
                assert_eq!(approved.0, 200, "{order} {point:?}: {}", approved.1);
            }
        }
        check(&desk, &server, tool, (&order, &ticket, issue), point).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_inside_a_transaction_of_a_repeated_call_on_postgres() -> Result<()> {
    let intent = [(Intent, Insert), (Intent, Update), (Intent, UndoneCommit), (Intent, Commit)];
    let outcome = [(Outcome, Update), (Outcome, UndoneCommit), (Outcome, Commit)];
    kills_on_postgres("repeated", &[&intent[..], &outcome].concat()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_inside_a_transaction_of_a_call_that_is_looked_up_on_postgres() -> Result<()> {
    let points = [(Intent, UndoneCommit), (Intent, Commit), (Outcome, UndoneCommit)];
    kills_on_postgres("looked_up", &points).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_inside_a_transaction_of_a_call_for_a_person_on_postgres() -> Result<()> {
    let points = [(Intent, UndoneCommit), (Intent, Commit), (Outcome, UndoneCommit)];
    kills_on_postgres("personal", &points).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_inside_a_transaction_of_an_approved_call_on_postgres() -> Result<()> {
    let approval = [(Approval, Insert), (Approval, UndoneCommit), (Approval, Commit)];
    let call = [(Intent, Update), (Intent, Commit), (Outcome, UndoneCommit)];
    kills_on_postgres("approved", &[&approval[..], &call].concat()).await
}

/// How long the database is locked without a break before the transaction is certain to be at its gate: every other
/// transaction takes milliseconds.
const LOCKED_FOR: Duration = Duration::from_secs(2);

async fn connect(desk: &ToolDesk) -> Result<SqliteConnection> {
    let file = desk.dir.path().join("headwater-data").join("headwater.db");
    let options = SqliteConnectOptions::new().filename(file).busy_timeout(Duration::from_secs(10));
    Ok(options.connect().await?)
}

/// Waits until a transaction of the server has locked the database for [`LOCKED_FOR`].
async fn wait_until_locked(desk: &ToolDesk) -> Result<()> {
    let file = desk.dir.path().join("headwater-data").join("headwater.db");
    let options = SqliteConnectOptions::new().filename(file).busy_timeout(Duration::ZERO);
    let mut connection = options.connect().await?;
    let deadline = tokio::time::Instant::now() + LIMIT;
    let mut since = tokio::time::Instant::now();
    while since.elapsed() < LOCKED_FOR {
        ensure!(tokio::time::Instant::now() < deadline, "the transaction is not at its gate");
        if let Ok(free) = connection.begin_with("BEGIN IMMEDIATE").await {
            free.rollback().await?;
            since = tokio::time::Instant::now();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_inside_a_transaction_of_a_call_on_sqlite() -> Result<()> {
    let desk = ToolDesk::new(CALLS, SQLITE).await?;
    let mut server = desk.serve()?;
    for (tool, points) in [
        ("repeated", &[(Intent, Insert), (Intent, Update), (Outcome, Update)][..]),
        ("looked_up", &[(Outcome, Update)]),
        ("personal", &[(Outcome, Update)]),
        ("approved", &[(Approval, Insert), (Intent, Update), (Outcome, Update)]),
    ] {
        for (number, point) in points.iter().copied().enumerate() {
            let order = format!("{tool}-{number}");
            let (event, status) =
                (if point.1 == Insert { "INSERT" } else { "UPDATE" }, status_of(point.0));
            // Its statement never ends: it counts the product of many tables.
            let tables: Vec<String> = (0..12).map(|one| format!("sqlite_schema t{one}")).collect();
            let mut session = connect(&desk).await?;
            let create = format!(
                "CREATE TRIGGER gate BEFORE {event} ON tool_effects WHEN NEW.status = '{status}'
                 BEGIN SELECT count(*) FROM {}; END",
                tables.join(", ")
            );
            sqlx::query(AssertSqlSafe(create)).execute(&mut session).await?;
            session.close().await?;
            let (ticket, issue) = ask(&server, &order).await?;
            let mut draft = None;
            if tool == "approved" {
                draft = Some(planned(&server, issue).await?);
                draft.iter().for_each(|draft| approve_soon(&server, draft));
            }
            wait_until_locked(&desk).await?;
            let calls = usize::from(point.0 == Outcome);
            assert_eq!(desk.service.requests(&order).len(), calls, "{order} {point:?}");
            server.kill9()?;
            let mut session = connect(&desk).await?;
            sqlx::query("DROP TRIGGER gate").execute(&mut session).await?;
            session.close().await?;
            server = desk.serve()?;
            if let Some(draft) = draft {
                let is_undone = point.0 == Approval;
                assert_eq!(is_pending(&server, &draft).await?, is_undone, "{order} {point:?}");
                if is_undone {
                    assert_eq!(decide(&server, &draft, "approve", json!({})).await?.0, 200);
                }
            }
            check(&desk, &server, tool, (&order, &ticket, issue), point).await?;
        }
    }
    Ok(())
}

/// Approves a draft, in a process that does not know the tool of its call, and makes the approval older than the time that the
/// call may wait. Returns the process.
async fn expire(
    desk: &ToolDesk,
    draft: &Value,
    issue: i64,
    gate: Option<String>,
) -> Result<Server> {
    let settings = desk.dir.path().join("headwater.toml");
    let known = std::fs::read_to_string(&settings)?;
    std::fs::write(&settings, known.replace("name = \"approved\"", "name = \"other\""))?;
    let server = desk.serve()?;
    std::fs::write(&settings, known)?;
    assert_eq!(decide(&server, draft, "approve", json!({})).await?.0, 200);
    let path = format!("/api/v1/effects?issue_id={issue}");
    let waits = |_: u16, page: &Value| {
        let effect = &page["effects"][0];
        effect["status"] == "approved" && effect["problem"].is_string()
    };
    server.until(&path, waits).await?;
    let mut session = connect(desk).await?;
    // First, because the run is repeated by itself, too.
    if let Some(gate) = gate {
        sqlx::query(AssertSqlSafe(gate)).execute(&mut session).await?;
    }
    let older = "UPDATE tool_effects SET created_at = created_at - 3600001";
    sqlx::query(older).execute(&mut session).await?;
    session.close().await?;
    Ok(server)
}

/// The call ends before its run: what the run would have told a person must not be lost with it, although a person was told
/// about an earlier approval of the same call.
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_before_a_person_is_told_that_a_call_was_not_made_on_sqlite() -> Result<()> {
    let desk = ToolDesk::new(CALLS, SQLITE).await?;
    let mut server = desk.serve()?;
    let (ticket, issue) = ask(&server, "Refund expired").await?;
    let first = planned(&server, issue).await?;
    server.kill9()?;
    let retry = format!("/api/v1/issues/{issue}/retry");
    let path = format!("/api/v1/tickets/{ticket}");
    let is_handed_over = |_: u16, shown: &Value| shown["handed_over"] == true;
    server = expire(&desk, &first, issue, None).await?;
    server.post(&retry, &json!({})).await?;
    server.until(&path, is_handed_over).await?;
    server.kill9()?;

    // The person returns the ticket to the desk, and the call is approved again.
    server = desk.serve()?;
    assert_eq!(server.post(&format!("{path}/reopen"), &json!({})).await?.0, 200);
    let more = json!({"content": "Please try again."});
    assert_eq!(server.post(&format!("{path}/messages"), &more).await?.0, 201);
    let second = planned(&server, issue).await?;
    server.kill9()?;

    // The process is killed in the transaction that hands the issue over.
    let tables: Vec<String> = (0..12).map(|one| format!("sqlite_schema t{one}")).collect();
    let create = format!(
        "CREATE TRIGGER gate BEFORE UPDATE ON issues
         WHEN NEW.fields ->> 'handed_over' AND NOT coalesce(OLD.fields ->> 'handed_over', 0)
         BEGIN SELECT count(*) FROM {}; END",
        tables.join(", ")
    );
    server = expire(&desk, &second, issue, Some(create)).await?;
    server.post(&retry, &json!({})).await?;
    wait_until_locked(&desk).await?;
    server.kill9()?;
    let mut session = connect(&desk).await?;
    sqlx::query("DROP TRIGGER gate").execute(&mut session).await?;
    let ended = "SELECT count(*) FROM tool_effects WHERE status = 'failed' AND attempts = 0";
    let ended: i64 = sqlx::query_scalar(ended).fetch_one(&mut session).await?;
    assert_eq!(ended, 1, "the call has ended before the kill");
    session.close().await?;

    server = desk.serve()?;
    let shown = server.until(&path, is_handed_over).await?;
    let reason = shown["hand_over_reason"].as_str().context("a reason")?;
    let has_facts = ["expired", "approved by", "not made"].iter().all(|fact| reason.contains(fact));
    assert!(has_facts, "{reason}");
    assert!(desk.service.requests("expired").is_empty());
    assert_eq!(effects(&server, issue).await?.len(), 1);
    Ok(())
}
