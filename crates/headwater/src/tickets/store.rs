//! The ticket store: every change is one transaction with its event log and outbox rows.
//!
//! Upstream: HTTP routes, stream entries, replies. Downstream: `sql::statements`, inside transactions of
//! `headwater-issue`.
//!
//! Guarantees: a message, its event log and its published event are committed together or not at all; repeating a call
//! with the same message id changes nothing. The row of a ticket is always locked before the row of its issue, which
//! prevents deadlocks, and the sequence numbers of the messages of a ticket grow in commit order. Times of tickets and
//! messages are those of the database, as for issues.

use std::sync::Arc;
use std::time::Duration;

use headwater_issue::history::{self, DeleteCondition};
use headwater_issue::metrics::EVENTS_RECORDED;
use headwater_issue::{
    CommitVerifier, DebounceWindow, IssueError, IssueId, KeyedOutboxRow, NewEvent, NewOutboxRow,
    Nudger, OutboxKind, Recorded, SqlValue, Store, StoreConnection, Transaction,
};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use metrics::counter;
use tokio::sync::{Semaphore, broadcast};
use uuid::Uuid;

use crate::desk::budget;
use crate::limits::PAGE_MAX;
use crate::telemetry;
use crate::tickets::desk_events::{DeskEvent, EventIssue};
use crate::tickets::sql::migrations;
use crate::tickets::sql::statements::{self, NewMessageRow, NewTicketRow, TicketVersion};
use crate::tickets::sql::ticket_lists;
use crate::tickets::ticket::{
    NewTicket, NewTicketMessage, PostedMessage, Ticket, TicketError, TicketFilter, TicketMessage,
    TicketStatus, checked_agent, checked_content, checked_title, checked_user,
};
use crate::tickets::{Author, TICKET_EVENTS, TicketEvent, TicketEventType, TicketPayload};

/// Name of the integration, and of its provider, whose issues are tickets.
pub const INTEGRATION: &str = "desk";

/// Maximum attempts of a transaction that conflicts with another one.
const CONFLICTS_MAX: u32 = 5;

/// Lists that a process searches for words at the same time. SQLite has 8 connections that read.
pub(super) const SEARCHES_MAX: usize = 2;

/// Buffered change notifications. A subscriber that lags further behind has to check every ticket.
const CHANGES_MAX: usize = 1024;

/// How long the token counts of days are kept.
const USAGE_KEPT: Duration = Duration::from_secs(31 * 24 * 60 * 60);

/// Rows that one transaction deletes.
const DELETE_BATCH: usize = 500;

/// Retries a transaction that conflicted with another one; the retry sees the other's changes.
pub(super) async fn retry_on_conflict<T, Calling: Future<Output = Result<T, TicketError>>>(
    call: impl Fn() -> Calling,
) -> Result<T, TicketError> {
    for _ in 1..CONFLICTS_MAX {
        match call().await {
            Err(error) if is_conflict(&error) => {}
            result => return result,
        }
    }
    call().await
}

/// The tickets of a database. Clones share state.
#[derive(Clone, Debug)]
pub struct Tickets {
    pub(super) store: Arc<dyn Store>,
    pub(super) nudger: Nudger,
    quiet: DebounceWindow,
    changes: broadcast::Sender<Uuid>,
    confirmations: CommitVerifier,
    /// Searches of lists that may begin.
    pub(super) searches: Arc<Semaphore>,
}

/// A change of a ticket within a transaction.
pub(super) struct TicketChange<'a> {
    pub(super) event: &'a TicketEvent,
    pub(super) source: &'static str,
    /// Whether the event is published to `ticket_events`.
    pub(super) publish: bool,
}

impl Tickets {
    /// Opens the ticket tables and applies missing migrations.
    pub async fn open(
        store: Arc<dyn Store>,
        nudger: Nudger,
        quiet: DebounceWindow,
    ) -> Result<Self, TicketError> {
        ensure_schema(&store).await?;
        Ok(Self::attach(store, nudger, quiet))
    }

    /// The tickets of a database whose tables exist. Changes nothing.
    pub(crate) fn attach(store: Arc<dyn Store>, nudger: Nudger, quiet: DebounceWindow) -> Self {
        let (changes, _) = broadcast::channel(CHANGES_MAX);
        let searches = Arc::new(Semaphore::new(SEARCHES_MAX));
        let confirmations = CommitVerifier::default();
        Self { store, nudger, quiet, changes, confirmations, searches }
    }

    /// Registers every committed event for confirmation: a sample is read back later.
    pub(crate) fn with_confirmations(self, confirmations: CommitVerifier) -> Self {
        Self { confirmations, ..self }
    }

    /// The same tickets with the connections of another store of the same database. Notifications are shared.
    pub(crate) fn on_store(&self, store: Arc<dyn Store>) -> Self {
        Self { store, ..self.clone() }
    }

    /// Opens a ticket with its first message. Idempotent by message id.
    pub async fn create(&self, new: NewTicket) -> Result<PostedMessage, TicketError> {
        let title = checked_title(&new.title)?;
        let content = checked_content(&new.content)?;
        let user_id = checked_user(new.user_id)?;
        let event = TicketEvent {
            event_type: TicketEventType::TicketCreated,
            ticket_id: Uuid::now_v7(),
            message_id: new.message_id.unwrap_or_else(Uuid::now_v7),
            user_id,
            payload: TicketPayload { title: Some(title), ..TicketPayload::new(content, now()) },
        };
        retry_on_conflict(|| self.create_once(&event)).await
    }

    async fn create_once(&self, event: &TicketEvent) -> Result<PostedMessage, TicketError> {
        let mut transaction = self.store.begin().await?;
        if let Some(known) = statements::message(transaction.connection(), event.message_id).await?
        {
            let ticket = statements::ticket(transaction.connection(), known.ticket_id).await?;
            let ticket = ticket.ok_or(TicketError::NotFound(known.ticket_id))?;
            let is_same = known.author == Author::User
                && known.content == event.payload.content
                && Some(&ticket.title) == event.payload.title.as_ref()
                && ticket.user_id == event.user_id;
            return duplicate(is_same, &ticket, event.message_id);
        }
        let change = TicketChange { event, source: INTEGRATION, publish: true };
        let recorded = self.open_with(transaction.as_mut(), &change).await?;
        self.commit(transaction, event.ticket_id, &recorded).await?;
        Ok(posted(event, recorded.issue_id, false))
    }

    /// Adds a message. A message of a user reopens a closed ticket. Idempotent by message id.
    pub async fn post(
        &self,
        ticket_id: Uuid,
        new: NewTicketMessage,
    ) -> Result<PostedMessage, TicketError> {
        let content = checked_content(&new.content)?;
        if new.author == Author::Assistant {
            return Err(TicketError::Invalid("author must be `user` or `agent`".to_owned()));
        }
        let author = (new.author == Author::Agent).then_some(Author::Agent);
        let agent = checked_agent(new.author, new.agent)?;
        let payload = TicketPayload { author, agent, ..TicketPayload::new(content, now()) };
        let message_id = new.message_id.unwrap_or_else(Uuid::now_v7);
        let event_type = TicketEventType::MessageReceived;
        let event = TicketEvent { event_type, ticket_id, message_id, user_id: None, payload };
        retry_on_conflict(|| self.post_once(&event)).await
    }

    async fn post_once(&self, event: &TicketEvent) -> Result<PostedMessage, TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = statements::lock_ticket(transaction.connection(), event.ticket_id).await?;
        let ticket = ticket.ok_or(TicketError::NotFound(event.ticket_id))?;
        if let Some(known) = statements::message(transaction.connection(), event.message_id).await?
        {
            let is_same = known.ticket_id == ticket.ticket_id
                && known.author == event.author()
                && known.agent == event.payload.agent
                && known.content == event.payload.content;
            return duplicate(is_same, &ticket, event.message_id);
        }
        let event = TicketEvent { user_id: ticket.user_id.clone(), ..event.clone() };
        let change = TicketChange { event: &event, source: INTEGRATION, publish: true };
        let recorded = self.add_to(transaction.as_mut(), &ticket, &change).await?;
        if event.author() == Author::User {
            let decided_by = Some(event.message_id);
            statements::set_status_event(transaction.connection(), ticket.ticket_id, decided_by)
                .await?;
        }
        self.commit(transaction, ticket.ticket_id, &recorded).await?;
        Ok(posted(&event, ticket.issue_id, false))
    }

    /// Closes a ticket. Returns whether it was open.
    pub async fn close(&self, ticket_id: Uuid) -> Result<bool, TicketError> {
        let event = status_event(TicketEventType::TicketClosed, ticket_id, Uuid::now_v7());
        retry_on_conflict(|| self.change_once(&event)).await
    }

    /// Reopens a ticket and lets the desk answer it. Returns whether that changed anything.
    pub async fn reopen(&self, ticket_id: Uuid) -> Result<bool, TicketError> {
        let event = status_event(TicketEventType::TicketReopened, ticket_id, Uuid::now_v7());
        retry_on_conflict(|| self.change_once(&event)).await
    }

    async fn change_once(&self, event: &TicketEvent) -> Result<bool, TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = statements::lock_ticket(transaction.connection(), event.ticket_id).await?;
        let ticket = ticket.ok_or(TicketError::NotFound(event.ticket_id))?;
        let closes = event.event_type == TicketEventType::TicketClosed;
        let is_unchanged = match ticket.status {
            TicketStatus::Closed => closes,
            TicketStatus::Open => !closes && !ticket.handed_over,
        };
        if is_unchanged {
            return Ok(false);
        }
        let event = TicketEvent { user_id: ticket.user_id.clone(), ..event.clone() };
        // There is no published event type for reopening.
        let change = TicketChange { event: &event, source: INTEGRATION, publish: closes };
        let recorded = self.record(transaction.as_mut(), &change).await?;
        self.set_status(transaction.as_mut(), &ticket, closes).await?;
        let decided_by = Some(event.message_id);
        statements::set_status_event(transaction.connection(), ticket.ticket_id, decided_by)
            .await?;
        self.commit(transaction, ticket.ticket_id, &recorded).await?;
        Ok(true)
    }

    /// A ticket, if it exists.
    pub async fn ticket(&self, ticket_id: Uuid) -> Result<Option<Ticket>, TicketError> {
        self.read(async |connection| statements::ticket(connection, ticket_id).await).await
    }

    /// At most `limit` messages of a ticket with a sequence number above `after`, in order.
    pub async fn messages(
        &self,
        ticket_id: Uuid,
        after: i64,
        limit: usize,
    ) -> Result<Vec<TicketMessage>, TicketError> {
        self.read(async |connection| {
            statements::messages(connection, ticket_id, after, page(limit)).await
        })
        .await
    }

    /// At most `limit` messages of a ticket with a sequence number below `before`: the newest of them, in order.
    pub async fn messages_before(
        &self,
        ticket_id: Uuid,
        before: i64,
        limit: usize,
    ) -> Result<Vec<TicketMessage>, TicketError> {
        self.read(async |connection| {
            // One more than a page, to know whether there are earlier ones.
            let limit = i64::try_from(limit.clamp(1, PAGE_MAX + 1)).unwrap_or(1);
            statements::messages_before(connection, ticket_id, before, limit).await
        })
        .await
    }

    /// One page of tickets, newest first.
    pub async fn list(
        &self,
        filter: &TicketFilter,
        limit: usize,
    ) -> Result<Vec<Ticket>, TicketError> {
        self.read(async |connection| ticket_lists::tickets(connection, filter, page(limit)).await)
            .await
    }

    /// The database.
    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Deletes an issue with its ticket, messages, events, replies and token counts. Returns false if the condition does not
    /// hold, or if the age matters and the ticket is open or a draft waits for a decision.
    ///
    /// Processed events, runs, replies and messages are deleted first, in transactions of [`DELETE_BATCH`] rows of each. If the
    /// condition ceases to hold in between, the issue is kept without the oldest of them.
    pub(crate) async fn delete_issue(
        &self,
        issue_id: IssueId,
        condition: DeleteCondition,
    ) -> Result<bool, TicketError> {
        loop {
            let mut transaction = self.store.begin().await?;
            // The ticket before the issue, as in every transaction.
            let ticket = statements::lock_ticket_of(transaction.connection(), issue_id).await?;
            let is_open = ticket.is_some_and(|ticket| ticket.status == TicketStatus::Open)
                || statements::has_pending_draft(transaction.connection(), issue_id).await?;
            if (is_open && condition != DeleteCondition::NotInUse)
                || !history::lock_deletable(transaction.as_mut(), issue_id, condition).await?
            {
                return Ok(false);
            }
            let deleting = transaction.as_mut();
            let has_more = history::delete_history_of(deleting, issue_id, DELETE_BATCH).await?
                || statements::delete_messages_of(deleting.connection(), issue_id, DELETE_BATCH)
                    .await?;
            if !has_more {
                statements::delete_ticket_of(transaction.as_mut(), issue_id).await?;
                history::delete_issue(transaction.as_mut(), issue_id).await?;
                transaction.commit().await?;
                return Ok(true);
            }
            transaction.commit().await?;
        }
    }

    /// Deletes token counts of days that no budget needs any more.
    pub(crate) async fn delete_old_usage(&self) -> Result<(), TicketError> {
        let now = now();
        let first_day = budget::day_scope_prefix(budget::day_of(now.before(USAGE_KEPT)));
        // A reservation of yesterday may still be settled.
        let first_of_authors = budget::user_scope_prefix(budget::day_of(now).saturating_sub(1));
        let delete = "DELETE FROM desk_usage WHERE scope IN (SELECT scope FROM desk_usage
             WHERE scope >= $1 AND scope < $2 ORDER BY scope LIMIT $3)";
        for (kind, first_kept) in [("day:", &first_day), ("user:", &first_of_authors)] {
            self.delete_in_batches(delete, &[kind.into(), first_kept.into()]).await?;
        }
        Ok(())
    }

    /// Deletes aggregated reservations that expired a while ago: a repeated settlement of a younger one must find it.
    pub async fn delete_old_reservations(&self) -> Result<(), TicketError> {
        let delete = "DELETE FROM desk_reservations WHERE id IN (SELECT id FROM desk_reservations
             WHERE rolled_up AND expires_at <= $1 LIMIT $2)";
        let before = statements::to_ms(now().before(budget::RESERVATION_TTL));
        self.delete_in_batches(delete, &[before.into()]).await
    }

    /// Repeats a statement, whose last parameter is the most rows that it may delete, until it finds fewer; each time in a
    /// transaction of its own, at most [`DELETE_BATCH`] rows.
    pub(super) async fn delete_in_batches(
        &self,
        delete: &'static str,
        parameters: &[SqlValue<'_>],
    ) -> Result<(), TicketError> {
        let parameters = [parameters, &[(DELETE_BATCH as i64).into()]].concat();
        loop {
            let mut transaction = self.store.begin().await?;
            let deleted = transaction.connection().execute(delete, &parameters).await;
            let deleted =
                deleted.map_err(|error| statements::database_error("delete old rows", error))?;
            transaction.commit().await?;
            if deleted < DELETE_BATCH as u64 {
                return Ok(());
            }
        }
    }

    /// Reads on a connection of its own.
    pub(super) async fn read<T>(
        &self,
        read: impl AsyncFnOnce(StoreConnection<'_>) -> Result<T, TicketError>,
    ) -> Result<T, TicketError> {
        let mut connection = self.store.read_connection().await?;
        let result = read(connection.connection()).await;
        connection.release().await;
        result
    }

    /// The versions of those of these tickets that exist, which differ after each message and status change. One query.
    pub(crate) async fn versions(
        &self,
        tickets: &[Uuid],
    ) -> Result<Vec<(Uuid, TicketVersion)>, TicketError> {
        self.read(async |connection| statements::versions(connection, tickets).await).await
    }

    /// Subscribes to the ids of tickets changed by this process, or reported with `notify_changed`.
    pub fn changes(&self) -> broadcast::Receiver<Uuid> {
        self.changes.subscribe()
    }
}

// Steps of transactions.
impl Tickets {
    /// Inserts a ticket with its first message.
    pub(super) async fn open_with(
        &self,
        transaction: &mut dyn Transaction,
        change: &TicketChange<'_>,
    ) -> Result<Recorded, TicketError> {
        let event = change.event;
        let recorded = self.record(transaction, change).await?;
        let row = NewTicketRow {
            ticket_id: event.ticket_id,
            issue_id: recorded.issue_id,
            title: event.payload.title.as_deref().unwrap_or_default(),
            user_id: event.user_id.as_deref(),
        };
        statements::insert_ticket(transaction.connection(), &row).await?;
        statements::insert_message(transaction.connection(), &message_row(event)).await?;
        Ok(recorded)
    }

    /// Adds a message to a locked ticket. A message of a user reopens the ticket, unless it is late. With a message of a
    /// person of the support team, that person takes the ticket over.
    pub(super) async fn add_to(
        &self,
        transaction: &mut dyn Transaction,
        ticket: &Ticket,
        change: &TicketChange<'_>,
    ) -> Result<Recorded, TicketError> {
        let event = change.event;
        let recorded = self.record(transaction, change).await?;
        statements::insert_message(transaction.connection(), &message_row(event)).await?;
        let reopens = event.author() == Author::User && !event.payload.late;
        let status = if reopens { TicketStatus::Open } else { ticket.status };
        let is_agent = event.author() == Author::Agent;
        let (id, handed_over) = (ticket.ticket_id, ticket.handed_over || is_agent);
        statements::change_ticket(transaction.connection(), id, status, handed_over).await?;
        if is_agent {
            let agent = event.payload.agent.as_deref();
            let reason = "a person answered";
            if !ticket.handed_over {
                report_hand_over(transaction, ticket, reason).await?;
            }
            statements::describe_hand_over(transaction.connection(), id, reason, agent).await?;
        }
        Ok(recorded)
    }

    /// Closes the ticket, or reopens it and ends a hand-over.
    pub(super) async fn set_status(
        &self,
        transaction: &mut dyn Transaction,
        ticket: &Ticket,
        closes: bool,
    ) -> Result<(), TicketError> {
        let (status, handed_over) = match closes {
            true => (TicketStatus::Closed, ticket.handed_over),
            false => (TicketStatus::Open, false),
        };
        statements::change_ticket(transaction.connection(), ticket.ticket_id, status, handed_over)
            .await
    }

    /// Records the event and, if it is published, its outbox row.
    pub(super) async fn record(
        &self,
        transaction: &mut dyn Transaction,
        change: &TicketChange<'_>,
    ) -> Result<Recorded, TicketError> {
        let event = change.event;
        let new = NewEvent {
            source: change.source.to_owned(),
            dedup_key: Some(event.message_id.to_string()),
            trace: telemetry::current_trace(),
            ..NewEvent::new(
                INTEGRATION,
                event.ticket_id.to_string(),
                event.event_type.as_str(),
                event.to_json(),
            )
        };
        let recorded =
            transaction.record(std::slice::from_ref(&new), &self.quiet).await.remove(0)?;
        if change.publish {
            write_event_row(transaction, recorded.issue_id, event).await?;
        }
        Ok(recorded)
    }

    /// Commits, then nudges workers and notifies subscribers of this process.
    pub(super) async fn commit(
        &self,
        transaction: Box<dyn Transaction>,
        ticket_id: Uuid,
        recorded: &Recorded,
    ) -> Result<(), TicketError> {
        self.commit_event(transaction, recorded).await?;
        self.notify_changed(ticket_id);
        Ok(())
    }

    /// Records an event of any integration.
    pub(super) async fn record_event(
        &self,
        transaction: &mut dyn Transaction,
        event: NewEvent,
    ) -> Result<Recorded, TicketError> {
        let event = NewEvent { trace: telemetry::current_trace(), ..event };
        Ok(transaction.record(&[event], &self.quiet).await.remove(0)?)
    }

    /// Commits, then nudges workers.
    pub(super) async fn commit_event(
        &self,
        transaction: Box<dyn Transaction>,
        recorded: &Recorded,
    ) -> Result<(), TicketError> {
        transaction.commit().await?;
        let result = if recorded.duplicate { "duplicate" } else { "recorded" };
        counter!(EVENTS_RECORDED, "result" => result).increment(1);
        self.confirmations.add(recorded.event_log_id);
        self.nudger.nudge_recorded(recorded);
        Ok(())
    }

    /// Notifies the subscribers of this process.
    pub(crate) fn notify_changed(&self, ticket_id: Uuid) {
        // An error means that there is no subscriber.
        let _ = self.changes.send(ticket_id);
    }
}

/// Migrates the tables of the binary and registers the integration of tickets.
pub(crate) async fn ensure_schema(store: &Arc<dyn Store>) -> Result<(), TicketError> {
    migrations::apply(store.as_ref()).await?;
    store.ensure_integration(INTEGRATION, INTEGRATION).await?;
    Ok(())
}

/// Reports that a ticket was handed over, with the transaction that does it.
pub(super) async fn report_hand_over(
    transaction: &mut dyn Transaction,
    ticket: &Ticket,
    reason: &str,
) -> Result<(), TicketError> {
    let external_issue_id = ticket.ticket_id.to_string();
    let issue = EventIssue {
        id: ticket.issue_id,
        integration: INTEGRATION,
        external_project_id: "",
        external_issue_id: &external_issue_id,
    };
    DeskEvent::handed_over(issue, reason, now()).write(transaction).await
}

/// Writes the outbox row that publishes an event.
pub(super) async fn write_event_row(
    transaction: &mut dyn Transaction,
    issue_id: IssueId,
    event: &TicketEvent,
) -> Result<(), TicketError> {
    let (target, payload) = (TICKET_EVENTS.to_owned(), event.to_json());
    let row = NewOutboxRow { kind: OutboxKind::Event, target, payload };
    let key = format!("{}:{}", event.event_type.as_str(), event.message_id);
    transaction.write_outbox(issue_id, &[KeyedOutboxRow { key, row }]).await?;
    Ok(())
}

fn message_row(event: &TicketEvent) -> NewMessageRow<'_> {
    NewMessageRow {
        message_id: event.message_id,
        ticket_id: event.ticket_id,
        author: event.author(),
        agent: event.payload.agent.as_deref(),
        content: &event.payload.content,
        entry: event.payload.entry.as_deref(),
        run: event.payload.run,
    }
}

pub(super) fn status_event(
    event_type: TicketEventType,
    ticket_id: Uuid,
    message_id: Uuid,
) -> TicketEvent {
    let payload = TicketPayload::new("", now());
    TicketEvent { event_type, ticket_id, message_id, user_id: None, payload }
}

fn posted(event: &TicketEvent, issue_id: IssueId, duplicate: bool) -> PostedMessage {
    PostedMessage { ticket_id: event.ticket_id, message_id: event.message_id, issue_id, duplicate }
}

fn duplicate(
    is_same: bool,
    ticket: &Ticket,
    message_id: Uuid,
) -> Result<PostedMessage, TicketError> {
    if !is_same {
        return Err(TicketError::Conflict(message_id));
    }
    let Ticket { ticket_id, issue_id, .. } = *ticket;
    Ok(PostedMessage { ticket_id, message_id, issue_id, duplicate: true })
}

fn page(limit: usize) -> i64 {
    i64::try_from(limit.clamp(1, PAGE_MAX)).unwrap_or(1)
}

pub(super) fn now() -> Timestamp {
    SystemClock.now()
}

fn is_conflict(error: &TicketError) -> bool {
    let source = match error {
        // A message with this id was stored concurrently: the retry finds it.
        TicketError::Issue(IssueError::DedupConflict { .. }) => return true,
        TicketError::Issue(IssueError::Unavailable { source, .. }) => source,
        _ => return false,
    };
    let source = source.as_ref().and_then(|source| source.downcast_ref::<sqlx::Error>());
    let Some(sqlx::Error::Database(error)) = source else { return false };
    // PostgreSQL: serialization failure, deadlock, lock timeout.
    let codes = ["40001", "40P01", "55P03"];
    error.is_unique_violation() || error.code().is_some_and(|code| codes.contains(&&*code))
}
