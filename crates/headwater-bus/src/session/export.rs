//! Export and import: a session as lines of JSON.
//!
//! Upstream: operators, with a file of their own. Downstream: `filling`.
//! Promises: an import is checked line by line and as a whole: a file that is torn, of another kind or out of order is an
//! error, and nothing of it is imported. What is exported and imported again has the same events, in the same order, with
//! the same bytes.
//!
//! The first line says what the file is; if the beginning of the session was compacted, its snapshots follow; then one line
//! for each entry; the last line has their number and checksum.

use std::collections::VecDeque;

use bytes::Bytes;
use headwater_stream::{EntryId, Fields, RegistryMap};
use serde::{Deserialize, Serialize};

use super::filling::{Beginning, Filling};
use super::fork::{Source, overtaken};
use super::meta::Parent;
use super::replay::{Page, Pages, Until};
use super::{Result, Session, SessionError, Sessions};
use crate::limits::{IMPORT_LINE_BYTES_MAX, REPLAY_PAGE_BYTES};
use crate::metrics;
use crate::name::SessionId;

/// What the layout of a file is known by.
const FORMAT: u32 = 1;

/// Entries that are written together.
const BATCH: usize = 500;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Line {
    HeadwaterSession(Head),
    Snapshot(SavedSnapshot),
    Entry(SavedEntry),
    End(End),
}

#[derive(Serialize, Deserialize)]
struct Head {
    format: u32,
    session: String,
    beginning: SavedBeginning,
    parent: Option<(String, String)>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SavedBeginning {
    Whole,
    After(u64),
    Unknown,
}

#[derive(Serialize, Deserialize)]
struct SavedSnapshot {
    set: String,
    fields: Vec<(String, Text)>,
}

#[derive(Serialize, Deserialize)]
struct SavedEntry {
    id: String,
    fields: Vec<(Text, Text)>,
}

#[derive(Serialize, Deserialize)]
struct End {
    entries: u64,
    crc32: u32,
}

/// Bytes that mostly are text.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Text {
    Text(String),
    Hex { hex: String },
}

/// A session on its way out. [`next_line`](Self::next_line) gives its lines.
pub struct Export {
    sessions: Sessions,
    session: SessionId,
    source: Source,
    position: EntryId,
    ready: VecDeque<String>,
    entries: u64,
    checksum: crc32fast::Hasher,
    is_ended: bool,
}

impl Sessions {
    /// Writes a session as lines of JSON.
    pub async fn export(&self, session: &SessionId) -> Result<Export> {
        let source = self.source(session).await?;
        let mut ready = VecDeque::new();
        let parent = source.meta.parent.as_ref();
        let head = Head {
            format: FORMAT,
            session: session.to_string(),
            beginning: match source.beginning {
                Beginning::Whole => SavedBeginning::Whole,
                Beginning::After(entries) => SavedBeginning::After(entries),
                Beginning::Unknown => SavedBeginning::Unknown,
            },
            parent: parent.map(|parent| (parent.session.to_string(), parent.entry_id.to_string())),
        };
        ready.push_back(write(session, &Line::HeadwaterSession(head))?);
        if source.missing.is_some() {
            for (set, fields) in &source.snapshots {
                let fields = fields.iter().map(|(name, value)| (name.clone(), Text::new(value)));
                let saved = SavedSnapshot { set: set.clone(), fields: fields.collect() };
                ready.push_back(write(session, &Line::Snapshot(saved))?);
            }
        }
        Ok(Export {
            sessions: self.clone(),
            session: session.clone(),
            source,
            position: EntryId::MIN,
            ready,
            entries: 0,
            checksum: crc32fast::Hasher::new(),
            is_ended: false,
        })
    }

    /// Makes a session of lines that [`export`](Self::export) wrote. It may have another id than it had. It is an error if
    /// there is a session with this id.
    pub fn import(&self, session: &SessionId) -> Import {
        Import {
            sessions: self.clone(),
            session: session.clone(),
            line: 0,
            head: None,
            snapshots: Vec::new(),
            filling: None,
            waiting: Vec::new(),
            waiting_bytes: 0,
            last: EntryId::MIN,
            entries: 0,
            checksum: crc32fast::Hasher::new(),
            stage: ImportStage::Head,
        }
    }
}

impl Export {
    /// The next line, without its end; `None` after the last.
    pub async fn next_line(&mut self) -> Result<Option<String>> {
        if self.ready.is_empty() && !self.is_ended {
            self.read().await?;
        }
        Ok(self.ready.pop_front())
    }

    async fn read(&mut self) -> Result<()> {
        let journal = self.sessions.journal();
        let stream = journal.keys.session(&self.session);
        let mut pages = Pages::new(journal, &stream);
        let entries = match pages.next(self.position, EntryId::MAX).await? {
            Page::Gap(before) => return Err(overtaken(&self.session, self.position, before)),
            Page::Entries(entries) => entries,
        };
        self.source.check_first(&self.session, self.position, Until::End, &entries)?;
        for entry in &entries {
            let fields =
                entry.fields.iter().map(|(name, value)| (Text::new(name), Text::new(value)));
            let saved = SavedEntry { id: entry.id.to_string(), fields: fields.collect() };
            let line = write(&self.session, &Line::Entry(saved))?;
            self.checksum.update(line.as_bytes());
            self.entries += 1;
            self.position = entry.id;
            self.ready.push_back(line);
        }
        if entries.is_empty() {
            let crc32 = self.checksum.clone().finalize();
            let end = End { entries: self.entries, crc32 };
            self.ready.push_back(write(&self.session, &Line::End(end))?);
            self.is_ended = true;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("session", &self.session).finish_non_exhaustive()
    }
}

/// A session on its way in: give it every [`line`](Self::line), then [`finish`](Self::finish). One that is dropped before
/// that is no session.
pub struct Import {
    sessions: Sessions,
    session: SessionId,
    line: u64,
    head: Option<Head>,
    snapshots: Vec<(String, RegistryMap)>,
    filling: Option<Filling>,
    waiting: Vec<(EntryId, Fields)>,
    waiting_bytes: usize,
    last: EntryId,
    entries: u64,
    checksum: crc32fast::Hasher,
    stage: ImportStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ImportStage {
    Head,
    Snapshots,
    Entries,
    Ended,
    Failed,
}

impl Import {
    /// Takes the next line, without its end. An error is the end of the import: nothing of it is left.
    pub async fn line(&mut self, line: &str) -> Result<()> {
        self.line += 1;
        let taken = self.take(line).await;
        if taken.is_err() {
            self.fail().await;
        }
        taken
    }

    /// Makes it a session, if all of it is there.
    pub async fn finish(mut self) -> Result<Session> {
        let finished = self.check_end().await;
        if finished.is_err() {
            self.fail().await;
        }
        let beginning = finished?;
        let filling = self.filling.take().ok_or_else(|| self.wrong("the import has failed"))?;
        let imported = filling.finish(beginning).await?;
        metrics::filled("import");
        Ok(imported)
    }

    async fn take(&mut self, text: &str) -> Result<()> {
        if text.len() > IMPORT_LINE_BYTES_MAX {
            let problem = format!("{} bytes; the limit is {IMPORT_LINE_BYTES_MAX}", text.len());
            return Err(self.wrong(problem));
        }
        let read: Line = serde_json::from_str(text).map_err(|error| self.wrong(error))?;
        match (read, self.stage) {
            (_, ImportStage::Failed) => Err(self.wrong("the import has failed")),
            (Line::HeadwaterSession(head), ImportStage::Head) => self.take_head(head),
            (_, ImportStage::Head) => Err(self.wrong("it must be the head of a session")),
            (Line::Snapshot(saved), ImportStage::Snapshots) => self.take_snapshot(saved),
            (Line::Entry(saved), ImportStage::Snapshots | ImportStage::Entries) => {
                self.checksum.update(text.as_bytes());
                self.begin().await?;
                self.take_entry(saved).await
            }
            (Line::End(end), ImportStage::Snapshots | ImportStage::Entries) => {
                self.begin().await?;
                self.take_end(&end).await
            }
            (_, ImportStage::Ended) => Err(self.wrong("it comes after the end")),
            _ => Err(self.wrong("it is out of order")),
        }
    }

    fn take_head(&mut self, head: Head) -> Result<()> {
        if head.format != FORMAT {
            let problem = format!("format {}; this version reads {FORMAT}", head.format);
            return Err(self.wrong(problem));
        }
        self.head = Some(head);
        self.stage = ImportStage::Snapshots;
        Ok(())
    }

    fn take_snapshot(&mut self, saved: SavedSnapshot) -> Result<()> {
        let is_set = |set: &str| set.len() == 16 && set.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_set(&saved.set) || self.snapshots.iter().any(|(set, _)| *set == saved.set) {
            return Err(self.wrong("it is no snapshot, or one that was there before"));
        }
        let mut fields = RegistryMap::new();
        for (name, value) in saved.fields {
            fields.insert(name, value.read().ok_or_else(|| self.wrong("odd bytes"))?);
        }
        super::snapshot::verify(&fields).map_err(|problem| self.wrong(problem))?;
        self.snapshots.push((saved.set, fields));
        Ok(())
    }

    /// Takes the id, once it is clear that this is a session at all.
    async fn begin(&mut self) -> Result<()> {
        if self.filling.is_some() {
            return Ok(());
        }
        let head = self.head.as_ref();
        let parent = match head.and_then(|head| head.parent.as_ref()) {
            None => None,
            Some((session, entry_id)) => Some(Parent {
                session: SessionId::new(session)?,
                entry_id: entry_id.parse().map_err(|error| self.wrong(error))?,
            }),
        };
        let what = format!("an import of `{}`", head.map_or("", |head| &head.session));
        let snapshots = std::mem::take(&mut self.snapshots);
        let filling = Filling::begin(&self.sessions, &self.session, what, parent, snapshots);
        self.filling = Some(filling.await?);
        self.stage = ImportStage::Entries;
        Ok(())
    }

    async fn take_entry(&mut self, saved: SavedEntry) -> Result<()> {
        let id: EntryId = saved.id.parse().map_err(|error| self.wrong(error))?;
        if id <= self.last {
            let problem = format!("entry {id} comes after {}, the order is wrong", self.last);
            return Err(self.wrong(problem));
        }
        let mut fields = Vec::with_capacity(saved.fields.len());
        for (name, value) in saved.fields {
            let odd = || self.wrong("odd bytes");
            fields.push((name.read().ok_or_else(odd)?, value.read().ok_or_else(odd)?));
        }
        let fields = Fields::new(fields);
        self.last = id;
        self.entries += 1;
        self.waiting_bytes += fields.bytes();
        self.waiting.push((id, fields));
        if self.waiting.len() >= BATCH || self.waiting_bytes >= REPLAY_PAGE_BYTES {
            self.write().await?;
        }
        Ok(())
    }

    async fn take_end(&mut self, end: &End) -> Result<()> {
        if end.entries != self.entries || end.crc32 != self.checksum.clone().finalize() {
            let problem = format!(
                "{} entries are announced and {} were there, or their bytes have changed",
                end.entries, self.entries
            );
            return Err(self.wrong(problem));
        }
        self.stage = ImportStage::Ended;
        self.write().await
    }

    async fn write(&mut self) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        match &mut self.filling {
            Some(filling) => filling.add(&waiting).await,
            None => Ok(()),
        }
    }

    async fn check_end(&mut self) -> Result<Beginning> {
        self.line += 1;
        if self.stage != ImportStage::Ended {
            return Err(self.wrong("the end is missing: the file is cut off"));
        }
        let beginning = match self.head.as_ref().map(|head| &head.beginning) {
            Some(SavedBeginning::Whole) => Beginning::Whole,
            Some(SavedBeginning::After(entries)) => Beginning::After(*entries),
            Some(SavedBeginning::Unknown) | None => Beginning::Unknown,
        };
        let has_snapshot = self.filling.as_ref().is_some_and(Filling::has_snapshot);
        if matches!(beginning, Beginning::After(_)) && !has_snapshot {
            let problem =
                "the beginning was compacted, and there is no snapshot that stands for it";
            return Err(self.wrong(problem));
        }
        Ok(beginning)
    }

    async fn fail(&mut self) {
        self.stage = ImportStage::Failed;
        self.waiting.clear();
        if let Some(filling) = self.filling.take() {
            filling.abandon().await;
        }
    }

    fn wrong(&self, problem: impl ToString) -> SessionError {
        SessionError::Import { line: self.line, problem: problem.to_string() }
    }
}

impl std::fmt::Debug for Import {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Import")
            .field("session", &self.session)
            .field("line", &self.line)
            .finish_non_exhaustive()
    }
}

impl Text {
    fn new(bytes: &Bytes) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Hex { hex: bytes.iter().map(|byte| format!("{byte:02x}")).collect() },
        }
    }

    fn read(self) -> Option<Bytes> {
        match self {
            Self::Text(text) => Some(text.into()),
            Self::Hex { hex } => {
                let digits = hex.as_bytes();
                let pair = |pair: &[u8]| {
                    let text = std::str::from_utf8(pair).ok()?;
                    u8::from_str_radix(text, 16).ok()
                };
                let is_even = digits.len() % 2 == 0;
                is_even
                    .then(|| digits.chunks(2).map(pair).collect::<Option<Vec<u8>>>())?
                    .map(Bytes::from)
            }
        }
    }
}

fn write(session: &SessionId, line: &Line) -> Result<String> {
    serde_json::to_string(line).map_err(|error| SessionError::Damaged {
        session: session.clone(),
        problem: error.to_string(),
    })
}
