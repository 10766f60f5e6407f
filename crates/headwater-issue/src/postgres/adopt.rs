//! Takes over the tables `issues` and `event_logs` of another program, whose rows become those of this one.
//!
//! Upstream: `headwater migrate --adopt`. Downstream: `migrate.rs`, whose migrations create the tables of this program.
//! Guarantees: one transaction, under the lock of migrations: everything is adopted or nothing is changed. A dry run does all
//! of it and rolls back. The old tables are kept unchanged in the schema [`OLD_SCHEMA`]. Ids are kept. What cannot be
//! adopted without losing or guessing something is refused, with the rows and the reason.

use std::collections::BTreeMap;

use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection, Executor, Row};

use super::functions;
use super::migrate::LOCK;
use crate::error::{IssueError, Result};
use crate::limits::{NAME_BYTES_MAX, PAYLOAD_BYTES_MAX};
use crate::migrations::{ISSUES, OwnedMigrations, schema_error};
use crate::row_decoding::database_error;
use crate::validate;

/// The schema into which the old tables are moved.
pub const OLD_SCHEMA: &str = "before_headwater";

/// Tables that are moved if they exist: the two that are adopted, and one whose name this program needs.
const MOVED: [&str; 3] = ["issues", "event_logs", "integrations"];

/// Further names that this program needs.
const NEEDED: [&str; 11] = [
    "event_log_originals",
    "outbox",
    "dead_letters",
    "issue_runs",
    "workers",
    "headwater_identity",
    "headwater_clock",
    "headwater_functions",
    "issues_id_seq",
    "event_logs_id_seq",
    "integrations_id_seq",
];

/// Columns that the old tables must have, and the types that can be converted.
const REQUIRED: [(&str, &str, &[&str]); 9] = [
    ("issues", "id", &INTEGERS),
    ("issues", "integration_id", &INTEGERS),
    ("issues", "external_issue_id", &["text", "character varying", "bigint", "integer"]),
    ("issues", "processing_status", &["text", "character varying"]),
    ("event_logs", "id", &INTEGERS),
    ("event_logs", "issue_id", &INTEGERS),
    ("event_logs", "payload", &["jsonb", "json"]),
    ("event_logs", "processed_at", &TIMES),
    ("event_logs", "created_at", &TIMES),
];
const INTEGERS: [&str; 2] = ["bigint", "integer"];
const TIMES: [&str; 2] = ["timestamp with time zone", "timestamp without time zone"];

/// Which integration of this program the issues of an old `integration_id` belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdoptedIntegration {
    /// The value of `issues.integration_id`.
    pub old_id: i64,
    /// Name of the integration.
    pub name: String,
    /// Its provider; also the source of its events.
    pub provider: String,
    /// The external project of its issues, which the old table does not have.
    pub project: String,
}

/// Whether the adoption is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdoptionMode {
    /// Do everything, then roll back.
    DryRun,
    /// Commit.
    Commit,
}

/// What was adopted, or would be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdoptionReport {
    /// Tables moved into [`OLD_SCHEMA`].
    pub moved: Vec<String>,
    /// Adopted issues.
    pub issues: i64,
    /// Those with unprocessed events, which become `queued`.
    pub queued: i64,
    /// Those that were `processing`: their claim ends, and their unprocessed events are handled again.
    pub interrupted: i64,
    /// Adopted event logs.
    pub event_logs: i64,
    /// Those that are not processed.
    pub unprocessed: i64,
}

/// Adopts the tables of the database at `url`, in its default schema. Fails with [`IssueError::Schema`] if they cannot be
/// adopted, and changes nothing then.
pub async fn adopt(
    url: &str,
    integrations: &[AdoptedIntegration],
    mode: AdoptionMode,
) -> Result<AdoptionReport> {
    for (place, one) in integrations.iter().enumerate() {
        validate::name("the integration", &one.name)?;
        validate::name("the project", &one.project)?;
        let earlier = &integrations[..place];
        let is_same = |other: &AdoptedIntegration| {
            other.old_id == one.old_id || (&other.name, &other.project) == (&one.name, &one.project)
        };
        if earlier.iter().any(is_same) {
            let problem = "the same id, or the same name and project, is given twice";
            return Err(IssueError::invalid("the integrations", problem));
        }
    }
    let failed = |error| database_error("adopting the tables", error);
    let mut connection = PgConnection::connect(url).await.map_err(failed)?;
    let mut transaction = connection.begin().await.map_err(failed)?;
    // Old times without a zone are taken as UTC. Gives up early if the other program still uses the tables.
    let prepared = "SET LOCAL lock_timeout = '5s'; SET LOCAL statement_timeout = 0; SET LOCAL timezone = 'UTC';
        SET LOCAL client_min_messages = warning";
    transaction.execute(sqlx::raw_sql(prepared)).await.map_err(failed)?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)")
        .bind(LOCK)
        .execute(&mut *transaction)
        .await
        .map_err(failed)?;
    let columns = check_tables(&mut transaction).await?;
    transaction
        .execute("LOCK TABLE issues, event_logs IN ACCESS EXCLUSIVE MODE")
        .await
        .map_err(failed)?;
    check_rows(&mut transaction, integrations).await?;
    let moved = move_tables(&mut transaction).await.map_err(failed)?;
    check_free_names(&mut transaction).await?;
    let owned = OwnedMigrations::new(ISSUES, |one| one.postgres);
    owned.apply(&mut *transaction).await.map_err(schema_error)?;
    functions::install(&mut transaction).await.map_err(schema_error)?;
    copy_rows(&mut transaction, integrations, &columns).await.map_err(failed)?;
    let report = report(&mut transaction, moved).await.map_err(failed)?;
    match mode {
        AdoptionMode::DryRun => transaction.rollback().await.map_err(failed)?,
        AdoptionMode::Commit => transaction.commit().await.map_err(failed)?,
    }
    let _ = connection.close().await;
    Ok(report)
}

fn refused(problem: impl Into<String>) -> IssueError {
    IssueError::Schema { problem: problem.into() }
}

/// Types of the columns of both tables.
type Columns = BTreeMap<(String, String), String>;

/// Checks that there is something to adopt, and that its columns can be converted.
async fn check_tables(connection: &mut PgConnection) -> Result<Columns> {
    let failed = |error| database_error("reading the tables to adopt", error);
    let is_ours = "SELECT to_regclass('headwater_migrations') IS NOT NULL";
    if flag(connection, is_ours).await.map_err(failed)? {
        return Err(refused(
            "it has the tables of this program already; there is nothing to adopt",
        ));
    }
    let was_adopted = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'before_headwater')";
    if flag(connection, was_adopted).await.map_err(failed)? {
        return Err(refused(format!(
            "it has a schema `{OLD_SCHEMA}`, into which the old tables would be moved; rename or drop it"
        )));
    }
    let select = "SELECT c.table_name::text, c.column_name::text, c.data_type::text
        FROM information_schema.columns c JOIN information_schema.tables t USING (table_schema, table_name)
        WHERE c.table_schema = current_schema() AND t.table_type = 'BASE TABLE' AND c.table_name IN ('issues', 'event_logs')";
    let rows = sqlx::query(select).fetch_all(&mut *connection).await.map_err(failed)?;
    let mut columns = Columns::new();
    for row in rows {
        let name = (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
        columns.insert(name, row.try_get(2).map_err(failed)?);
    }
    let mut problems = Vec::new();
    for table in ["issues", "event_logs"] {
        if !columns.keys().any(|(name, _)| name == table) {
            problems.push(format!("there is no table `{table}`"));
        }
    }
    if problems.is_empty() {
        for (table, column, types) in REQUIRED {
            match columns.get(&(table.to_owned(), column.to_owned())) {
                Some(found) if types.contains(&found.as_str()) => {}
                Some(found) => problems.push(format!(
                    "`{table}.{column}` has the type `{found}`; needed: `{}`",
                    types.join("` or `")
                )),
                None => problems.push(format!("`{table}` has no column `{column}`")),
            }
        }
    }
    match problems.is_empty() {
        true => Ok(columns),
        false => Err(refused(problems.join("; "))),
    }
}

/// Rows that cannot be adopted: a query for the first ids or values, and what is wrong with them. Of `$1`, the known integrations.
const REJECTED: [(&str, &str); 8] = [
    (
        "SELECT DISTINCT integration_id::text FROM issues WHERE (integration_id = ANY ($1::bigint[])) IS NOT TRUE",
        "the integration of these values of `issues.integration_id` is not named; pass `--integration ID=NAME/PROJECT` for each",
    ),
    (
        "SELECT DISTINCT processing_status::text FROM issues
         WHERE (processing_status IN ('idle', 'queued', 'processing')) IS NOT TRUE AND $1::bigint[] IS NOT NULL",
        "these values of `issues.processing_status` are unknown",
    ),
    (
        "SELECT id::text FROM issues WHERE (id > 0 AND octet_length(external_issue_id::text) BETWEEN 1 AND NAME_MAX) IS NOT TRUE AND $1::bigint[] IS NOT NULL",
        "these issues have no positive id, or no `external_issue_id` of 1 to NAME_MAX bytes",
    ),
    (
        "SELECT integration_id || '/' || external_issue_id FROM issues WHERE $1::bigint[] IS NOT NULL
         GROUP BY integration_id, external_issue_id HAVING count(*) > 1",
        "these issues occur more than once",
    ),
    (
        "SELECT id::text FROM event_logs WHERE (id > 0) IS NOT TRUE AND $1::bigint[] IS NOT NULL",
        "these event logs have no positive id",
    ),
    (
        "SELECT e.id::text FROM event_logs e WHERE $1::bigint[] IS NOT NULL AND NOT EXISTS (SELECT FROM issues i WHERE i.id = e.issue_id)",
        "these event logs belong to no issue",
    ),
    (
        "SELECT id::text FROM event_logs WHERE $1::bigint[] IS NOT NULL AND (payload IS NULL OR created_at IS NULL)",
        "these event logs have no payload or no `created_at`",
    ),
    (
        "SELECT id::text FROM event_logs WHERE $1::bigint[] IS NOT NULL AND octet_length(payload::text) > PAYLOAD_MAX",
        "the payload of these event logs is longer than PAYLOAD_MAX bytes",
    ),
];

async fn check_rows(
    connection: &mut PgConnection,
    integrations: &[AdoptedIntegration],
) -> Result<()> {
    let failed = |error| database_error("checking the rows to adopt", error);
    let known: Vec<i64> = integrations.iter().map(|one| one.old_id).collect();
    let fill = |text: &str| {
        text.replace("NAME_MAX", &NAME_BYTES_MAX.to_string())
            .replace("PAYLOAD_MAX", &PAYLOAD_BYTES_MAX.to_string())
    };
    let mut problems = Vec::new();
    for (query, problem) in REJECTED {
        let query = format!("SELECT * FROM ({}) AS found (id) ORDER BY 1 LIMIT 6", fill(query));
        let rows = sqlx::query(AssertSqlSafe(query)).bind(&known);
        let rows = rows.fetch_all(&mut *connection).await.map_err(failed)?;
        if !rows.is_empty() {
            let ids = rows.iter().take(5).map(|row| row.try_get::<Option<String>, _>(0));
            let ids: Vec<Option<String>> = ids.collect::<Result<_, _>>().map_err(failed)?;
            let ids: Vec<String> = ids.into_iter().map(|id| id.unwrap_or("null".into())).collect();
            let more = if rows.len() > 5 { ", …" } else { "" };
            problems.push(format!("{}: {}{more}", fill(problem), ids.join(", ")));
        }
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(refused(problems.join("; "))),
    }
}

/// Moves the old tables with their indexes, constraints and sequences.
async fn move_tables(connection: &mut PgConnection) -> Result<Vec<String>, sqlx::Error> {
    connection.execute(AssertSqlSafe(format!("CREATE SCHEMA {OLD_SCHEMA}"))).await?;
    let mut moved = Vec::new();
    for table in MOVED {
        let exists = format!("SELECT to_regclass(current_schema() || '.{table}') IS NOT NULL");
        if flag(connection, &exists).await? {
            let statement = format!("ALTER TABLE {table} SET SCHEMA {OLD_SCHEMA}");
            connection.execute(AssertSqlSafe(statement)).await?;
            moved.push(table.to_owned());
        }
    }
    Ok(moved)
}

/// Checks that no other relation has a name that this program needs.
async fn check_free_names(connection: &mut PgConnection) -> Result<()> {
    let failed = |error| database_error("reading the names of tables", error);
    let select = "SELECT relname::text FROM pg_class
        WHERE relnamespace = current_schema()::regnamespace AND relname = ANY ($1) ORDER BY 1";
    let rows = sqlx::query(select).bind(&NEEDED[..]).fetch_all(connection).await.map_err(failed)?;
    let names = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<String>, _>>();
    let names = names.map_err(failed)?;
    match names.is_empty() {
        true => Ok(()),
        false => Err(refused(format!(
            "the names `{}` are in use, and this program needs them; rename them, or use another database",
            names.join("`, `")
        ))),
    }
}

/// Writes the rows of the old tables into the new ones. An issue is `queued` exactly if it has unprocessed events; the sweep
/// finds it, because it was never nudged.
async fn copy_rows(
    connection: &mut PgConnection,
    integrations: &[AdoptedIntegration],
    columns: &Columns,
) -> Result<(), sqlx::Error> {
    let (mut old_ids, mut names, mut providers, mut projects) = (vec![], vec![], vec![], vec![]);
    for one in integrations {
        old_ids.push(one.old_id);
        names.push(one.name.as_str());
        providers.push(one.provider.as_str());
        projects.push(one.project.as_str());
    }
    sqlx::query(
        "INSERT INTO integrations (name, provider)
         SELECT DISTINCT name, provider FROM unnest($1::text[], $2::text[]) AS n (name, provider)",
    )
    .bind(&names)
    .bind(&providers)
    .execute(&mut *connection)
    .await?;
    // A column that the old table may have, or what stands for it.
    let or = |table: &str, column: &str, types: &[&str], value: &str| {
        let found = columns.get(&(table.to_owned(), column.to_owned()));
        match found.is_some_and(|found| types.contains(&found.as_str())) {
            true => format!("coalesce(o.{column}::text, {value}::text)"),
            false => format!("{value}::text"),
        }
    };
    let texts = ["text", "character varying"];
    let time = |expression: &str| format!("date_trunc('milliseconds', {expression}::timestamptz)");
    let issues = format!(
        "INSERT INTO issues (id, integration_id, external_project_id, external_issue_id, processing_status,
             last_processed_at, discussions, pending_events, first_pending_at, completed_event_log_id, created_at)
         SELECT o.id, g.id, n.project, o.external_issue_id::text,
             CASE WHEN e.pending > 0 THEN 'queued' ELSE 'idle' END, {last_processed_at}, {discussions}::jsonb,
             coalesce(e.pending, 0), {first_pending_at}, e.completed, {created_at}
         FROM {OLD_SCHEMA}.issues o
         JOIN unnest($1::bigint[], $2::text[], $3::text[]) AS n (old_id, name, project) ON n.old_id = o.integration_id
         JOIN integrations g ON g.name = n.name
         LEFT JOIN (
             SELECT issue_id, count(*) FILTER (WHERE processed_at IS NULL) AS pending,
                 min(created_at) FILTER (WHERE processed_at IS NULL) AS first_pending,
                 max(id) FILTER (WHERE processed_at IS NOT NULL) AS completed
             FROM {OLD_SCHEMA}.event_logs GROUP BY issue_id
         ) e ON e.issue_id = o.id",
        last_processed_at = time(&or("issues", "last_processed_at", &TIMES, "NULL")),
        discussions = or("issues", "discussions", &["jsonb", "json"], "'[]'"),
        first_pending_at = time("e.first_pending"),
        created_at = time(&or("issues", "created_at", &TIMES, "now()")),
    );
    sqlx::query(AssertSqlSafe(issues))
        .bind(&old_ids)
        .bind(&names)
        .bind(&projects)
        .execute(&mut *connection)
        .await?;
    let event_logs = format!(
        "INSERT INTO event_logs (id, issue_id, integration_id, source, event_type, dedup_key, digest, payload,
             payload_bytes, processed_at, processing_error, created_at)
         SELECT o.id, i.id, i.integration_id, g.provider, {event_type}, 'adopted:' || o.id,
             sha256(convert_to(o.payload::text, 'UTF8')), o.payload::jsonb, octet_length(o.payload::jsonb::text),
             {processed_at}, {processing_error}, {created_at}
         FROM {OLD_SCHEMA}.event_logs o JOIN issues i ON i.id = o.issue_id JOIN integrations g ON g.id = i.integration_id",
        event_type = or("event_logs", "event_type", &texts, "'adopted'"),
        processed_at = time("o.processed_at"),
        processing_error = or("event_logs", "processing_error", &texts, "NULL"),
        created_at = time("o.created_at"),
    );
    connection.execute(AssertSqlSafe(event_logs)).await?;
    for table in ["issues", "event_logs"] {
        let next = format!(
            "SELECT setval('{table}_id_seq', (SELECT coalesce(max(id), 0) + 1 FROM {table}), false)"
        );
        connection.execute(AssertSqlSafe(next)).await?;
    }
    Ok(())
}

async fn report(
    connection: &mut PgConnection,
    moved: Vec<String>,
) -> Result<AdoptionReport, sqlx::Error> {
    let counts = format!(
        "SELECT (SELECT count(*) FROM issues), (SELECT count(*) FROM issues WHERE processing_status = 'queued'),
             (SELECT count(*) FROM {OLD_SCHEMA}.issues WHERE processing_status = 'processing'),
             (SELECT count(*) FROM event_logs), (SELECT count(*) FROM event_logs WHERE processed_at IS NULL)"
    );
    let row = sqlx::query(AssertSqlSafe(counts)).fetch_one(connection).await?;
    Ok(AdoptionReport {
        moved,
        issues: row.try_get(0)?,
        queued: row.try_get(1)?,
        interrupted: row.try_get(2)?,
        event_logs: row.try_get(3)?,
        unprocessed: row.try_get(4)?,
    })
}

async fn flag(connection: &mut PgConnection, query: &str) -> Result<bool, sqlx::Error> {
    sqlx::query(AssertSqlSafe(query.to_owned())).fetch_one(connection).await?.try_get(0)
}
