//! A hand-over from the model to the ticket, through the outbox: issue and ticket agree, whatever happens in between.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater::desk::{
    Desk, DeskConfig, DeskReply, MemoryLedger, NoTickets, ReplyTarget, ScriptedModel,
};
use headwater::outbound::{Destination, LocalDelivery, OutboxDeliverer};
use headwater::tickets::{Author, NewTicket, NewTicketMessage, PostedMessage, Tickets};
use headwater_issue::{
    DeliverError, IssueId, Nudger, Outbox, OutboxConfig, OutboxRow, ProcessingStatus, Store,
    StoreOptions, Worker, WorkerConfig, connect,
};
use headwater_queue::Queue;
use tokio::sync::watch;

const TIMEOUT: Duration = Duration::from_secs(60);

struct ToTickets(Tickets);

#[async_trait]
impl LocalDelivery for ToTickets {
    async fn deliver_reply(
        &self,
        row: &OutboxRow,
        target: ReplyTarget,
        reply: DeskReply,
    ) -> Result<(), DeliverError> {
        self.0.deliver(row, target, &reply).await
    }

    async fn publish_event(&self, _: &OutboxRow) -> Result<(), DeliverError> {
        Ok(())
    }
}

/// A desk with tickets whose outbox is delivered only by `deliver`.
struct System {
    store: Arc<dyn Store>,
    tickets: Tickets,
    stop: watch::Sender<bool>,
    working: tokio::task::JoinHandle<()>,
}

impl System {
    async fn start() -> Self {
        let store = connect("sqlite::memory:", &StoreOptions::default()).await.unwrap();
        let streams =
            headwater_stream::connect("embedded:memory", &Default::default()).await.unwrap();
        let nudger = Nudger::new(Arc::clone(&streams));
        let config = DeskConfig { quiet: Duration::from_millis(10), ..DeskConfig::default() };
        let tickets =
            Tickets::open(Arc::clone(&store), nudger.clone(), config.debounce_window()).await;
        let desk = Desk::new(
            Arc::new(ScriptedModel::default()),
            Arc::new(NoTickets),
            Arc::new(MemoryLedger::default()),
            Arc::clone(&store),
            config,
        );
        let worker = config.worker(WorkerConfig::default());
        let worker = Worker::new(Arc::clone(&store), nudger, desk, worker).unwrap();
        let (stop, mut stopped) = watch::channel(false);
        let working = tokio::spawn(async move {
            let shutdown = async move { drop(stopped.wait_for(|stop| *stop).await) };
            worker.run(&Queue::new(streams), shutdown).await;
        });
        Self { store, tickets: tickets.unwrap(), stop, working }
    }

    async fn wait_until_idle(&self, issue_id: IssueId) {
        let waiting = async {
            loop {
                let issue = self.store.issue(issue_id).await.unwrap().unwrap();
                if issue.status == ProcessingStatus::Idle {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, waiting).await.expect("the issue becomes idle in time");
    }

    async fn say(&self, posted: PostedMessage, content: &str, author: Author) {
        let message =
            NewTicketMessage { content: content.into(), author, agent: None, message_id: None };
        self.tickets.post(posted.ticket_id, message).await.unwrap();
        self.wait_until_idle(posted.issue_id).await;
    }

    async fn deliver(&self) {
        let local = Arc::new(ToTickets(self.tickets.clone()));
        let destinations = HashMap::from([("desk".to_owned(), Destination::Tickets)]);
        let deliverer = OutboxDeliverer::new(Arc::clone(&self.store), destinations, local).unwrap();
        let outbox = Outbox::new(Arc::clone(&self.store), deliverer, OutboxConfig::default());
        outbox.unwrap().run_once().await.unwrap();
    }

    /// Whether the issue and whether the ticket is handed over.
    async fn handed_over(&self, posted: PostedMessage) -> (bool, bool) {
        let issue = self.store.issue(posted.issue_id).await.unwrap().unwrap();
        let fields: serde_json::Value = serde_json::from_str(&issue.fields).unwrap();
        let ticket = self.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
        (fields["handed_over"] == true, ticket.handed_over)
    }

    async fn answers(&self, posted: PostedMessage) -> usize {
        let messages = self.tickets.messages(posted.ticket_id, 0, 100).await.unwrap();
        messages.iter().filter(|message| message.author == Author::Assistant).count()
    }
}

#[tokio::test]
async fn a_hand_over_is_kept_when_the_user_writes_before_it_is_delivered() {
    let system = System::start().await;
    let new = NewTicket {
        title: "Parcel".into(),
        content: "I want to speak to a human".into(),
        ..NewTicket::default()
    };
    let posted = system.tickets.create(new).await.unwrap();
    system.wait_until_idle(posted.issue_id).await;
    system.say(posted, "Hello?", Author::User).await;
    system.deliver().await;
    assert_eq!(system.handed_over(posted).await, (true, true));
    assert_eq!(system.answers(posted).await, 1, "the user is told");

    // The way back.
    assert!(system.tickets.reopen(posted.ticket_id).await.unwrap());
    system.wait_until_idle(posted.issue_id).await;
    assert_eq!(system.handed_over(posted).await, (false, false));
    system.say(posted, "Where is it?", Author::User).await;
    system.deliver().await;
    assert_eq!(system.answers(posted).await, 2);

    // A person who answers takes the ticket over.
    system.say(posted, "I look into it.", Author::Agent).await;
    assert_eq!(system.handed_over(posted).await, (true, true));
    system.say(posted, "Thank you.", Author::User).await;
    system.deliver().await;
    assert_eq!(system.answers(posted).await, 2);

    // Closed and reopened before a hand-over is delivered: both end it.
    assert!(system.tickets.reopen(posted.ticket_id).await.unwrap());
    system.say(posted, "I want to speak to a human", Author::User).await;
    system.tickets.close(posted.ticket_id).await.unwrap();
    system.tickets.reopen(posted.ticket_id).await.unwrap();
    system.wait_until_idle(posted.issue_id).await;
    system.deliver().await;
    assert_eq!(system.handed_over(posted).await, (false, false));
    system.stop.send(true).unwrap();
    system.working.await.unwrap();
}
