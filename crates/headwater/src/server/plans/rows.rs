//! The tables `replay_plans` and `replay_plan_letters`.
//!
//! Upstream: `runner.rs` and the routes. Downstream: transactions and read connections of the store; one text for both
//! databases. Guarantees: what the holder of a lease writes is one transaction with a check of its epoch, so a former
//! holder changes nothing; people change only the state, the holder only a running plan's state. Times are those of the database.

use std::sync::Arc;
use std::time::Duration;

use headwater_issue::{IssueError, SqlRow, SqlValue, Store, StoreConnection};
use headwater_queue::{ReplayOrder, ReplayedLetter};
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;
use serde_json::Value;

use crate::server::plans::selection::PlanSelection;
use crate::server::plans::{ACTIVE_MAX, PlanProgress};

/// Time after which another process may take over a plan.
pub(crate) const LEASE_TTL: Duration = Duration::from_secs(10);

/// How long plans that have ended are kept, and how many.
const KEPT: Duration = Duration::from_secs(30 * 24 * 60 * 60);
const KEPT_MAX: i64 = 1000;

/// Plans of one query.
const DUE_MAX: i64 = 100;

/// State of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlanState {
    /// Letters are sent.
    Running,
    /// A person paused it.
    Paused,
    /// It stopped by itself, because too many letters failed again.
    Stopped,
    /// A person ended it.
    Cancelled,
    /// Every letter is sent and has an outcome.
    Done,
}

impl PlanState {
    const ALL: [Self; 5] =
        [Self::Running, Self::Paused, Self::Stopped, Self::Cancelled, Self::Done];

    /// The name in JSON and SQL.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Cancelled => "cancelled",
            Self::Done => "done",
        }
    }

    /// Parses a name; `None` if it is unknown.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.as_str() == name)
    }
}

/// A plan, a row of `replay_plans`.
#[derive(Clone, Debug)]
pub(crate) struct ReplayPlan {
    pub(crate) id: i64,
    pub(crate) state: PlanState,
    /// Why it stopped.
    pub(crate) reason: Option<String>,
    pub(crate) selection: PlanSelection,
    pub(crate) progress: PlanProgress,
    pub(crate) resumes: i64,
    /// What it waits for.
    pub(crate) problem: Option<String>,
    pub(crate) created_by: String,
    pub(crate) created_at: Timestamp,
    pub(crate) changed_at: Timestamp,
    /// Time since the state changed.
    pub(crate) unchanged_for: Duration,
    /// The process that runs it; `None` if its lease has expired.
    pub(crate) owner: Option<String>,
    pub(crate) epoch: i64,
}

/// A letter whose outcome is not known, a row of `replay_plan_letters`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlanLetter {
    pub(crate) topic: String,
    pub(crate) order: ReplayOrder,
    pub(crate) group: Option<String>,
    /// Digest of its cause.
    pub(crate) cause: String,
    pub(crate) step: u32,
    /// Where its message is, once it is sent.
    pub(crate) entry: Option<EntryId>,
}

impl PlanLetter {
    /// For the observation of its outcome.
    pub(crate) fn replayed(&self) -> ReplayedLetter {
        ReplayedLetter {
            letter: self.order.letter,
            partition: self.order.partition,
            entry: self.entry,
            group: self.group.clone(),
        }
    }
}

/// What a person does with a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlanCommand {
    Pause,
    Resume,
    Cancel,
}

/// Why a change of a plan was refused. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    /// There is no such plan.
    #[error("there is no replay plan {0}; `headwater plan list` shows all")]
    NotFound(i64),
    /// Its state does not allow it.
    #[error("replay plan {id} is {state}; {advice}")]
    WrongState { id: i64, state: &'static str, advice: &'static str },
    /// Too many plans are running or paused.
    #[error(
        "{ACTIVE_MAX} replay plans are running or paused, which is the maximum; wait for one to end, or cancel one with `headwater plan cancel ID`"
    )]
    TooMany,
    /// The database failed.
    #[error(transparent)]
    Store(#[from] IssueError),
}

fn failed(what: &str, error: sqlx::Error) -> IssueError {
    let problem = format!("replay plans: {what}: {error}");
    IssueError::Unavailable { problem, source: Some(Arc::new(error)) }
}

async fn execute(
    connection: StoreConnection<'_>,
    what: &str,
    sql: &'static str,
    parameters: &[SqlValue<'_>],
) -> Result<u64, IssueError> {
    connection.execute(sql, parameters).await.map_err(|error| failed(what, error))
}

async fn fetch<T>(
    connection: StoreConnection<'_>,
    what: &str,
    sql: &'static str,
    parameters: &[SqlValue<'_>],
    read: impl Fn(&SqlRow) -> Result<T, sqlx::Error>,
) -> Result<Vec<T>, IssueError> {
    let rows = connection.fetch_all(sql, parameters).await;
    let read: Result<_, _> = rows.and_then(|rows| rows.iter().map(read).collect());
    read.map_err(|error| failed(what, error))
}

async fn read<T>(
    store: &dyn Store,
    what: &str,
    sql: &'static str,
    parameters: &[SqlValue<'_>],
    read: impl Fn(&SqlRow) -> Result<T, sqlx::Error>,
) -> Result<Vec<T>, IssueError> {
    let mut reading = store.read_connection().await?;
    let found = fetch(reading.connection(), what, sql, parameters, read).await;
    reading.release().await;
    found
}

const SELECT: &str = "SELECT id, state, reason, selection, progress, resumes, problem, created_by, created_at, changed_at,
         headwater_ms(headwater_now()) - changed_at,
         CASE WHEN lease_until > headwater_ms(headwater_now()) THEN lease_owner ELSE NULL END, lease_epoch
     FROM replay_plans
     WHERE ($1::bigint IS NULL OR id = $1) AND id < $2 AND ($3::text IS NULL OR state = $3) ORDER BY id DESC LIMIT $4";

fn invalid(what: &str) -> sqlx::Error {
    sqlx::Error::Decode(format!("invalid {what} in the table of replay plans").into())
}

fn time(ms: i64) -> Timestamp {
    Timestamp::from_millis(u64::try_from(ms).unwrap_or(0))
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn read_plan(row: &SqlRow) -> Result<ReplayPlan, sqlx::Error> {
    let (state, selection, progress): (String, String, String) =
        (row.get(1)?, row.get(3)?, row.get(4)?);
    Ok(ReplayPlan {
        id: row.get(0)?,
        state: PlanState::parse(&state).ok_or_else(|| invalid("state"))?,
        reason: row.get(2)?,
        selection: serde_json::from_str(&selection).map_err(|_| invalid("selection"))?,
        progress: serde_json::from_str(&progress).map_err(|_| invalid("progress"))?,
        resumes: row.get(5)?,
        problem: row.get(6)?,
        created_by: row.get(7)?,
        created_at: time(row.get(8)?),
        changed_at: time(row.get(9)?),
        unchanged_for: Duration::from_millis(u64::try_from(row.get::<i64>(10)?).unwrap_or(0)),
        owner: row.get(11)?,
        epoch: row.get(12)?,
    })
}

/// A plan, if it exists.
pub(crate) async fn plan(store: &dyn Store, id: i64) -> Result<Option<ReplayPlan>, IssueError> {
    let parameters = [id.into(), i64::MAX.into(), SqlValue::Text(None), 1.into()];
    Ok(read(store, "read", SELECT, &parameters, read_plan).await?.pop())
}

/// At most `limit` plans, newest first, with ids below `before`.
pub(crate) async fn list(
    store: &dyn Store,
    state: Option<PlanState>,
    before: Option<i64>,
    limit: usize,
) -> Result<Vec<ReplayPlan>, IssueError> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let state = state.map(PlanState::as_str);
    let parameters =
        [SqlValue::Integer(None), before.unwrap_or(i64::MAX).into(), state.into(), limit.into()];
    read(store, "list", SELECT, &parameters, read_plan).await
}

/// Ids and times of plans made in this range, oldest first.
pub(crate) async fn created_between(
    store: &dyn Store,
    (from_ms, to_ms): (u64, u64),
    limit: usize,
) -> Result<Vec<(i64, Timestamp)>, IssueError> {
    let select =
        "SELECT id, created_at FROM replay_plans WHERE created_at >= $1 AND created_at < $2
         ORDER BY id DESC LIMIT $3";
    let column = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let parameters = [column(from_ms).into(), column(to_ms).into(), column(limit as u64).into()];
    let found = read(store, "history", select, &parameters, |row| {
        Ok((row.get::<i64>(0)?, time(row.get(1)?)))
    });
    let mut found = found.await?;
    found.reverse();
    Ok(found)
}

/// Locks the number of plans until the end of the transaction, and checks it.
async fn check_room(connection: StoreConnection<'_>) -> Result<bool, IssueError> {
    let count = "SELECT (SELECT count(*) FROM replay_plans WHERE state IN ('running', 'paused'))";
    let found = fetch(connection, "count", count, &[], |row| row.get::<i64>(0)).await?;
    Ok(found.first().is_none_or(|count| *count < ACTIVE_MAX))
}

const LOCK: &str = "SELECT id FROM replay_plan_lock FOR UPDATE";

/// Stores a plan, which then runs. Returns its id.
pub(crate) async fn create(
    store: &dyn Store,
    selection: &PlanSelection,
    total: u64,
    by: &str,
) -> Result<i64, PlanError> {
    let insert = "INSERT INTO replay_plans (state, active, selection, progress, created_by, created_at, changed_at)
         VALUES ('running', 1, $1, $2, $3, headwater_ms(headwater_now()), headwater_ms(headwater_now())) RETURNING id";
    let selection = serde_json::to_string(selection).expect("texts are JSON");
    let progress = serde_json::to_string(&PlanProgress::new(total)).expect("numbers are JSON");
    let mut transaction = store.begin().await?;
    fetch(transaction.connection(), "lock", LOCK, &[], |_| Ok(())).await?;
    if !check_room(transaction.connection()).await? {
        return Err(PlanError::TooMany);
    }
    let parameters = [(&selection).into(), (&progress).into(), by.into()];
    let added =
        fetch(transaction.connection(), "create", insert, &parameters, |row| row.get::<i64>(0));
    let id = added.await?.pop().ok_or_else(|| failed("create", invalid("id")))?;
    transaction.commit().await?;
    Ok(id)
}

/// Changes the state of a plan. Returns the plan, and false if it was in this state before.
pub(crate) async fn command(
    store: &dyn Store,
    id: i64,
    command: PlanCommand,
) -> Result<(ReplayPlan, bool), PlanError> {
    use PlanState::{Cancelled, Done, Paused, Running, Stopped};
    let mut transaction = store.begin().await?;
    // The lock, so that the number of plans holds, and this plan does not end meanwhile.
    fetch(transaction.connection(), "lock", LOCK, &[], |_| Ok(())).await?;
    let lock = "SELECT id FROM replay_plans WHERE id = $1 FOR UPDATE";
    fetch(transaction.connection(), "lock", lock, &[id.into()], |_| Ok(())).await?;
    let parameters = [id.into(), i64::MAX.into(), SqlValue::Text(None), 1.into()];
    let found = fetch(transaction.connection(), "read", SELECT, &parameters, read_plan).await?;
    let Some(plan) = found.into_iter().next() else { return Err(PlanError::NotFound(id)) };
    let wrong = |advice| PlanError::WrongState { id, state: plan.state.as_str(), advice };
    let (state, resumes) = match (command, plan.state) {
        (PlanCommand::Pause, Paused)
        | (PlanCommand::Resume, Running)
        | (PlanCommand::Cancel, Cancelled) => return Ok((plan, false)),
        (PlanCommand::Pause, Running) => (Paused, 0),
        (PlanCommand::Pause, _) => return Err(wrong("only a running plan can be paused")),
        (PlanCommand::Resume, Paused) => (Running, 0),
        (PlanCommand::Resume, Stopped) => {
            if !check_room(transaction.connection()).await? {
                return Err(PlanError::TooMany);
            }
            (Running, 1)
        }
        (PlanCommand::Resume, _) => return Err(wrong("make a new plan for what is left")),
        (PlanCommand::Cancel, Done) => return Err(wrong("there is nothing left to cancel")),
        (PlanCommand::Cancel, _) => (Cancelled, 0),
    };
    let update = "UPDATE replay_plans SET state = $2, resumes = resumes + $3, active = 1, problem = NULL,
             reason = CASE WHEN $2 = 'running' THEN NULL ELSE reason END, changed_at = headwater_ms(headwater_now())
         WHERE id = $1";
    let parameters = [id.into(), state.as_str().into(), resumes.into()];
    execute(transaction.connection(), "change", update, &parameters).await?;
    let parameters = [id.into(), i64::MAX.into(), SqlValue::Text(None), 1.into()];
    let found = fetch(transaction.connection(), "read", SELECT, &parameters, read_plan).await?;
    transaction.commit().await?;
    Ok((found.into_iter().next().ok_or(PlanError::NotFound(id))?, true))
}

/// Takes the leases of plans that no process holds. Returns their ids and epochs.
pub(super) async fn acquire(store: &dyn Store, name: &str) -> Result<Vec<(i64, i64)>, IssueError> {
    let due = "SELECT id FROM replay_plans WHERE active = 1 AND lease_until <= headwater_ms(headwater_now())
         ORDER BY id LIMIT $1";
    let due = read(store, "find", due, &[DUE_MAX.into()], |row| row.get::<i64>(0)).await?;
    let take = "UPDATE replay_plans SET lease_owner = $2, lease_epoch = lease_epoch + 1,
             lease_until = headwater_ms(headwater_now()) + $3
         WHERE id = $1 AND active = 1 AND lease_until <= headwater_ms(headwater_now()) RETURNING lease_epoch";
    let mut taken = Vec::new();
    for id in due {
        let mut transaction = store.begin().await?;
        let parameters = [id.into(), name.into(), milliseconds(LEASE_TTL).into()];
        let epoch =
            fetch(transaction.connection(), "take", take, &parameters, |row| row.get::<i64>(0));
        let epoch = epoch.await?;
        transaction.commit().await?;
        taken.extend(epoch.first().map(|epoch| (id, *epoch)));
    }
    Ok(taken)
}

/// Gives back the lease of a plan, or all leases of a process that stops, so that another one goes on at once.
pub(super) async fn release(
    store: &dyn Store,
    name: &str,
    id: Option<i64>,
) -> Result<(), IssueError> {
    let release = "UPDATE replay_plans SET lease_until = 0
         WHERE lease_owner = $1 AND ($2::bigint IS NULL OR id = $2)";
    let mut transaction = store.begin().await?;
    execute(transaction.connection(), "release", release, &[name.into(), id.into()]).await?;
    transaction.commit().await
}

/// The letters of a plan whose outcome is not known.
pub(crate) async fn letters(store: &dyn Store, id: i64) -> Result<Vec<PlanLetter>, IssueError> {
    let select = "SELECT topic, letter, partition, identity, letter_group, cause, step, entry
         FROM replay_plan_letters WHERE plan_id = $1 ORDER BY topic, letter";
    let entry_id = |text: String| text.parse::<EntryId>().map_err(|_| invalid("entry id"));
    read(store, "read letters", select, &[id.into()], |row| {
        Ok(PlanLetter {
            topic: row.get(0)?,
            order: ReplayOrder {
                letter: entry_id(row.get(1)?)?,
                partition: u16::try_from(row.get::<i64>(2)?).map_err(|_| invalid("partition"))?,
                identity: row.get(3)?,
            },
            group: row.get(4)?,
            cause: row.get(5)?,
            step: u32::try_from(row.get::<i64>(6)?).map_err(|_| invalid("step"))?,
            entry: row.get::<Option<String>>(7)?.map(entry_id).transpose()?,
        })
    })
    .await
}

/// What the holder of a lease writes, in one transaction.
#[derive(Debug, Default)]
pub(super) struct PlanUpdate<'a> {
    /// Letters that are sent next.
    pub(super) added: &'a [PlanLetter],
    /// Letters that were sent, with their entries.
    pub(super) sent: &'a [PlanLetter],
    /// Letters whose outcome is known.
    pub(super) removed: &'a [PlanLetter],
    /// The end of a running plan, with its reason.
    pub(super) ended: Option<(PlanState, Option<&'a str>)>,
    /// What it waits for.
    pub(super) problem: Option<&'a str>,
    /// Whether no process has to look after it any more.
    pub(super) is_over: bool,
}

/// Writes counters and letters and renews the lease. False: the lease is lost, and nothing was changed.
pub(super) async fn save(
    store: &dyn Store,
    (id, epoch): (i64, i64),
    progress: &PlanProgress,
    update: PlanUpdate<'_>,
) -> Result<bool, IssueError> {
    // A person may have changed the state meanwhile: then it stays, and the plan stays active.
    let write = "UPDATE replay_plans SET progress = $3, problem = $4, lease_until = headwater_ms(headwater_now()) + $5,
             changed_at = CASE WHEN state = 'running' AND $6::text IS NOT NULL THEN headwater_ms(headwater_now()) ELSE changed_at END,
             reason = CASE WHEN state = 'running' AND $6::text IS NOT NULL THEN $7 ELSE reason END,
             active = CASE WHEN $8::bigint = 1 AND state <> 'running' THEN 0 ELSE active END,
             state = CASE WHEN state = 'running' AND $6::text IS NOT NULL THEN $6 ELSE state END
         WHERE id = $1 AND lease_epoch = $2";
    let text = serde_json::to_string(progress).expect("numbers are JSON");
    let (state, reason) = update.ended.unzip();
    let parameters = [
        id.into(),
        epoch.into(),
        (&text).into(),
        update.problem.into(),
        milliseconds(LEASE_TTL).into(),
        state.map(PlanState::as_str).into(),
        reason.flatten().into(),
        i64::from(update.is_over).into(),
    ];
    let mut transaction = store.begin().await?;
    if execute(transaction.connection(), "save", write, &parameters).await? == 0 {
        return Ok(false);
    }
    let insert = "INSERT INTO replay_plan_letters
             (plan_id, topic, letter, partition, identity, letter_group, cause, step, entry)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
         ON CONFLICT (plan_id, topic, letter) DO UPDATE SET entry = excluded.entry";
    for one in update.added.iter().chain(update.sent) {
        let (letter, entry) = (one.order.letter.to_string(), one.entry.map(|id| id.to_string()));
        let parameters = [
            id.into(),
            (&one.topic).into(),
            (&letter).into(),
            i64::from(one.order.partition).into(),
            (&one.order.identity).into(),
            one.group.as_deref().into(),
            (&one.cause).into(),
            i64::from(one.step).into(),
            entry.as_deref().into(),
        ];
        execute(transaction.connection(), "save letters", insert, &parameters).await?;
    }
    let delete = "DELETE FROM replay_plan_letters WHERE plan_id = $1 AND topic = $2
         AND letter IN (SELECT value FROM headwater_each($3))";
    for topic_letters in update.removed.chunk_by(|one, other| one.topic == other.topic) {
        let ids = topic_letters.iter().map(|one| Value::String(one.order.letter.to_string()));
        let ids = Value::Array(ids.collect()).to_string();
        let parameters = [id.into(), (&topic_letters[0].topic).into(), (&ids).into()];
        execute(transaction.connection(), "remove letters", delete, &parameters).await?;
    }
    transaction.commit().await?;
    Ok(true)
}

/// Deletes plans that ended long ago, and the oldest beyond the number that is kept.
pub(crate) async fn delete_old(store: &dyn Store) -> Result<u64, IssueError> {
    let delete =
        "DELETE FROM replay_plans WHERE active = 0 AND state IN ('stopped', 'cancelled', 'done')
         AND (changed_at < headwater_ms(headwater_now()) - $1
             OR id < (SELECT coalesce(max(id), 0) FROM replay_plans) - $2)";
    let mut transaction = store.begin().await?;
    let parameters = [milliseconds(KEPT).into(), KEPT_MAX.into()];
    let deleted = execute(transaction.connection(), "delete", delete, &parameters).await?;
    transaction.commit().await?;
    Ok(deleted)
}
