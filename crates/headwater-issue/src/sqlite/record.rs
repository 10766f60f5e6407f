//! Records events on SQLite: looks up their keys, stores new events and counts them on their issues.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use headwater_stream::clock::Timestamp;
use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnection;
use sqlx::{Error, Row};

use super::state_batch::StateBatch;
use super::statements::{json_rows, to_column};
use crate::error::Result;
use crate::event_batch::{ValidatedEvent, conflict, unknown_integration};
use crate::issue::{
    DebounceWindow, EventLogId, IntegrationId, IssueId, ProcessingStatus, Recorded,
};
use crate::state::{Transition, TransitionEffect};

/// An existing event log with the key of an event.
struct ExistingEvent {
    id: EventLogId,
    issue_id: IssueId,
    digest: Vec<u8>,
    processed: bool,
}

/// Result of looking up an event, before it is known whether to nudge.
enum EventLookup {
    UnknownIntegration,
    Conflict,
    Duplicate(ExistingEvent),
    Stored(IssueId, EventLogId),
}

/// Stores events with distinct keys, in the transaction of `connection`.
pub(super) async fn record(
    connection: &mut SqliteConnection,
    events: &[ValidatedEvent<'_>],
    debounce: &DebounceWindow,
    now: Timestamp,
) -> Result<Vec<Result<Recorded>>, Error> {
    let integrations = integrations(connection, events).await?;
    let integration =
        |event: &ValidatedEvent<'_>| integrations.get(&event.event.integration).copied();
    let mut known = known_keys(connection, events, &integration).await?;
    let mut issues = known_issues(connection, events, &integration).await?;

    let is_new = |index: usize, event: &ValidatedEvent<'_>| {
        integration(event).filter(|_| !known.contains_key(&index))
    };
    let mut missing = BTreeSet::new();
    for (index, event) in events.iter().enumerate() {
        if let Some(integration) = is_new(index, event) {
            let (project, issue) = provider_ids(event);
            missing.insert((integration.0, project, issue));
        }
    }
    missing.retain(|(integration, project, issue)| {
        !issues.contains_key(&(IntegrationId(*integration), *project, *issue))
    });
    if !missing.is_empty() {
        create_issues(connection, &missing, now).await?;
        issues = known_issues(connection, events, &integration).await?;
    }

    let mut new = Vec::with_capacity(events.len());
    for (index, event) in events.iter().enumerate() {
        if let Some(integration) = is_new(index, event) {
            let (project, issue) = provider_ids(event);
            let issue_id = issues.get(&(integration, project, issue)).copied();
            new.push((issue_id.ok_or(Error::RowNotFound)?, integration, event));
        }
    }
    let ids = insert(connection, &new, now).await?;
    let mut counts: BTreeMap<IssueId, u64> = BTreeMap::new();
    new.iter().for_each(|(issue_id, ..)| *counts.entry(*issue_id).or_default() += 1);
    let mut stored = new.iter().zip(ids).map(|((issue_id, ..), id)| (*issue_id, id));
    let mut found = Vec::with_capacity(events.len());
    for (index, event) in events.iter().enumerate() {
        found.push(match (integration(event), known.remove(&index)) {
            (None, _) => EventLookup::UnknownIntegration,
            (_, Some(known)) if known.digest != event.digest => EventLookup::Conflict,
            (_, Some(known)) => EventLookup::Duplicate(known),
            (Some(_), None) => {
                let (issue_id, id) = stored.next().ok_or(Error::RowNotFound)?;
                EventLookup::Stored(issue_id, id)
            }
        });
    }
    count_and_report(connection, events, found, &counts, debounce, now).await
}

/// Counts the stored events on their issues, and returns the result of each event.
async fn count_and_report(
    connection: &mut SqliteConnection,
    events: &[ValidatedEvent<'_>],
    found: Vec<EventLookup>,
    counts: &BTreeMap<IssueId, u64>,
    debounce: &DebounceWindow,
    now: Timestamp,
) -> Result<Vec<Result<Recorded>>, Error> {
    let touched = found.iter().filter_map(|found| match found {
        EventLookup::Stored(issue_id, _) => Some(*issue_id),
        EventLookup::Duplicate(known) => Some(known.issue_id),
        EventLookup::UnknownIntegration | EventLookup::Conflict => None,
    });
    let mut states = StateBatch::load(connection, touched, now).await?;
    let mut queued = HashSet::new();
    for (issue_id, events) in counts {
        let effect =
            states.apply(*issue_id, &Transition::Record { events: *events, debounce: *debounce });
        if effect == Some(TransitionEffect::Queued) {
            queued.insert(*issue_id);
        }
    }

    let mut nudged = HashSet::new();
    let mut recorded = |issue_id, event_log_id, duplicate, processed: bool| {
        let state = states.get(issue_id);
        let is_queued = state.is_some_and(|state| state.status == ProcessingStatus::Queued);
        let wanted = if duplicate { is_queued && !processed } else { queued.contains(&issue_id) };
        Recorded {
            issue_id,
            event_log_id,
            duplicate,
            nudge: wanted && nudged.insert(issue_id),
            not_before: state.and_then(|state| state.not_before),
        }
    };
    let results = found.into_iter().zip(events).map(|(found, event)| match found {
        EventLookup::UnknownIntegration => Err(unknown_integration(event.event)),
        EventLookup::Conflict => Err(conflict(event.event, &event.key)),
        EventLookup::Duplicate(known) => {
            Ok(recorded(known.issue_id, known.id, true, known.processed))
        }
        EventLookup::Stored(issue_id, id) => Ok(recorded(issue_id, id, false, false)),
    });
    let results = results.collect();
    states.save(connection).await?;
    Ok(results)
}

async fn integrations(
    connection: &mut SqliteConnection,
    events: &[ValidatedEvent<'_>],
) -> Result<HashMap<String, IntegrationId>, Error> {
    let names: HashSet<&str> =
        events.iter().map(|event| event.event.integration.as_str()).collect();
    let rows = sqlx::query(
        "SELECT name, id FROM integrations WHERE name IN (SELECT value FROM json_each(?1))",
    )
    .bind(json_rows(names.into_iter().map(Value::from).collect()))
    .fetch_all(connection)
    .await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, IntegrationId(row.try_get(1)?)))).collect()
}

/// Existing event logs with the keys of these events, by the index of the event.
async fn known_keys(
    connection: &mut SqliteConnection,
    events: &[ValidatedEvent<'_>],
    integration: &impl Fn(&ValidatedEvent<'_>) -> Option<IntegrationId>,
) -> Result<HashMap<usize, ExistingEvent>, Error> {
    let keys = events.iter().map(|event| json!([integration(event).map(|id| id.0), event.key]));
    let rows = sqlx::query(
        "SELECT asked.key, e.id, e.issue_id, e.digest, e.processed_at IS NOT NULL
         FROM json_each(?1) AS asked
         CROSS JOIN event_logs AS e
             ON e.integration_id = asked.value ->> 0 AND e.dedup_key = asked.value ->> 1",
    )
    .bind(json_rows(keys.collect()))
    .fetch_all(connection)
    .await?;
    let read = |row: &sqlx::sqlite::SqliteRow| {
        let known = ExistingEvent {
            id: EventLogId(row.try_get(1)?),
            issue_id: IssueId(row.try_get(2)?),
            digest: row.try_get(3)?,
            processed: row.try_get(4)?,
        };
        Ok((crate::row_decoding::count(row.try_get(0)?)?, known))
    };
    rows.iter().map(read).collect()
}

/// Existing issues of these events, by their ids at the provider.
async fn known_issues<'a>(
    connection: &mut SqliteConnection,
    events: &[ValidatedEvent<'a>],
    integration: &impl Fn(&ValidatedEvent<'_>) -> Option<IntegrationId>,
) -> Result<HashMap<(IntegrationId, &'a str, &'a str), IssueId>, Error> {
    let names = events.iter().map(|event| {
        let (project, issue) = provider_ids(event);
        json!([integration(event).map(|id| id.0), project, issue])
    });
    let rows = sqlx::query(
        "SELECT asked.key, i.id FROM json_each(?1) AS asked
         CROSS JOIN issues AS i ON i.integration_id = asked.value ->> 0
             AND i.external_project_id = asked.value ->> 1
             AND i.external_issue_id = asked.value ->> 2",
    )
    .bind(json_rows(names.collect()))
    .fetch_all(connection)
    .await?;
    let mut issues = HashMap::new();
    for row in &rows {
        let index: usize = crate::row_decoding::count(row.try_get(0)?)?;
        if let Some(event) = events.get(index)
            && let Some(integration) = integration(event)
        {
            let (project, issue) = provider_ids(event);
            issues.insert((integration, project, issue), IssueId(row.try_get(1)?));
        }
    }
    Ok(issues)
}

/// Project and issue id of an event at the provider.
fn provider_ids<'a>(event: &ValidatedEvent<'a>) -> (&'a str, &'a str) {
    (&event.event.external_project_id, &event.event.external_issue_id)
}

async fn create_issues(
    connection: &mut SqliteConnection,
    names: &BTreeSet<(i64, &str, &str)>,
    now: Timestamp,
) -> Result<(), Error> {
    sqlx::query(
        "INSERT INTO issues
             (integration_id, external_project_id, external_issue_id, created_at, updated_at)
         SELECT value ->> 0, value ->> 1, value ->> 2, ?2, ?2 FROM json_each(?1)",
    )
    .bind(json_rows(names.iter().map(|names| json!(names)).collect()))
    .bind(to_column(now))
    .execute(connection)
    .await?;
    Ok(())
}

/// Stores new events, each with its issue, and returns their ids in the order of the events.
async fn insert(
    connection: &mut SqliteConnection,
    events: &[(IssueId, IntegrationId, &ValidatedEvent<'_>)],
    now: Timestamp,
) -> Result<Vec<EventLogId>, Error> {
    if events.is_empty() {
        return Ok(vec![]);
    }
    let row = |(issue_id, integration, event): &(IssueId, IntegrationId, &ValidatedEvent<'_>)| {
        json!([
            issue_id.0,
            integration.0,
            event.event.source,
            event.event.event_type,
            event.key,
            hex::encode(&event.digest),
            event.payload,
            event.payload.len(),
            event.event.trace.map(|trace| trace.to_string()),
        ])
    };
    // Rows get their ids in the order of the array, but may be returned in another one.
    let rows = sqlx::query(
        "INSERT INTO event_logs (issue_id, integration_id, source, event_type, dedup_key, digest,
             payload, payload_bytes, trace, created_at)
         SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, unhex(value ->> 5),
             value ->> 6, value ->> 7, value ->> 8, ?2 FROM json_each(?1)
         RETURNING id",
    )
    .bind(json_rows(events.iter().map(row).collect()))
    .bind(to_column(now))
    .fetch_all(&mut *connection)
    .await?;
    let mut ids = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<i64>, _>>()?;
    ids.sort_unstable();
    for (id, (.., event)) in ids.iter().zip(events) {
        if let Some(original) = event.original {
            sqlx::query("INSERT INTO event_log_originals (event_log_id, body) VALUES (?1, ?2)")
                .bind(*id)
                .bind(original.as_bytes())
                .execute(&mut *connection)
                .await?;
        }
    }
    Ok(ids.into_iter().map(EventLogId).collect())
}
