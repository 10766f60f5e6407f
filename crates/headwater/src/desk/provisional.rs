//! Provisional answers: listeners of a ticket see an answer while the model writes it.
//!
//! Upstream: `handler` gives the chunks of an answer to a [`ProvisionalWriter`]. Downstream: event streams of tickets
//! (`api/tickets_sse.rs`): in this process directly, in other processes through a short stream of the backend.
//! Guarantees: a hint only. Nothing of it is stored in SQL; a run neither waits for a listener or the backend, nor fails
//! because of them. Without a listener an answer costs one look at the backend every [`LOOK_EVERY`], and nothing on the
//! embedded backend. A listener gets at most an update per [`UPDATE_EVERY`], and has at most one in memory.
//! Not here: which answers may be shown (see `policy`: only those that are certain to be posted without approval).

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use headwater_stream::{
    Backend, EntryId, Fields, Retention, SetName, StreamError, StreamName, TailReader,
};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;
use uuid::Uuid;

use crate::limits::PROVISIONAL_BYTES_MAX;
use crate::text;

/// Least time between two updates of an answer.
const UPDATE_EVERY: Duration = Duration::from_millis(250);

/// How often an update is repeated while the text does not change.
const REPEAT_EVERY: Duration = Duration::from_secs(5);

/// A listener drops a provisional answer that was not updated for this long: its writer is gone.
pub(crate) const EXPIRES_AFTER: Duration = Duration::from_secs(20);

/// How often a writer looks for listeners in other processes.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How often a process announces its listeners, and how long an announcement lasts.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(20);
const ANNOUNCED_FOR: Duration = Duration::from_secs(60);

/// How long a page that has asked counts as a listener.
const PEEKED_FOR: Duration = Duration::from_secs(5);

/// Longest time of one call of the backend, and the pause after a failure.
const CALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Longest blocking read, and entries of one read.
const READ_WAIT: Duration = Duration::from_secs(5);
const READ_MAX: usize = 64;

/// Announcements in one round.
const ANNOUNCEMENTS_AT_ONCE: usize = 64;

/// What the stream keeps.
const KEPT: Retention =
    Retention { max_len: Some(200), max_age: Some(Duration::from_secs(60)), max_bytes: None };

/// The stream of updates, and the prefix of the sets that announce listeners. Both are internal to the server.
pub(crate) const PROVISIONAL_STREAM: &str = "streaming:mq:desk:provisional";
const LISTENERS: &str = "streaming:mq:desk:listeners:";

// Several repetitions may be lost before a listener drops an answer.
const _: () = assert!(REPEAT_EVERY.as_millis() * 3 <= EXPIRES_AFTER.as_millis());
const _: () = assert!(ANNOUNCE_EVERY.as_millis() * 2 <= ANNOUNCED_FOR.as_millis());

/// The state of an answer that is being written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProvisionalAnswer {
    pub(crate) ticket_id: Uuid,
    /// Id of the message that the answer becomes.
    pub(crate) message_id: Uuid,
    /// Epoch of the run.
    pub(crate) epoch: i64,
    /// Grows with each update of a run.
    pub(crate) sequence: u64,
    /// The text so far; `None` if it is withdrawn.
    pub(crate) content: Option<String>,
}

/// The provisional answers that this process writes and listens to.
#[derive(Clone)]
pub(crate) struct ProvisionalAnswers {
    channel: Arc<ProvisionalChannel>,
}

struct ProvisionalChannel {
    /// The sender of updates, by which a process recognises its own.
    process: String,
    /// The backend that other processes share; `None` if there cannot be any.
    shared: Option<Arc<dyn Backend>>,
    listened: Mutex<ListenedTickets>,
    /// A ticket has its first listener.
    added: Notify,
    tasks: TaskTracker,
    closing: CancellationToken,
}

#[derive(Default)]
struct ListenedTickets {
    by_id: HashMap<Uuid, ListenedTicket>,
    /// Whether the stream is being read. The reader ends when there are no listeners.
    is_reading: bool,
}

struct ListenedTicket {
    listeners: usize,
    newest: watch::Sender<Option<ReceivedAnswer>>,
}

/// An update, and when it arrived.
#[derive(Clone)]
struct ReceivedAnswer {
    answer: ProvisionalAnswer,
    at: Instant,
}

/// Receives the provisional answers of one ticket.
pub(crate) struct ProvisionalListener {
    answers: ProvisionalAnswers,
    ticket_id: Uuid,
    newest: watch::Receiver<Option<ReceivedAnswer>>,
}

impl ProvisionalListener {
    /// Waits for an update that was not taken. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        if self.newest.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.newest.mark_changed();
    }

    /// The newest update, if there is one that was not taken before.
    pub(crate) fn take(&mut self) -> Option<ProvisionalAnswer> {
        let is_new = self.newest.has_changed().unwrap_or_default();
        if is_new { self.newest() } else { None }
    }

    /// The newest update, unless its writer is gone.
    fn newest(&mut self) -> Option<ProvisionalAnswer> {
        let newest = self.newest.borrow_and_update().clone()?;
        (newest.at.elapsed() < EXPIRES_AFTER).then_some(newest.answer)
    }
}

impl Drop for ProvisionalListener {
    fn drop(&mut self) {
        let mut listened = self.answers.lock();
        if let MapEntry::Occupied(mut ticket) = listened.by_id.entry(self.ticket_id) {
            ticket.get_mut().listeners -= 1;
            if ticket.get().listeners == 0 {
                ticket.remove();
            }
        }
    }
}

impl ProvisionalAnswers {
    /// Other processes are reached through `streams`, unless only this process can use them.
    pub(crate) fn new(streams: &Arc<dyn Backend>) -> Self {
        let shared = (streams.describe().kind != "embedded").then(|| Arc::clone(streams));
        let channel = ProvisionalChannel {
            process: Uuid::new_v4().to_string(),
            shared,
            listened: Mutex::default(),
            added: Notify::new(),
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
        };
        Self { channel: Arc::new(channel) }
    }

    /// Ends the tasks of listeners and writers.
    pub(crate) async fn close(&self) {
        self.channel.closing.cancel();
        self.channel.tasks.close();
        self.channel.tasks.wait().await;
    }

    fn lock(&self) -> MutexGuard<'_, ListenedTickets> {
        self.channel.listened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens to a ticket until the result is dropped.
    pub(crate) fn listen(&self, ticket_id: Uuid) -> ProvisionalListener {
        let mut listened = self.lock();
        let ticket = listened
            .by_id
            .entry(ticket_id)
            .or_insert_with(|| ListenedTicket { listeners: 0, newest: watch::Sender::new(None) });
        ticket.listeners += 1;
        let mut newest = ticket.newest.subscribe();
        // A listener that joins gets the answer that is being written.
        newest.mark_changed();
        if let Some(shared) = &self.channel.shared {
            if !std::mem::replace(&mut listened.is_reading, true) {
                let reading = self.clone().read_updates(Arc::clone(shared));
                self.channel.tasks.spawn(reading);
            }
            self.channel.added.notify_one();
        }
        drop(listened);
        ProvisionalListener { answers: self.clone(), ticket_id, newest }
    }

    /// The text that is being written for a ticket, for a page that asks again and again. A question counts as a listener for
    /// some seconds, so the first one gets no text. Must be called in a runtime.
    pub(crate) fn peek(&self, ticket_id: Uuid) -> Option<ProvisionalAnswer> {
        let mut listener = self.listen(ticket_id);
        let newest = listener.newest().filter(|answer| answer.content.is_some());
        let closing = self.channel.closing.clone();
        self.channel.tasks.spawn(async move {
            let _ = timeout(PEEKED_FOR, closing.cancelled()).await;
            drop(listener);
        });
        newest
    }

    /// Starts an answer. `to_shown` makes of the text of the model what a listener may see. Must be called in a runtime.
    pub(crate) fn write(
        &self,
        (ticket_id, message_id, epoch): (Uuid, Uuid, i64),
        to_shown: impl Fn(&str) -> String + Send + Sync + 'static,
    ) -> ProvisionalWriter {
        let written = Arc::new(WrittenText::default());
        let answer = ProvisionalAnswer { ticket_id, message_id, epoch, sequence: 0, content: None };
        let publishing = self.clone().publish(answer, Arc::clone(&written), to_shown);
        self.channel.tasks.spawn(publishing);
        ProvisionalWriter { written }
    }

    /// Publishes what a writer writes, until it ends.
    async fn publish(
        self,
        mut answer: ProvisionalAnswer,
        written: Arc<WrittenText>,
        to_shown: impl Fn(&str) -> String,
    ) {
        let mut others = OtherListeners::default();
        loop {
            tokio::select! {
                () = written.changed.notified() => {}
                () = sleep(REPEAT_EVERY) => {}
                () = self.channel.closing.cancelled() => written.end(WritingEnd::Discarded),
            }
            let is_here = self.lock().by_id.contains_key(&answer.ticket_id);
            let end = written.lock().end;
            if end.is_none() {
                self.look_for_others(&mut others, answer.ticket_id).await;
            }
            let content = match end {
                // Its message replaces the text, unless there is none.
                Some(WritingEnd::Finished) if !written.lock().text.is_empty() => return,
                Some(_) => None,
                // Only if it is needed: the text may be long.
                None if is_here || others.exist => {
                    let shown = text::cleaned(&to_shown(&written.lock().text));
                    Some(text::cut(shown.trim(), PROVISIONAL_BYTES_MAX).to_owned())
                        .filter(|shown| !shown.is_empty())
                }
                None => None,
            };
            if content.is_some() || answer.content.is_some() {
                answer.content = content;
                answer.sequence += 1;
                self.deliver(&answer);
                if others.exist {
                    self.send(&answer).await;
                }
            }
            if end.is_some() {
                return;
            }
            sleep(UPDATE_EVERY).await;
        }
    }

    /// Gives an update to the listeners of this process.
    fn deliver(&self, answer: &ProvisionalAnswer) {
        if let Some(ticket) = self.lock().by_id.get(&answer.ticket_id) {
            let received = ReceivedAnswer { answer: answer.clone(), at: Instant::now() };
            ticket.newest.send_replace(Some(received));
        }
    }

    /// Sends an update to other processes, unless the backend does not answer.
    async fn send(&self, answer: &ProvisionalAnswer) {
        let Some(shared) = &self.channel.shared else { return };
        let data = serde_json::to_vec(answer).expect("texts and numbers are JSON");
        let process = self.channel.process.clone().into_bytes();
        let entries = [Fields::new([("process", process), ("data", data)])];
        let stream = stream();
        let appending = shared.append(&stream, &entries, &KEPT);
        match timeout(CALL_TIMEOUT, appending).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => debug!(%error, "provisional answer not sent to other processes"),
            Err(_) => debug!("provisional answer not sent to other processes: no reply in time"),
        }
    }

    /// Updates whether other processes have listeners of this ticket, if it is time to.
    async fn look_for_others(&self, others: &mut OtherListeners, ticket_id: Uuid) {
        let Some(shared) = &self.channel.shared else { return };
        if others.looked_at.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
            return;
        }
        others.looked_at = Some(Instant::now());
        let set = listeners_of(ticket_id);
        let looking = timeout(CALL_TIMEOUT, shared.set_members(&set)).await;
        let members = looking.ok().and_then(Result::ok).unwrap_or_default();
        others.exist = members.iter().any(|process| *process != self.channel.process);
    }

    /// Announces the listeners of this process, and reads updates for them, until there are none.
    async fn read_updates(self, shared: Arc<dyn Backend>) {
        let mut reading = None;
        let mut announced = HashMap::new();
        loop {
            {
                let mut listened = self.lock();
                listened.is_reading =
                    !listened.by_id.is_empty() && !self.channel.closing.is_cancelled();
                if !listened.is_reading {
                    return;
                }
                announced.retain(|ticket_id, _| listened.by_id.contains_key(ticket_id));
            }
            let read = tokio::select! {
                read = self.read_once(&shared, &mut reading, &mut announced) => read,
                () = self.channel.closing.cancelled() => return,
            };
            if let Err(error) = read {
                debug!(%error, "provisional answers of other processes are not received");
                reading = None;
                sleep(CALL_TIMEOUT).await;
            }
        }
    }

    async fn read_once(
        &self,
        shared: &Arc<dyn Backend>,
        reading: &mut Option<(Box<dyn TailReader>, EntryId)>,
        announced: &mut HashMap<Uuid, Instant>,
    ) -> Result<(), StreamError> {
        let stream = stream();
        let (reader, position) = match reading {
            Some(reading) => reading,
            None => {
                // Before the announcement, so that the first update is not missed.
                let last = shared.stats(&stream).await?;
                let position = last.map_or(EntryId::MIN, |stats| stats.last_generated_id);
                reading.insert((shared.tail().await?, position))
            }
        };
        let due: Vec<Uuid> = {
            let is_due =
                |id: &&Uuid| announced.get(*id).is_none_or(|at| at.elapsed() >= ANNOUNCE_EVERY);
            self.lock().by_id.keys().filter(is_due).copied().collect()
        };
        for tickets in due.chunks(ANNOUNCEMENTS_AT_ONCE) {
            let announcing = tickets.iter().map(|ticket_id| async {
                let (set, process) = (listeners_of(*ticket_id), self.channel.process.as_str());
                shared.set_add(&set, &[process], Some(ANNOUNCED_FOR)).await
            });
            join_all(announcing).await.into_iter().collect::<Result<Vec<_>, _>>()?;
            announced.extend(tickets.iter().map(|ticket_id| (*ticket_id, Instant::now())));
        }
        let positions = [(stream, *position)];
        let batches = tokio::select! {
            batches = reader.read(&positions, READ_MAX, READ_WAIT) => batches?,
            () = self.channel.added.notified() => return Ok(()),
        };
        for entry in batches.into_iter().flat_map(|batch| batch.entries) {
            *position = entry.id;
            let is_own = entry.fields.get("process").map(|name| name.as_ref())
                == Some(self.channel.process.as_bytes());
            let data = entry.fields.get("data").filter(|_| !is_own);
            let answer =
                data.and_then(|data| serde_json::from_slice::<ProvisionalAnswer>(data).ok());
            if let Some(answer) = answer {
                self.deliver(&answer);
            }
        }
        Ok(())
    }
}

/// What a writer knows about listeners in other processes.
#[derive(Default)]
struct OtherListeners {
    exist: bool,
    looked_at: Option<Instant>,
}

/// Takes the text of an answer from a run. If it is dropped before [`finish`](Self::finish), the text is withdrawn.
pub(crate) struct ProvisionalWriter {
    written: Arc<WrittenText>,
}

#[derive(Default)]
struct WrittenText {
    state: Mutex<WritingState>,
    changed: Notify,
}

#[derive(Default)]
struct WritingState {
    text: String,
    end: Option<WritingEnd>,
}

/// How the writing of an answer ended.
#[derive(Clone, Copy)]
enum WritingEnd {
    /// The run ended with the answer: its message replaces the text.
    Finished,
    /// There will be no answer of this run.
    Discarded,
}

impl WrittenText {
    fn lock(&self) -> MutexGuard<'_, WritingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, how: WritingEnd) {
        self.lock().end.get_or_insert(how);
        self.changed.notify_one();
    }
}

impl ProvisionalWriter {
    /// Adds a chunk of text.
    pub(crate) fn append(&self, chunk: &str) {
        self.written.lock().text.push_str(chunk);
        self.written.changed.notify_one();
    }

    /// Withdraws the text so far.
    pub(crate) fn clear(&self) {
        self.written.lock().text.clear();
        self.written.changed.notify_one();
    }

    /// The text is complete, and becomes a message.
    pub(crate) fn finish(self) {
        self.written.end(WritingEnd::Finished);
    }
}

impl Drop for ProvisionalWriter {
    fn drop(&mut self) {
        self.written.end(WritingEnd::Discarded);
    }
}

fn stream() -> StreamName {
    StreamName::new(PROVISIONAL_STREAM).expect("the name is valid")
}

fn listeners_of(ticket_id: Uuid) -> SetName {
    SetName::new(format!("{LISTENERS}{ticket_id}")).expect("a prefix and a UUID are a valid name")
}
