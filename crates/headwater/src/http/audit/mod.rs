//! The audit log: who changed what, and when.
//!
//! Upstream: `router` puts [`record`] around every route that changes something, and so does `operator` for verbs that open the
//! streams themselves. Downstream: the table `audit_log` of the same database as the issues, so that all processes share it.
//! Promises: no change without an entry: it is committed before the change begins, and a change whose entry cannot be
//! written is refused. How it ended is added afterwards; an entry without an end is of a change that was cut off. At most
//! `audit.rows_max` entries are kept by servers, within a thousand; verbs remove none. Not here: bodies, which may hold what is nobody's business.

mod sql;

use std::net::IpAddr;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::Response;
use futures_util::{StreamExt, stream};
use headwater_issue::{IssueError, Store};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use headwater_stream::{Coalescer, CoalescerConfig};
use serde::Serialize;
use tracing::warn;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::config::Role;
use crate::http::auth::{self, Caller};
use crate::http::body::{Answer, LINES};
use crate::http::extract::QueryOf;
use crate::http::paging::{self, PageQuery};
use crate::http::{ApiError, Peer};
use crate::server::app_state::App;
use crate::tickets;

/// Entries written in one commit.
const BATCH_MAX: usize = 256;
/// Letters of a path that are kept.
const PATH_BYTES_MAX: usize = 512;
/// Entries on one page, if nobody says otherwise, and at most.
const PAGE_DEFAULT: usize = 50;
const PAGE_MAX: usize = 500;

/// The end of the routes whose calls are parts of a change that has an entry: every message of `consume` is settled.
const PART_OF_ANOTHER: &str = "/settle";

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// Grows with time.
    id: String,
    at: Timestamp,
    caller: String,
    role: String,
    client: String,
    method: String,
    path: String,
    /// The status of the answer, once there was one.
    status: Option<u16>,
}

/// What is to be written.
#[derive(Clone, Debug)]
enum Write {
    Begin(Entry),
    End { id: String, status: u16 },
}

/// The log.
pub(crate) struct Audit {
    store: Arc<dyn Store>,
    writes: Coalescer<Write, Result<(), IssueError>>,
}

impl Audit {
    /// Opens the log of a server and creates its table if it is missing. So many entries are kept.
    pub(crate) async fn open(store: Arc<dyn Store>, rows_max: u64) -> Result<Self, IssueError> {
        let audit = Self::open_with(Arc::clone(&store), Some(rows_max)).await?;
        sql::trim(store.as_ref(), rows_max).await?;
        Ok(audit)
    }

    /// The same for a verb, which removes nothing: how much is kept is for the settings of the servers to say, and its own may
    /// be others.
    pub(crate) async fn open_to_add(store: Arc<dyn Store>) -> Result<Self, IssueError> {
        Self::open_with(store, None).await
    }

    async fn open_with(store: Arc<dyn Store>, rows_max: Option<u64>) -> Result<Self, IssueError> {
        tickets::migrate(store.as_ref()).await?;
        let writer = Arc::new(sql::Writer::new(Arc::clone(&store), rows_max));
        let config = CoalescerConfig { max_items: BATCH_MAX, ..CoalescerConfig::default() };
        let writes = Coalescer::new(config, move |batch: Vec<Write>| {
            let writer = Arc::clone(&writer);
            async move { writer.write(&batch).await }
        });
        let writes = writes.expect("the settings of the batch are within its limits");
        Ok(Self { store, writes })
    }

    /// Writes down what somebody began without a request, with the status that its route would answer.
    pub(crate) async fn note(
        &self,
        caller: &Caller,
        (method, path): (&str, &str),
        status: u16,
    ) -> Result<(), ApiError> {
        let entry = Entry::new(Some(caller), String::new(), method, path);
        let id = self.begin(entry).await?;
        self.end(id, status).await;
        Ok(())
    }

    /// Writes down that a change begins; returns what to name when it ends.
    async fn begin(&self, entry: Entry) -> Result<String, ApiError> {
        let id = entry.id.clone();
        self.write(Write::Begin(entry)).await?;
        Ok(id)
    }

    /// Writes down how it ended.
    async fn end(&self, id: String, status: u16) {
        if let Err(error) = self.write(Write::End { id, status }).await {
            // The change is made, and its entry is there; only its end is missing.
            warn!(?error, "the end of a change was not written to the audit log");
        }
    }

    async fn write(&self, write: Write) -> Result<(), ApiError> {
        match self.writes.call(write).await {
            Ok(written) => Ok(written?),
            Err(_) => Err(ApiError::unavailable("the audit log does not answer; try again")),
        }
    }

    async fn page(&self, before: Option<&str>, limit: usize) -> Result<Vec<Entry>, IssueError> {
        sql::page(self.store.as_ref(), before, limit).await
    }
}

/// A layer below access: an entry before every change, and how it ended.
pub(crate) async fn record(
    State(audit): State<Arc<Audit>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let route = request.extensions().get::<MatchedPath>();
    let is_part = route.is_some_and(|route| route.as_str().ends_with(PART_OF_ANOTHER));
    if auth::is_look(request.method()) || is_part {
        return Ok(next.run(request).await);
    }
    let id = audit.begin(entry(&request)).await?;
    let response = next.run(request).await;
    let status = response.status().as_u16();
    if is_lines(&response) {
        return Ok(response.map(|body| until_the_end(body, audit, id, status)));
    }
    audit.end(id, status).await;
    Ok(response)
}

/// Whether the work goes on while its answer is read, line by line.
fn is_lines(response: &Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes() == LINES.as_bytes())
}

/// The same body, whose end is that of the change. Of one that is not read to its end, the change was cut off.
fn until_the_end(body: Body, audit: Arc<Audit>, id: String, status: u16) -> Body {
    let state = Some((body.into_data_stream(), audit, id));
    Body::from_stream(stream::unfold(state, move |state| async move {
        let (mut chunks, audit, id) = state?;
        match chunks.next().await {
            Some(chunk) => Some((chunk, Some((chunks, audit, id)))),
            None => {
                audit.end(id, status).await;
                None
            }
        }
    }))
}

fn entry(request: &Request) -> Entry {
    let client = request.extensions().get::<Peer>().map(|peer| peer.0.ip());
    let client = client.as_ref().map_or_else(String::new, IpAddr::to_string);
    let caller = request.extensions().get::<Caller>();
    Entry::new(caller, client, request.method().as_str(), request.uri().path())
}

impl Entry {
    fn new(caller: Option<&Caller>, client: String, method: &str, path: &str) -> Self {
        let mut path = path.to_owned();
        // A path is ASCII.
        path.truncate(PATH_BYTES_MAX);
        Self {
            id: Uuid::now_v7().to_string(),
            at: SystemClock.now(),
            caller: caller.map_or_else(|| "unknown".to_owned(), |caller| caller.name.clone()),
            role: caller.map_or("none", |caller| caller.role.as_str()).to_owned(),
            client,
            method: method.to_owned(),
            path,
            status: None,
        }
    }
}

/// `/audit...`, below `/api/v1`.
pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(books))
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AuditPage {
    entries: Vec<AuditEntry>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<String>,
}

/// Who changed what, and when.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AuditEntry {
    id: String,
    at: String,
    caller: String,
    role: String,
    client: String,
    method: String,
    path: String,
    /// `null`: the change was cut off.
    status: Option<u16>,
}

/// The changes that were made over HTTP and by verbs on the servers themselves, newest first.
#[utoipa::path(get, path = "/audit", tag = "audit", params(PageQuery), responses((status = 200, body = AuditPage)))]
async fn list(
    State(app): State<App>,
    caller: Caller,
    QueryOf(query): QueryOf<PageQuery>,
) -> Answer<AuditPage> {
    caller.must_be(Role::Admin)?;
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let cursor = query.cursor.as_deref().map(|cursor| {
        let wrong = |_| ApiError::invalid("`cursor` must be the `next_cursor` of a page before");
        Uuid::parse_str(cursor).map(|id| id.to_string()).map_err(wrong)
    });
    let cursor = cursor.transpose()?;
    let entries = app.audit.page(cursor.as_deref(), limit).await?;
    let next = entries.last().filter(|_| entries.len() == limit).map(|entry| entry.id.clone());
    Ok(Json(AuditPage { entries: entries.into_iter().map(describe).collect(), next_cursor: next }))
}

fn describe(entry: Entry) -> AuditEntry {
    AuditEntry {
        id: entry.id,
        at: entry.at.to_rfc3339(),
        caller: entry.caller,
        role: entry.role,
        client: entry.client,
        method: entry.method,
        path: entry.path,
        status: entry.status,
    }
}

/// The books of all issues, seen at one moment: recorded = processed + pending + quarantined.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Books {
    /// Whether everything adds up: in sum, and for every issue.
    balances: bool,
    issues: u64,
    recorded: u64,
    processed: u64,
    pending: u64,
    quarantined: u64,
    /// How many issues do not add up.
    discrepancies_total: u64,
    /// Some of them.
    discrepancies: Vec<DiscrepancyLine>,
}

/// An issue whose books do not balance.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DiscrepancyLine {
    issue_id: i64,
    processing_status: &'static str,
    /// What its row counts as pending.
    pending_events: i64,
    /// Event logs that are not processed.
    unprocessed: u64,
    quarantined: bool,
    problem: String,
}

/// Counts the books, one at a time: all connections of the database would be counting, and none would be left for work. Who
/// goes away leaves the counting to its end, since the database goes on with it, too. A stop does not wait for it.
pub(crate) async fn count(app: &App) -> Result<headwater_issue::Audit, ApiError> {
    let store = Arc::clone(&app.store);
    let counting = async move { Ok(headwater_issue::audit(store.as_ref()).await?) };
    app.long_work.count(app.stopping.clone(), counting).await
}

/// Counts every event there ever was, and names the issues that do not add up. Reads everything: not for every second.
#[utoipa::path(get, path = "/audit/books", tag = "audit",
    responses((status = 200, body = Books), (status = 429, description = "They are being counted for somebody else.")))]
async fn books(State(app): State<App>) -> Answer<Books> {
    let audit = count(&app).await?;
    let line = |found: &headwater_issue::Discrepancy| DiscrepancyLine {
        issue_id: found.issue_id.0,
        processing_status: found.status.as_str(),
        pending_events: found.pending_events,
        unprocessed: found.unprocessed,
        quarantined: found.quarantined,
        problem: found.problem.clone(),
    };
    Ok(Json(Books {
        balances: audit.balances(),
        issues: audit.issues,
        recorded: audit.recorded,
        processed: audit.processed,
        pending: audit.pending,
        quarantined: audit.quarantined,
        discrepancies_total: audit.discrepancies_total,
        discrepancies: audit.discrepancies.iter().map(line).collect(),
    }))
}
