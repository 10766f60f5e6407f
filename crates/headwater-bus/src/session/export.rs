//! Exports a session as JSON lines.
//!
//! Upstream: operators. Downstream: `jsonl`.
//! Guarantees: an export that is imported again has the same events in the same order with the same bytes. An incomplete
//! session is not exported.

use std::collections::VecDeque;

use headwater_stream::{Direction, Entry, EntryId, Range};

use super::copy::Beginning;
use super::fork::{CopySource, trimmed_error};
use super::jsonl::{
    ExportEnd, ExportHeader, FORMAT, JsonBytes, JsonlLine, SavedBeginning, SavedEntry,
    SavedSnapshot, write,
};
use super::replay::{ReplayPage, ReplayPages, ReplayUntil};
use super::{Result, SessionError, Sessions};
use crate::name::SessionId;

/// An export in progress. Call [`next_line`](Self::next_line) until it returns `None`.
pub struct Export {
    sessions: Sessions,
    session: SessionId,
    source: CopySource,
    position: EntryId,
    /// Last entry of the stream when the export started.
    end: Option<EntryId>,
    ready: VecDeque<String>,
    entries: u64,
    checksum: crc32fast::Hasher,
    is_ended: bool,
}

impl Sessions {
    /// Exports a session as JSON lines.
    pub async fn export(&self, session: &SessionId) -> Result<Export> {
        let source = self.copy_source(session).await?;
        let mut ready = VecDeque::new();
        let parent = source.meta.parent.as_ref();
        let head = ExportHeader {
            format: FORMAT,
            session: session.to_string(),
            beginning: match source.beginning {
                Beginning::Whole => SavedBeginning::Whole,
                Beginning::After(entries) => SavedBeginning::After(entries),
                Beginning::Unknown => SavedBeginning::Unknown,
            },
            parent: parent.map(|parent| (parent.session.to_string(), parent.entry_id.to_string())),
        };
        ready.push_back(write(session, &JsonlLine::HeadwaterSession(head))?);
        if source.missing.is_some() {
            for (set, fields) in &source.snapshots {
                let fields =
                    fields.iter().map(|(name, value)| (name.clone(), JsonBytes::new(value)));
                let saved = SavedSnapshot { set: set.clone(), fields: fields.collect() };
                ready.push_back(write(session, &JsonlLine::Snapshot(saved))?);
            }
        }
        Ok(Export {
            sessions: self.clone(),
            session: session.clone(),
            position: EntryId::MIN,
            end: source.end(),
            source,
            ready,
            entries: 0,
            checksum: crc32fast::Hasher::new(),
            is_ended: false,
        })
    }
}

impl Sessions {
    /// Up to `limit` stored entries after this one, as they are. Removed entries are not reported.
    pub async fn entries_after(
        &self,
        session: &SessionId,
        after: EntryId,
        limit: usize,
    ) -> Result<Vec<Entry>> {
        let storage = self.storage();
        let range = Range {
            from: after.next(),
            to: EntryId::MAX,
            direction: Direction::Forward,
            count: limit,
        };
        Ok(storage.backend.range(&storage.keys.session(session), range).await?)
    }
}

impl Export {
    /// The next line, without its line break; `None` after the last.
    pub async fn next_line(&mut self) -> Result<Option<String>> {
        while self.ready.is_empty() && !self.is_ended {
            self.read().await?;
        }
        Ok(self.ready.pop_front())
    }

    async fn read(&mut self) -> Result<()> {
        let storage = self.sessions.storage();
        let stream = storage.keys.session(&self.session);
        let mut pages = ReplayPages::new(storage, &stream, self.end);
        let entries = match pages.next(self.position, EntryId::MAX).await? {
            ReplayPage::Gap(before) => Err(trimmed_error(&self.session, self.position, before)),
            ReplayPage::Entries(entries) => {
                let (session, position) = (&self.session, self.position);
                let checked =
                    self.source.check_first(session, position, ReplayUntil::End, &entries);
                checked.map(|()| entries)
            }
        };
        let entries = match entries {
            Ok(entries) => entries,
            Err(error) => return Err(self.overtaken(error).await),
        };
        self.end = pages.end();
        let is_at_end = pages.is_at_end();
        for entry in &entries {
            self.position = entry.id;
            let fields = entry.fields.iter();
            let fields = fields.map(|(name, value)| (JsonBytes::new(name), JsonBytes::new(value)));
            let saved = SavedEntry { id: entry.id.to_string(), fields: fields.collect() };
            let line = write(&self.session, &JsonlLine::Entry(saved))?;
            self.checksum.update(line.as_bytes());
            self.entries += 1;
            self.ready.push_back(line);
        }
        if is_at_end {
            self.source.check_deleted(
                &self.session,
                self.position,
                self.entries,
                ReplayUntil::End,
            )?;
            let crc32 = self.checksum.clone().finalize();
            let end = ExportEnd { entries: self.entries, crc32 };
            self.ready.push_back(write(&self.session, &JsonlLine::End(end))?);
            self.is_ended = true;
        }
        Ok(())
    }
}

impl Export {
    /// Maps an error: entries may be missing because of our own compaction.
    async fn overtaken(&self, error: SessionError) -> SessionError {
        match self.sessions.was_compacted_meanwhile(&self.session, &self.source, &error).await {
            Ok(true) => SessionError::CompactedWhileReading { session: self.session.clone() },
            _ => error,
        }
    }
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("session", &self.session).finish_non_exhaustive()
    }
}
