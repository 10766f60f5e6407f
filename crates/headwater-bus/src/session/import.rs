//! Imports a session from JSON lines.
//!
//! Upstream: operators. Downstream: `copy`.
//! Guarantees: each line and the file as a whole are validated: a truncated, foreign or unordered file is an error, and
//! nothing of it is imported. A call dropped half way fails the import, because it is unknown which entries were
//! stored. A failed or killed import leaves its id free: its entries are in a stream with a temporary name.

use headwater_stream::{EntryId, Fields, RegistryMap};

use super::copy::{Beginning, CopyInProgress};
use super::jsonl::{
    ExportEnd, ExportHeader, FORMAT, JsonlLine, SavedBeginning, SavedEntry, SavedSnapshot,
};
use super::meta::Parent;
use super::{Result, Session, SessionError, Sessions};
use crate::limits::{IMPORT_LINE_BYTES_MAX, REPLAY_PAGE_BYTES, SNAPSHOT_SETS_MAX};
use crate::metrics;
use crate::name::SessionId;

/// Entries per append.
const BATCH: usize = 500;

impl Sessions {
    /// Imports a session from lines written by [`export`](Self::export), under this id. Fails if a session with this id
    /// exists.
    pub fn import(&self, session: &SessionId) -> Import {
        Import {
            sessions: self.clone(),
            session: session.clone(),
            line: 0,
            head: None,
            snapshots: Vec::new(),
            copy: None,
            completed: None,
            buffered: Vec::new(),
            buffered_bytes: 0,
            last: EntryId::MIN,
            entries: 0,
            checksum: crc32fast::Hasher::new(),
            stage: ImportStage::ExportHeader,
            is_busy: false,
        }
    }
}

/// An import in progress: pass every [`line`](Self::line), then call [`finish`](Self::finish). If it is dropped before
/// that, no session is created; start again with the same id.
pub struct Import {
    sessions: Sessions,
    session: SessionId,
    line: u64,
    head: Option<ExportHeader>,
    snapshots: Vec<(String, RegistryMap)>,
    copy: Option<CopyInProgress>,
    /// The copy, once it is committed.
    completed: Option<(CopyInProgress, Beginning)>,
    buffered: Vec<(EntryId, Fields)>,
    buffered_bytes: usize,
    last: EntryId,
    entries: u64,
    checksum: crc32fast::Hasher,
    stage: ImportStage,
    /// A line is being processed. If this is set at the next call, the previous future was dropped.
    is_busy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ImportStage {
    ExportHeader,
    Snapshots,
    Entries,
    Ended,
    Failed,
}

impl Import {
    /// Imports the next line, without its line break. An error fails the import and removes what was stored.
    ///
    /// Not cancel-safe: if the future of `line` is dropped, the import has failed.
    pub async fn line(&mut self, line: &str) -> Result<()> {
        self.line += 1;
        let taken = match self.check_not_cancelled() {
            Ok(()) => {
                self.is_busy = true;
                self.accept(line).await
            }
            Err(error) => Err(error),
        };
        if taken.is_err() {
            let _ = self.abandon().await;
        }
        self.is_busy = false;
        taken
    }

    /// Checks that the previous call was not dropped.
    fn check_not_cancelled(&self) -> Result<()> {
        match self.is_busy {
            false => Ok(()),
            true => Err(self.line_error("the previous call was cancelled; start the import again")),
        }
    }

    /// Abandons the import and removes what was stored; what cannot be removed now is left to [`Sessions::run`]. Returns
    /// `true` if the session turns out to be complete: only the reply to [`complete`](Self::complete) was lost. An
    /// error means that this is unknown; retry.
    ///
    /// Not needed to free the id: an import that is only dropped leaves it free.
    pub async fn abandon(&mut self) -> Result<bool> {
        self.stage = ImportStage::Failed;
        self.buffered.clear();
        let Some(copy) = &self.copy else { return Ok(false) };
        let is_complete = copy.abandon().await?;
        self.copy = None;
        Ok(is_complete)
    }

    /// [Completes](Self::complete) the import and [opens](Self::open) the session.
    pub async fn finish(mut self) -> Result<Session> {
        self.complete().await?;
        self.open().await
    }

    /// Opens the session of a completed import. After an error the session still exists; recover it later.
    pub async fn open(self) -> Result<Session> {
        match self.completed {
            Some((copy, beginning)) => copy.open(beginning).await,
            None => self.sessions.recover(&self.session).await,
        }
    }

    /// Commits the session if the import is complete. An error fails the import, as in [`line`](Self::line); after a
    /// transient one, [`abandon`](Self::abandon) tells whether the session was committed nevertheless.
    pub async fn complete(&mut self) -> Result<()> {
        let committed = match self.check_end().await {
            Ok(beginning) => match &mut self.copy {
                Some(copy) => copy.commit(beginning).await.map(|()| beginning),
                None => Err(self.line_error("the import has failed")),
            },
            Err(error) => Err(error),
        };
        match committed {
            Ok(beginning) => {
                self.completed = self.copy.take().map(|copy| (copy, beginning));
            }
            Err(error) if !matches!(self.abandon().await, Ok(true)) => return Err(error),
            Err(_) => {}
        }
        metrics::copied("import");
        Ok(())
    }

    async fn accept(&mut self, text: &str) -> Result<()> {
        if text.len() > IMPORT_LINE_BYTES_MAX {
            let problem = format!("{} bytes; the limit is {IMPORT_LINE_BYTES_MAX}", text.len());
            return Err(self.line_error(problem));
        }
        let read: JsonlLine = serde_json::from_str(text).map_err(|error| self.line_error(error))?;
        match (read, self.stage) {
            (_, ImportStage::Failed) => Err(self.line_error("the import has failed")),
            (JsonlLine::HeadwaterSession(head), ImportStage::ExportHeader) => {
                self.accept_head(head)
            }
            (_, ImportStage::ExportHeader) => {
                Err(self.line_error("it must be the header of a session export"))
            }
            (JsonlLine::Snapshot(saved), ImportStage::Snapshots) => self.accept_snapshot(saved),
            (JsonlLine::Entry(saved), ImportStage::Snapshots | ImportStage::Entries) => {
                self.checksum.update(text.as_bytes());
                self.begin().await?;
                self.accept_entry(saved).await
            }
            (JsonlLine::End(end), ImportStage::Snapshots | ImportStage::Entries) => {
                self.begin().await?;
                self.accept_end(&end).await
            }
            (_, ImportStage::Ended) => Err(self.line_error("it follows the end line")),
            _ => Err(self.line_error("it is out of order")),
        }
    }

    fn accept_head(&mut self, head: ExportHeader) -> Result<()> {
        if head.format != FORMAT {
            let problem = format!("format {}; this version reads {FORMAT}", head.format);
            return Err(self.line_error(problem));
        }
        self.head = Some(head);
        self.stage = ImportStage::Snapshots;
        Ok(())
    }

    fn accept_snapshot(&mut self, saved: SavedSnapshot) -> Result<()> {
        let is_set = |set: &str| set.len() == 16 && set.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_set(&saved.set) || self.snapshots.iter().any(|(set, _)| *set == saved.set) {
            return Err(self.line_error("it is not a valid snapshot, or it is repeated"));
        }
        // They are kept in memory until the first entry.
        if self.snapshots.len() >= SNAPSHOT_SETS_MAX {
            let problem = format!("more than {SNAPSHOT_SETS_MAX} snapshots");
            return Err(self.line_error(problem));
        }
        let mut fields = RegistryMap::new();
        for (name, value) in saved.fields {
            fields.insert(name, value.read().ok_or_else(|| self.line_error("invalid bytes"))?);
        }
        super::snapshot::verify(&fields).map_err(|problem| self.line_error(problem))?;
        self.snapshots.push((saved.set, fields));
        Ok(())
    }

    /// Begins the copy, once the file is known to be an export.
    async fn begin(&mut self) -> Result<()> {
        if self.copy.is_some() {
            return Ok(());
        }
        let head = self.head.as_ref();
        let parent = match head.and_then(|head| head.parent.as_ref()) {
            None => None,
            Some((session, entry_id)) => Some(Parent {
                session: SessionId::new(session)?,
                entry_id: entry_id.parse().map_err(|error| self.line_error(error))?,
            }),
        };
        let snapshots = std::mem::take(&mut self.snapshots);
        let copy = CopyInProgress::begin(&self.sessions, &self.session, parent, snapshots);
        self.copy = Some(copy.await?);
        self.stage = ImportStage::Entries;
        Ok(())
    }

    async fn accept_entry(&mut self, saved: SavedEntry) -> Result<()> {
        let id: EntryId = saved.id.parse().map_err(|error| self.line_error(error))?;
        if id <= self.last {
            let problem = format!("entry {id} follows {}; entries must be in order", self.last);
            return Err(self.line_error(problem));
        }
        let mut fields = Vec::with_capacity(saved.fields.len());
        for (name, value) in saved.fields {
            let invalid = || self.line_error("invalid bytes");
            fields.push((name.read().ok_or_else(invalid)?, value.read().ok_or_else(invalid)?));
        }
        let fields = Fields::new(fields);
        self.last = id;
        self.entries += 1;
        self.buffered_bytes += fields.bytes();
        self.buffered.push((id, fields));
        if self.buffered.len() >= BATCH || self.buffered_bytes >= REPLAY_PAGE_BYTES {
            self.write().await?;
        }
        Ok(())
    }

    async fn accept_end(&mut self, end: &ExportEnd) -> Result<()> {
        if end.entries != self.entries || end.crc32 != self.checksum.clone().finalize() {
            let problem = format!(
                "the end line counts {} entries and {} were read, or the checksum differs",
                end.entries, self.entries
            );
            return Err(self.line_error(problem));
        }
        self.stage = ImportStage::Ended;
        self.write().await
    }

    async fn write(&mut self) -> Result<()> {
        let buffered = std::mem::take(&mut self.buffered);
        self.buffered_bytes = 0;
        match &mut self.copy {
            Some(copy) => copy.add(&buffered).await,
            None => Ok(()),
        }
    }

    async fn check_end(&mut self) -> Result<Beginning> {
        self.line += 1;
        self.check_not_cancelled()?;
        if self.stage != ImportStage::Ended {
            return Err(self.line_error("the end line is missing: the file is truncated"));
        }
        // The lines were valid; check that all of them were stored.
        let stored = self.copy.as_ref().map_or(0, |copy| copy.entries);
        if stored != self.entries {
            let problem = format!("{stored} of {} entries were stored", self.entries);
            return Err(self.line_error(problem));
        }
        let beginning = match self.head.as_ref().map(|head| &head.beginning) {
            Some(SavedBeginning::Whole) => Beginning::Whole,
            Some(SavedBeginning::After(entries)) => Beginning::After(*entries),
            Some(SavedBeginning::Unknown) | None => Beginning::Unknown,
        };
        let has_snapshot = self.copy.as_ref().is_some_and(CopyInProgress::has_snapshot);
        if matches!(beginning, Beginning::After(_)) && !has_snapshot {
            let problem = "the beginning was compacted, and no snapshot includes it";
            return Err(self.line_error(problem));
        }
        Ok(beginning)
    }

    fn line_error(&self, problem: impl ToString) -> SessionError {
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
