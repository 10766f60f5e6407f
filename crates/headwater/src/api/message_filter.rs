//! Looks for stored messages by key, header or text.
//!
//! Upstream: `messages.rs` and `search.rs`. Downstream: pages of the queue. Guarantees: a page of a search reads at most
//! [`SCAN_MAX`] messages or for [`SCAN_TIME`], and says how many it read; its cursor continues behind the last message that it read.

use std::time::{Duration, Instant};

use headwater_queue::{Bound, Inspector, MessageQuery, Page, QueueError, StoredMessage};
use headwater_stream::{Direction, EntryId};

use crate::http::ApiError;

/// Maximum messages read for a page, and the time after which no further ones are read.
pub(super) const SCAN_MAX: usize = 10_000;
const SCAN_TIME: Duration = Duration::from_secs(3);

/// Messages of one read.
const READ: usize = 500;

/// Messages that are looked at for a neighbour of the same key.
const NEIGHBOURS_MAX: usize = 200;

/// Maximum characters of a key, header or text to look for.
const SOUGHT_CHARS_MAX: usize = 1000;

/// What a message must have: all that is given.
#[derive(Clone, Debug, Default)]
pub(super) struct MessageFilter {
    key: Option<String>,
    /// Name, and value if one is given.
    header: Option<(String, Option<String>)>,
    /// In lower case.
    text: Option<String>,
    /// The key, or the value of a header.
    anywhere: Option<String>,
}

/// The messages of a page that were found, and how many were read.
pub(super) struct MessageSearch {
    pub(super) page: Page<StoredMessage>,
    pub(super) scanned: u64,
}

impl MessageFilter {
    /// `None` if nothing is given. `header` is a name, or a name and a value with `=` between them.
    pub(super) fn new(
        key: Option<String>,
        header: Option<String>,
        text: Option<String>,
    ) -> Result<Option<Self>, ApiError> {
        for (name, value) in [("key", &key), ("header", &header), ("text", &text)] {
            let chars = value.as_ref().map_or(1, |value| value.chars().count());
            if !(1..=SOUGHT_CHARS_MAX).contains(&chars) {
                let message = format!("`{name}` must have 1 to {SOUGHT_CHARS_MAX} characters");
                return Err(ApiError::invalid(message));
            }
        }
        if key.is_none() && header.is_none() && text.is_none() {
            return Ok(None);
        }
        let header = header.map(|header| match header.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (header, None),
        });
        let text = text.map(|text| text.to_lowercase());
        Ok(Some(Self { key, header, text, anywhere: None }))
    }

    /// Messages with this key, or with this text in the value of a header, such as a trace id.
    pub(super) fn anywhere(sought: &str) -> Self {
        Self { anywhere: Some(sought.to_owned()), ..Self::default() }
    }

    /// Whether a message has all that is asked for.
    pub(super) fn matches(&self, stored: &StoredMessage) -> bool {
        let message = stored.message.as_ref().ok();
        let key = message.and_then(|message| message.key.as_deref());
        let has_header = |name: &str, value: &Option<String>| {
            let found = message.and_then(|message| message.headers.get(name));
            found.is_some_and(|found| value.as_ref().is_none_or(|value| found == value))
        };
        let has_text = |text: &str| {
            let payload = stored.fields.get("payload").map_or(&b""[..], |bytes| bytes);
            String::from_utf8_lossy(payload).to_lowercase().contains(text)
        };
        let is_anywhere = |sought: &str| {
            let mut values = message.into_iter().flat_map(|message| message.headers.values());
            key == Some(sought) || values.any(|value| value.contains(sought))
        };
        self.key.as_deref().is_none_or(|wanted| key == Some(wanted))
            && self.header.as_ref().is_none_or(|(name, value)| has_header(name, value))
            && self.text.as_deref().is_none_or(has_text)
            && self.anywhere.as_deref().is_none_or(is_anywhere)
    }

    /// A page of the messages that match, in the order of the query.
    pub(super) async fn search(
        &self,
        inspect: &Inspector,
        topic: &str,
        query: &MessageQuery,
    ) -> Result<MessageSearch, QueueError> {
        let until = Instant::now() + SCAN_TIME;
        let mut found = Vec::new();
        let (mut cursor, mut scanned) = (query.cursor.clone(), 0);
        loop {
            let count = READ.min(SCAN_MAX - scanned);
            let read = MessageQuery { limit: count, cursor: cursor.clone(), ..query.clone() };
            let mut page = inspect.messages(topic, &read).await?;
            let left = query.limit - found.len();
            let hits = page.items.iter().enumerate().filter(|(_, stored)| self.matches(stored));
            // If this read has more than the page takes, the cursor must point behind the last one taken.
            if let Some((last, _)) = hits.clone().nth(left - 1)
                && hits.count() > left
            {
                let shorter = MessageQuery { limit: last + 1, ..read };
                page = inspect.messages(topic, &shorter).await?;
            }
            scanned += page.items.len();
            found.extend(page.items.into_iter().filter(|stored| self.matches(stored)));
            cursor = page.next;
            let is_over = scanned >= SCAN_MAX || Instant::now() >= until;
            if cursor.is_none() || found.len() >= query.limit || is_over {
                let page = Page { items: found, next: cursor };
                return Ok(MessageSearch { page, scanned: scanned as u64 });
            }
        }
    }
}

/// The ids of the messages with the same key before and after a message of its partition.
pub(super) async fn neighbours(
    inspect: &Inspector,
    topic: &str,
    of: &StoredMessage,
    key: String,
) -> Result<(Option<String>, Option<String>), QueueError> {
    let filter = MessageFilter { key: Some(key), ..MessageFilter::default() };
    let find = async |direction: Direction| {
        let at = Some(Bound::Id(of.id));
        let (from, to) = match direction {
            Direction::Forward => (at, None),
            Direction::Backward => (None, at),
        };
        let query = MessageQuery {
            from,
            to,
            direction,
            partition: Some(of.partition),
            // The first one is the message itself.
            limit: NEIGHBOURS_MAX,
            cursor: None,
        };
        let page = inspect.messages(topic, &query).await?;
        let found = page.items.iter().filter(|stored| stored.id != of.id);
        let found: Option<EntryId> =
            found.into_iter().find(|stored| filter.matches(stored)).map(|stored| stored.id);
        Ok::<_, QueueError>(found.map(|id| id.to_string()))
    };
    tokio::try_join!(find(Direction::Backward), find(Direction::Forward))
}
