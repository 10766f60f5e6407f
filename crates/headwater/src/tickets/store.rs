//! Tickets in SQL, beside the issues they belong to: every change is one transaction with its event log and its outbox rows.
//!
//! Upstream: routes, stream entries, replies on their way out. Downstream: `sqlite` and `postgres`, inside transactions of
//! `headwater-issue`.
//!
//! Promises: a message, its event and what other programs are told of it are committed together or not at all; repeating a
//! call with the same message id changes nothing. A ticket's row is locked before its issue's, always, so nobody dead-locks,
//! and messages of one ticket have growing places in the order of their commits.

use std::sync::Arc;

use headwater_issue::{
    Confirmations, IssueError, IssueId, KeyedOutbox, NewEvent, NewOutbox, Nudger, OutboxKind,
    Quiet, Recorded, Store, Transaction,
};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use tokio::sync::broadcast;
use uuid::Uuid;

use crate::limits::PAGE_MAX;
use crate::tickets::sql::migrations;
use crate::tickets::sql::rows::{NewMessageRow, NewTicketRow};
use crate::tickets::ticket::{
    NewTicket, NewTicketMessage, Posted, Ticket, TicketError, TicketFilter, TicketMessage,
    TicketStatus, checked_content, checked_title, checked_user,
};
use crate::tickets::{Author, TICKET_EVENTS, TicketEvent, TicketEventType, TicketPayload};

/// The integration, and its provider, whose issues are tickets.
pub const INTEGRATION: &str = "desk";

/// How often a transaction is repeated that met another one on its way.
pub(super) const CONFLICTS_MAX: u32 = 5;

/// Changes that a slow listener may be behind; then it looks at everything.
const CHANGES_MAX: usize = 1024;

/// Calls a statement in the dialect of a connection.
macro_rules! on {
    ($connection:expr, $statement:ident($($argument:expr),*)) => {
        match $connection {
            headwater_issue::Connection::Sqlite(connection) => $crate::tickets::sql::sqlite::$statement(connection, $($argument),*).await,
            headwater_issue::Connection::Postgres(connection) => $crate::tickets::sql::postgres::$statement(connection, $($argument),*).await,
            _ => Err(sqlx::Error::Configuration("tickets need SQLite or Postgres".into())),
        }
        .map_err(|error| $crate::tickets::store::database_error(stringify!($statement), error))
    };
}

/// Calls a statement that only reads, on a connection of its own.
macro_rules! look {
    ($store:expr, $statement:ident($($argument:expr),*)) => {
        match $store.read_connection().await {
            Ok(mut reading) => {
                let answer = $crate::tickets::store::on!(reading.connection(), $statement($($argument),*));
                reading.release().await;
                answer
            }
            Err(error) => Err($crate::tickets::TicketError::from(error)),
        }
    };
}

/// Repeats a transaction that another one has overtaken: the second time it sees what that one did.
macro_rules! repeated {
    ($call:expr) => {{
        let mut tries = 1;
        loop {
            match $call.await {
                Err(error)
                    if tries < $crate::tickets::store::CONFLICTS_MAX
                        && $crate::tickets::store::is_conflict(&error) =>
                {
                    tries += 1;
                }
                answer => break answer,
            }
        }
    }};
}
pub(super) use {look, on, repeated};

/// The tickets of a database. Clones are the same tickets.
#[derive(Clone, Debug)]
pub struct Tickets {
    pub(super) store: Arc<dyn Store>,
    nudger: Nudger,
    quiet: Quiet,
    changes: broadcast::Sender<Uuid>,
    confirmations: Confirmations,
}

/// What one step of a transaction adds to a ticket.
pub(super) struct Said<'a> {
    pub(super) event: &'a TicketEvent,
    pub(super) source: &'static str,
    /// Whether other programs are to be told.
    pub(super) told: bool,
}

impl Tickets {
    /// Opens the tables of tickets, and creates what is missing.
    pub async fn open(
        store: Arc<dyn Store>,
        nudger: Nudger,
        quiet: Quiet,
    ) -> Result<Self, TicketError> {
        prepare(&store).await?;
        let (changes, _) = broadcast::channel(CHANGES_MAX);
        Ok(Self { store, nudger, quiet, changes, confirmations: Confirmations::default() })
    }

    /// Notes every event that is committed here, so that a sample is read back.
    pub(crate) fn with_confirmations(self, confirmations: Confirmations) -> Self {
        Self { confirmations, ..self }
    }

    /// Opens a ticket with its first message.
    pub async fn create(&self, new: NewTicket) -> Result<Posted, TicketError> {
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
        repeated!(self.create_once(&event))
    }

    async fn create_once(&self, event: &TicketEvent) -> Result<Posted, TicketError> {
        let mut transaction = self.store.begin().await?;
        if let Some(known) = on!(transaction.connection(), message(event.message_id))? {
            let ticket = on!(transaction.connection(), ticket(known.ticket_id))?;
            let ticket = ticket.ok_or(TicketError::NotFound(known.ticket_id))?;
            let is_same = known.author == Author::User
                && known.content == event.payload.content
                && Some(&ticket.title) == event.payload.title.as_ref()
                && ticket.user_id == event.user_id;
            return duplicate(is_same, &ticket, event.message_id);
        }
        let said = Said { event, source: INTEGRATION, told: true };
        let recorded = self.open_with(transaction.as_mut(), &said).await?;
        self.commit(transaction, event.ticket_id, &recorded).await?;
        Ok(posted(event, recorded.issue_id, false))
    }

    /// Adds a message. One of a user opens a closed ticket again.
    pub async fn post(
        &self,
        ticket_id: Uuid,
        new: NewTicketMessage,
    ) -> Result<Posted, TicketError> {
        let content = checked_content(&new.content)?;
        if new.author == Author::Assistant {
            return Err(TicketError::Invalid("author must be `user` or `agent`".to_owned()));
        }
        let author = (new.author == Author::Agent).then_some(Author::Agent);
        let payload = TicketPayload { author, ..TicketPayload::new(content, now()) };
        let message_id = new.message_id.unwrap_or_else(Uuid::now_v7);
        let event_type = TicketEventType::MessageReceived;
        let event = TicketEvent { event_type, ticket_id, message_id, user_id: None, payload };
        repeated!(self.post_once(&event))
    }

    async fn post_once(&self, event: &TicketEvent) -> Result<Posted, TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = on!(transaction.connection(), lock_ticket(event.ticket_id))?;
        let ticket = ticket.ok_or(TicketError::NotFound(event.ticket_id))?;
        if let Some(known) = on!(transaction.connection(), message(event.message_id))? {
            let is_same = known.ticket_id == ticket.ticket_id
                && known.author == event.author()
                && known.content == event.payload.content;
            return duplicate(is_same, &ticket, event.message_id);
        }
        let event = TicketEvent { user_id: ticket.user_id.clone(), ..event.clone() };
        let said = Said { event: &event, source: INTEGRATION, told: true };
        let recorded = self.add_to(transaction.as_mut(), &ticket, &said).await?;
        self.commit(transaction, ticket.ticket_id, &recorded).await?;
        Ok(posted(&event, ticket.issue_id, false))
    }

    /// Closes a ticket. Returns whether it was open.
    pub async fn close(&self, ticket_id: Uuid) -> Result<bool, TicketError> {
        let event = status_event(TicketEventType::TicketClosed, ticket_id, Uuid::now_v7());
        repeated!(self.change_once(&event))
    }

    /// Opens a ticket again, and lets the desk answer it. Returns whether that changed anything.
    pub async fn reopen(&self, ticket_id: Uuid) -> Result<bool, TicketError> {
        let event = status_event(TicketEventType::TicketReopened, ticket_id, Uuid::now_v7());
        repeated!(self.change_once(&event))
    }

    async fn change_once(&self, event: &TicketEvent) -> Result<bool, TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = on!(transaction.connection(), lock_ticket(event.ticket_id))?;
        let ticket = ticket.ok_or(TicketError::NotFound(event.ticket_id))?;
        let closes = event.event_type == TicketEventType::TicketClosed;
        let is_so = match ticket.status {
            TicketStatus::Closed => closes,
            TicketStatus::Open => !closes && !ticket.handed_over,
        };
        if is_so {
            return Ok(false);
        }
        let event = TicketEvent { user_id: ticket.user_id.clone(), ..event.clone() };
        // Other programs know no word for a ticket that is opened again.
        let said = Said { event: &event, source: INTEGRATION, told: closes };
        let recorded = self.record(transaction.as_mut(), &said).await?;
        self.set_status(transaction.as_mut(), &ticket, closes).await?;
        self.commit(transaction, ticket.ticket_id, &recorded).await?;
        Ok(true)
    }

    /// A ticket, if there is one.
    pub async fn ticket(&self, ticket_id: Uuid) -> Result<Option<Ticket>, TicketError> {
        look!(self.store, ticket(ticket_id))
    }

    /// Messages of a ticket in their order, those after `after`, at most `limit` of them.
    pub async fn messages(
        &self,
        ticket_id: Uuid,
        after: i64,
        limit: usize,
    ) -> Result<Vec<TicketMessage>, TicketError> {
        look!(self.store, messages(ticket_id, after, page(limit)))
    }

    /// One page of tickets, newest first.
    pub async fn list(
        &self,
        filter: &TicketFilter,
        limit: usize,
    ) -> Result<Vec<Ticket>, TicketError> {
        look!(self.store, tickets(filter, page(limit)))
    }

    /// Hears of tickets that this process has changed.
    pub fn changes(&self) -> broadcast::Receiver<Uuid> {
        self.changes.subscribe()
    }
}

// What transactions are made of.
impl Tickets {
    /// A new ticket with its first message.
    pub(super) async fn open_with(
        &self,
        transaction: &mut dyn Transaction,
        said: &Said<'_>,
    ) -> Result<Recorded, TicketError> {
        let event = said.event;
        let recorded = self.record(transaction, said).await?;
        let row = NewTicketRow {
            ticket_id: event.ticket_id,
            issue_id: recorded.issue_id,
            title: event.payload.title.as_deref().unwrap_or_default(),
            user_id: event.user_id.as_deref(),
            now: now(),
        };
        on!(transaction.connection(), insert_ticket(&row))?;
        on!(transaction.connection(), insert_message(&message_row(event)))?;
        Ok(recorded)
    }

    /// One more message of a ticket that is locked.
    pub(super) async fn add_to(
        &self,
        transaction: &mut dyn Transaction,
        ticket: &Ticket,
        said: &Said<'_>,
    ) -> Result<Recorded, TicketError> {
        let recorded = self.record(transaction, said).await?;
        on!(transaction.connection(), insert_message(&message_row(said.event)))?;
        let reopens = said.event.author() == Author::User;
        let status = if reopens { TicketStatus::Open } else { ticket.status };
        let (ticket_id, handed_over) = (ticket.ticket_id, ticket.handed_over);
        on!(transaction.connection(), change_ticket(ticket_id, status, handed_over, now()))?;
        Ok(recorded)
    }

    /// Closes, or opens again and takes back from people.
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
        on!(transaction.connection(), change_ticket(ticket.ticket_id, status, handed_over, now()))
    }

    /// The event log and, where others are to be told, the outbox row.
    pub(super) async fn record(
        &self,
        transaction: &mut dyn Transaction,
        said: &Said<'_>,
    ) -> Result<Recorded, TicketError> {
        let event = said.event;
        let new = NewEvent {
            source: said.source.to_owned(),
            dedup_key: Some(event.message_id.to_string()),
            ..NewEvent::new(
                INTEGRATION,
                event.ticket_id.to_string(),
                event.event_type.as_str(),
                event.to_json(),
            )
        };
        let recorded =
            transaction.record(std::slice::from_ref(&new), &self.quiet).await.remove(0)?;
        if said.told {
            tell(transaction, recorded.issue_id, event).await?;
        }
        Ok(recorded)
    }

    /// Commits, then tells whoever waits: workers by a nudge, listeners of this process at once.
    pub(super) async fn commit(
        &self,
        transaction: Box<dyn Transaction>,
        ticket_id: Uuid,
        recorded: &Recorded,
    ) -> Result<(), TicketError> {
        transaction.commit().await?;
        self.confirmations.note(recorded.event_log_id);
        self.nudger.after(recorded);
        self.changed(ticket_id);
        Ok(())
    }

    pub(super) fn changed(&self, ticket_id: Uuid) {
        // Nobody may listen.
        let _ = self.changes.send(ticket_id);
    }
}

/// Migrates the tables of tickets and registers their integration.
pub(crate) async fn prepare(store: &Arc<dyn Store>) -> Result<(), TicketError> {
    migrations::apply(store.as_ref()).await?;
    store.ensure_integration(INTEGRATION, INTEGRATION).await?;
    Ok(())
}

/// The outbox row that tells other programs.
pub(super) async fn tell(
    transaction: &mut dyn Transaction,
    issue_id: IssueId,
    event: &TicketEvent,
) -> Result<(), TicketError> {
    let (target, payload) = (TICKET_EVENTS.to_owned(), event.to_json());
    let row = NewOutbox { kind: OutboxKind::Event, target, payload };
    let key = format!("{}:{}", event.event_type.as_str(), event.message_id);
    transaction.write_outbox(issue_id, &[KeyedOutbox { key, row }]).await?;
    Ok(())
}

fn message_row(event: &TicketEvent) -> NewMessageRow<'_> {
    NewMessageRow {
        message_id: event.message_id,
        ticket_id: event.ticket_id,
        author: event.author(),
        content: &event.payload.content,
        run: event.payload.run,
        now: now(),
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

fn posted(event: &TicketEvent, issue_id: IssueId, duplicate: bool) -> Posted {
    Posted { ticket_id: event.ticket_id, message_id: event.message_id, issue_id, duplicate }
}

fn duplicate(is_same: bool, ticket: &Ticket, message_id: Uuid) -> Result<Posted, TicketError> {
    if !is_same {
        return Err(TicketError::Conflict(message_id));
    }
    let Ticket { ticket_id, issue_id, .. } = *ticket;
    Ok(Posted { ticket_id, message_id, issue_id, duplicate: true })
}

fn page(limit: usize) -> i64 {
    i64::try_from(limit.clamp(1, PAGE_MAX)).unwrap_or(1)
}

pub(super) fn now() -> Timestamp {
    SystemClock.now()
}

pub(super) fn is_conflict(error: &TicketError) -> bool {
    let source = match error {
        // Somebody stored a message of this id at the same time: the next try finds it.
        TicketError::Issue(IssueError::DedupConflict { .. }) => return true,
        TicketError::Issue(IssueError::Unavailable { source, .. }) => source,
        _ => return false,
    };
    let source = source.as_ref().and_then(|source| source.downcast_ref::<sqlx::Error>());
    let Some(sqlx::Error::Database(error)) = source else { return false };
    // Serialization failure, dead-lock, and a lock that others held for a second, of Postgres.
    let codes = ["40001", "40P01", "55P03"];
    error.is_unique_violation() || error.code().is_some_and(|code| codes.contains(&&*code))
}

pub(super) fn database_error(what: &str, error: sqlx::Error) -> TicketError {
    let problem = format!("tickets, {what}: {error}");
    IssueError::Unavailable { problem, source: Some(Arc::new(error)) }.into()
}
