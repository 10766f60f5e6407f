//! The audit log: who changed what, and when.
//!
//! Upstream: `router.rs` adds [`record`] to every route that changes something; `cli/local_audit.rs` does the same
//! for commands that open the streams themselves. Downstream: the table `audit_log` in the same database as the
//! issues, shared by all processes.
//! Guarantees: an entry is committed before its change begins; if that fails, the change is rejected. The status is
//! added afterwards; an entry without a status belongs to an interrupted change. The entry of a request whose route says
//! that it was a dry run ([`DryRun`]) is removed again, because bodies are not recorded and it would look like the change.
//! Servers keep at most `audit.rows_max` entries, plus up to a thousand; commands remove no others. Bodies may
//! be confidential. Sending and consuming messages is not recorded, except for the server's own streams: it would evict
//! everything else, and topics must work without the database. Metrics count those requests.

mod sql;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures_util::{StreamExt, stream};
use headwater_console::NotBegun;
use headwater_issue::{IssueError, IssueId, Store};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use headwater_stream::{Coalescer, CoalescerConfig};
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use tracing::warn;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::api::is_internal_stream;
use crate::api::names::wire_topic;
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::{self, Principal};
use crate::http::body::{JsonResult, NDJSON};
use crate::http::client_address::ClientAddress;
use crate::http::extract::QueryParams;
use crate::http::paging;
use crate::http::router::EXTENSION_PREFIX;
use crate::server::app_state::App;
use crate::tickets::{self, TICKET_EVENTS};

/// Maximum entries in one transaction.
const BATCH_MAX: usize = 256;
/// Maximum bytes of a path.
const PATH_BYTES_MAX: usize = 512;
/// Default and maximum entries of a page.
const PAGE_DEFAULT: usize = 50;
const PAGE_MAX: usize = 500;
/// Entries that one page compares with a filter. Paths and callers have no index, because each change would pay for it.
const SEARCHED_MAX: usize = 10_000;
/// Default and maximum issues of a page of a consistency check.
const CONSISTENCY_DEFAULT: usize = headwater_issue::limits::CONSISTENCY_PAGE;
const CONSISTENCY_MAX: usize = headwater_issue::limits::PAGE_MAX;

/// Suffixes of routes that move messages of topics.
const NOT_RECORDED: [&str; 4] = [
    "/topics/{topic}/messages",
    "/groups/{group}/pull",
    "/groups/{group}/settle",
    "/groups/{group}/extend",
];

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AuditRow {
    /// Increases over time (UUID v7).
    id: String,
    at: Timestamp,
    caller: String,
    role: String,
    client: String,
    method: String,
    path: String,
    /// Status of the response, once there is one.
    status: Option<u16>,
}

/// Which entries a page has.
#[derive(Clone, Debug, Default)]
struct AuditFilter {
    /// Only entries of this caller.
    caller: Option<String>,
    /// Only entries whose path contains this text, in upper or lower case.
    path: Option<String>,
    /// Only entries of this time or later.
    from: Option<Timestamp>,
}

impl AuditFilter {
    fn is_empty(&self) -> bool {
        self.caller.is_none() && self.path.is_none() && self.from.is_none()
    }
}

/// A page of the entries that match a filter.
#[derive(Debug, PartialEq, Eq)]
struct AuditRows {
    entries: Vec<AuditRow>,
    /// How many entries were compared with the filter, at most [`SEARCHED_MAX`].
    searched: usize,
    /// The id of the last of them, if there may be more.
    next: Option<String>,
}

/// A pending write.
#[derive(Clone, Debug)]
enum AuditWrite {
    Begin(AuditRow),
    End {
        id: String,
        status: u16,
    },
    /// Removes an entry that has no status.
    Remove {
        id: String,
    },
}

/// Mark of the response to a dry run, which has changed nothing. Only the routes that made the dry run set it, so a change cannot
/// lose its entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DryRun;

impl DryRun {
    /// The mark of a response, if it is one to a dry run.
    pub(crate) fn mark(is_dry_run: bool) -> Option<Extension<Self>> {
        is_dry_run.then_some(Extension(Self))
    }
}

/// Whether a change has begun: an extension of a request, for middleware that may drop the request before that.
#[derive(Clone, Debug, Default)]
pub(super) struct ChangeBegun(Arc<AtomicBool>);

impl ChangeBegun {
    fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// The audit log.
pub(crate) struct AuditLog {
    store: Arc<dyn Store>,
    writes: Coalescer<AuditWrite, Result<(), IssueError>>,
}

impl AuditLog {
    /// Opens the log of a server, creates its table if missing, and keeps at most `rows_max` entries.
    pub(crate) async fn open(store: Arc<dyn Store>, rows_max: u64) -> Result<Self, IssueError> {
        let audit = Self::open_with(Arc::clone(&store), Some(rows_max)).await?;
        sql::trim(store.as_ref(), rows_max).await?;
        Ok(audit)
    }

    /// Opens the log for a command, which removes nothing: the limit is a setting of the servers.
    pub(crate) async fn open_append_only(store: Arc<dyn Store>) -> Result<Self, IssueError> {
        Self::open_with(store, None).await
    }

    async fn open_with(store: Arc<dyn Store>, rows_max: Option<u64>) -> Result<Self, IssueError> {
        tickets::migrate(store.as_ref()).await?;
        let writer = Arc::new(sql::AuditWriter::new(Arc::clone(&store), rows_max));
        let config = CoalescerConfig { max_items: BATCH_MAX, ..CoalescerConfig::default() };
        let writes = Coalescer::new(config, move |batch: Vec<AuditWrite>| {
            let writer = Arc::clone(&writer);
            async move { writer.write(&batch).await }
        });
        let writes = writes.expect("the coalescer config is valid");
        Ok(Self { store, writes })
    }

    /// Records a change that was made without a request, with the status its route would return.
    pub(crate) async fn record_local(
        &self,
        caller: &Principal,
        (method, path): (&str, &str),
        status: u16,
    ) -> Result<(), ApiError> {
        let entry = AuditRow::new(Some(caller), String::new(), method, path);
        let id = self.begin(entry).await?;
        self.end(id, status).await;
        Ok(())
    }

    /// Records an attempt to log in: who it turned out to be, from where, and the status of the response.
    pub(super) async fn record_login(
        &self,
        caller: Option<&Principal>,
        client: Option<ClientAddress>,
        path: &str,
        status: u16,
    ) -> Result<(), ApiError> {
        let client = client.map(|client| client.ip().to_string()).unwrap_or_default();
        let id = self.begin(AuditRow::new(caller, client, "POST", path)).await?;
        self.end(id, status).await;
        Ok(())
    }

    /// Records the start of a change that no middleware sees; [`end_change`](Self::end_change) adds its status.
    pub(super) async fn begin_change(
        &self,
        caller: &Principal,
        client: Option<ClientAddress>,
        method: &str,
        path: &str,
    ) -> Result<String, ApiError> {
        let client = client.map(|client| client.ip().to_string()).unwrap_or_default();
        self.begin(AuditRow::new(Some(caller), client, method, path)).await
    }

    /// Records the status of a change that [`begin_change`](Self::begin_change) has started.
    pub(super) async fn end_change(&self, id: String, status: u16) {
        self.end(id, status).await;
    }

    /// Records the start of a change and returns the id of its entry.
    async fn begin(&self, entry: AuditRow) -> Result<String, ApiError> {
        let id = entry.id.clone();
        self.write(AuditWrite::Begin(entry)).await?;
        Ok(id)
    }

    /// Records the status of a change.
    async fn end(&self, id: String, status: u16) {
        if let Err(error) = self.write(AuditWrite::End { id, status }).await {
            // The change is done and has an entry; only its status is missing.
            warn!(?error, "failed to write the status of a change to the audit log");
        }
    }

    /// Removes the entry of a request that has changed nothing.
    async fn remove(&self, id: String) {
        if let Err(error) = self.write(AuditWrite::Remove { id }).await {
            warn!(?error, "failed to remove the entry of a dry run from the audit log");
        }
    }

    async fn write(&self, write: AuditWrite) -> Result<(), ApiError> {
        match self.writes.call(write).await {
            Ok(written) => Ok(written?),
            Err(_) => Err(ApiError::unavailable("audit log unavailable; try again later")),
        }
    }

    async fn page(
        &self,
        filter: &AuditFilter,
        before: Option<&str>,
        limit: usize,
    ) -> Result<AuditRows, IssueError> {
        sql::page(self.store.as_ref(), filter, before, (limit, SEARCHED_MAX)).await
    }
}

/// Middleware: records every change before it begins, and its status afterwards. Whether a request is a dry run is known to its
/// route only, so its entry is removed afterwards; that of one that was rejected stays.
pub(crate) async fn record(
    State(audit): State<Arc<AuditLog>>,
    request: Request,
    next: Next,
) -> Response {
    let begun = request.extensions().get::<ChangeBegun>().cloned().unwrap_or_default();
    if !is_recorded(&request) {
        begun.set();
        return next.run(request).await;
    }
    let id = match audit.begin(entry(&request)).await {
        Ok(id) => id,
        Err(error) => return (Extension(NotBegun), error).into_response(),
    };
    begun.set();
    let response = next.run(request).await;
    if response.extensions().get::<DryRun>().is_some() {
        audit.remove(id).await;
        return response;
    }
    let status = response.status().as_u16();
    if is_ndjson(&response) {
        return response.map(|body| finish_with_body(body, audit, id, status));
    }
    audit.end(id, status).await;
    response
}

/// Whether a request belongs into the audit log.
pub(crate) fn is_recorded(request: &Request) -> bool {
    let route = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    // Routes of an embedding program may have any name.
    let is_ours = !route.starts_with(EXTENSION_PREFIX);
    let moves_messages = is_ours && NOT_RECORDED.iter().any(|end| route.ends_with(end));
    let topic = request.uri().path().split("/topics/").nth(1).unwrap_or_default();
    let topic = topic.split('/').next().unwrap_or_default();
    // Decoded as the routes do; they reject what is not UTF-8.
    let topic = percent_decode_str(topic).decode_utf8_lossy();
    let topic = wire_topic(topic.into_owned());
    let is_own = is_internal_stream(&topic) || topic == TICKET_EVENTS;
    !auth::is_read_only(request.method()) && (!moves_messages || is_own)
}

/// Whether the response streams while the work continues.
fn is_ndjson(response: &Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes() == NDJSON.as_bytes())
}

/// Records the status when the body ends. If the client stops reading, the change was interrupted and has no status.
fn finish_with_body(body: Body, audit: Arc<AuditLog>, id: String, status: u16) -> Body {
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

fn entry(request: &Request) -> AuditRow {
    let client = request.extensions().get::<ClientAddress>().map(|client| client.ip().to_string());
    let caller = request.extensions().get::<Principal>();
    AuditRow::new(
        caller,
        client.unwrap_or_default(),
        request.method().as_str(),
        request.uri().path(),
    )
}

impl AuditRow {
    fn new(caller: Option<&Principal>, client: String, method: &str, path: &str) -> Self {
        let mut path = path.to_owned();
        // Paths are ASCII.
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

/// Filter of the audit log.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AuditQuery {
    /// Only entries of this caller: the name of a token, or `cli:USER`.
    caller: Option<String>,
    /// Only entries whose path contains this text, in upper or lower case.
    path: Option<String>,
    /// Only entries of this time or later, such as `2026-11-15T10:00:00Z`.
    from: Option<String>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
    /// Maximum number of entries: 50 by default, 500 at most.
    limit: Option<usize>,
}

impl AuditQuery {
    fn filter(&self) -> Result<AuditFilter, ApiError> {
        let text = |name: &str, value: &Option<String>| match value {
            Some(value) if value.contains('\0') => {
                Err(ApiError::invalid(format!("`{name}` contains a control character")))
            }
            // A form sends its empty fields, too.
            value => Ok(value.clone().filter(|value| !value.is_empty())),
        };
        let time = |text: String| {
            Timestamp::from_rfc3339(&text).ok_or_else(|| {
                let allowed = "expected a time such as 2026-11-15T10:00:00Z";
                ApiError::invalid(format!("invalid `from` = `{text}`; {allowed}"))
            })
        };
        Ok(AuditFilter {
            caller: text("caller", &self.caller)?,
            path: text("path", &self.path)?,
            from: text("from", &self.from)?.map(time).transpose()?,
        })
    }
}

/// A page of audit entries.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AuditPage {
    entries: Vec<AuditEntryDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<String>,
    /// With a filter: how many entries were searched for this page, from `cursor` on, at most 10000. If `next_cursor` is not `null`,
    /// the next page continues with older ones; a page may be empty although there is a next one.
    #[serde(skip_serializing_if = "Option::is_none")]
    searched: Option<usize>,
}

/// A recorded change.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AuditEntryDto {
    id: String,
    at: String,
    caller: String,
    role: String,
    client: String,
    method: String,
    path: String,
    /// `null` if the change was interrupted.
    status: Option<u16>,
}

/// List changes made over HTTP and by local commands, newest first.
#[utoipa::path(get, path = "/audit", tag = "audit", params(AuditQuery), responses((status = 200, body = AuditPage)))]
async fn list(
    State(app): State<App>,
    principal: Principal,
    QueryParams(query): QueryParams<AuditQuery>,
) -> JsonResult<AuditPage> {
    principal.require_role(Role::Admin)?;
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let filter = query.filter()?;
    let cursor = query.cursor.as_deref().map(|cursor| {
        let wrong = |_| ApiError::invalid("`cursor` must be the `next_cursor` of a previous page");
        Uuid::parse_str(cursor).map(|id| id.to_string()).map_err(wrong)
    });
    let cursor = cursor.transpose()?;
    let page = app.audit.page(&filter, cursor.as_deref(), limit).await?;
    Ok(Json(AuditPage {
        entries: page.entries.into_iter().map(describe).collect(),
        next_cursor: page.next,
        searched: (!filter.is_empty()).then_some(page.searched),
    }))
}

fn describe(entry: AuditRow) -> AuditEntryDto {
    AuditEntryDto {
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

/// Which issues to check.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ConsistencyQuery {
    /// `next_cursor` of the previous page, which is the id of its last issue.
    cursor: Option<i64>,
    /// Maximum number of issues: 200 by default, 1000 at most. Fewer are checked if these have so many events that it takes too long.
    limit: Option<usize>,
}

/// Consistency of one page of issues, in one snapshot: recorded = processed + pending + quarantined.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ConsistencyResponse {
    /// Whether the totals and every issue of the page are consistent.
    balances: bool,
    issues: u64,
    recorded: u64,
    processed: u64,
    pending: u64,
    quarantined: u64,
    /// Number of inconsistent issues.
    discrepancies_total: u64,
    /// The inconsistent issues.
    discrepancies: Vec<DiscrepancyDto>,
    /// Cursor of the next page, or `null` if all issues are checked.
    next_cursor: Option<i64>,
}

/// An inconsistent issue.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DiscrepancyDto {
    issue_id: i64,
    processing_status: &'static str,
    /// Pending events according to the issue row.
    pending_events: i64,
    /// Unprocessed rows in `event_logs`.
    unprocessed: u64,
    quarantined: bool,
    problem: String,
}

/// Count the events of a page of issues and list the inconsistent issues. To check everything, follow `next_cursor`; a page holds
/// no snapshot after it is answered, so a check can be resumed at any time.
#[utoipa::path(get, path = "/audit/books", tag = "audit", params(ConsistencyQuery),
    responses((status = 200, body = ConsistencyResponse)))]
async fn books(
    State(app): State<App>,
    QueryParams(query): QueryParams<ConsistencyQuery>,
) -> JsonResult<ConsistencyResponse> {
    let limit = paging::limit(query.limit, CONSISTENCY_DEFAULT, CONSISTENCY_MAX)?;
    let audit = app.store.check_fitting_page(query.cursor.map(IssueId), limit).await?;
    let line = |found: &headwater_issue::Discrepancy| DiscrepancyDto {
        issue_id: found.issue_id.0,
        processing_status: found.status.as_str(),
        pending_events: found.pending_events,
        unprocessed: found.unprocessed,
        quarantined: found.quarantined,
        problem: found.problem.clone(),
    };
    Ok(Json(ConsistencyResponse {
        balances: audit.is_consistent(),
        issues: audit.issues,
        recorded: audit.recorded,
        processed: audit.processed,
        pending: audit.pending,
        quarantined: audit.quarantined,
        discrepancies_total: audit.discrepancies_total,
        discrepancies: audit.discrepancies.iter().map(line).collect(),
        next_cursor: audit.resume_after.map(|issue| issue.0),
    }))
}
