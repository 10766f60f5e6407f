//! The maximum of everything that comes into the desk or goes out of it.
//!
//! Upstream: `tickets`, `ticket_events`, `desk` and `replies` check against these. What breaks one is refused by name
//! before it has any effect, or cut where the text says so.

use std::time::Duration;

/// Bytes of the text of one message of a ticket.
pub const CONTENT_BYTES_MAX: usize = 64 * 1024;

/// Bytes of the title of a ticket.
pub const TITLE_BYTES_MAX: usize = 500;

/// Bytes of the name of a user.
pub const USER_ID_BYTES_MAX: usize = 128;

/// Tickets or messages in one page.
pub const PAGE_MAX: usize = 200;

/// Tickets or messages in one page if nobody says otherwise.
pub const PAGE_DEFAULT: usize = 50;

/// Bytes of one answer of a model, all pieces together; a longer one is an error.
pub const ANSWER_BYTES_MAX: usize = 256 * 1024;

/// Bytes that a model's server may send for one answer, its wrapping included.
pub const RESPONSE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Bytes of one line that a model's server streams.
pub const LINE_BYTES_MAX: usize = 512 * 1024;

/// Bytes of an error answer that are read and kept.
pub const ERROR_BODY_BYTES_MAX: usize = 4 * 1024;

/// Calls of tools in one answer of a model; more are an error.
pub const TOOL_CALLS_MAX: usize = 8;

/// Bytes of the arguments of one call of a tool.
pub const TOOL_ARGUMENTS_BYTES_MAX: usize = 16 * 1024;

/// How often in one run a model may ask for tools; then it has to answer without.
pub const TOOL_ROUNDS_MAX: usize = 4;

/// Bytes of a reason or a query that a model gives a tool; longer ones are cut.
pub const TOOL_TEXT_BYTES_MAX: usize = 1024;

/// Tickets that one search finds.
pub const SEARCH_RESULTS_MAX: usize = 5;

/// Words of a query that are looked for.
pub const SEARCH_WORDS_MAX: usize = 8;

/// Bytes of a found ticket's answer that the model gets to see; more is cut.
pub const SEARCH_EXCERPT_BYTES_MAX: usize = 600;

/// Entries of a thread that are kept with an issue; the oldest are forgotten.
pub const THREAD_ENTRIES_MAX: usize = 400;

/// Bytes of a thread that are kept with an issue; the oldest entries are forgotten.
pub const THREAD_BYTES_MAX: usize = 512 * 1024;

/// Bytes of a thread that go into a prompt; older entries are left out, and the prompt says how many.
pub const PROMPT_THREAD_BYTES_MAX: usize = 96 * 1024;

/// Bytes of one text in a prompt; the rest of it is cut, and the prompt says so.
pub const PROMPT_TEXT_BYTES_MAX: usize = 24 * 1024;

/// Bytes of a reply; a longer one is cut. GitHub takes 65536 characters, and escaping makes some longer.
pub const REPLY_BYTES_MAX: usize = 48 * 1024;

/// Bytes of a comment as it is sent to GitHub or GitLab, escaped and marked.
pub const COMMENT_BYTES_MAX: usize = 64 * 1024;

/// Pages of comments since a reply was committed that are searched for it; with more, the reply is not posted.
pub const COMMENT_PAGES_MAX: usize = 100;

/// Bytes of one page of existing comments.
pub const COMMENT_PAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Bytes of the `data` of one entry of `ticket_events`.
pub const ENTRY_BYTES_MAX: usize = 256 * 1024;

/// Entries that `ticket_events` keeps once everybody has read them.
pub const TICKET_EVENTS_KEPT: u64 = 10_000;

/// How long ids of handled messages are kept in the stream backend.
pub const PROCESSED_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// How long the stream backend remembers which events were appended: longer than the outbox goes on trying.
pub const APPENDED_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// Listeners to server-sent events of tickets in one process.
pub const LISTENERS_MAX: usize = 1000;

/// The longest that a model's server can put us off; what it says beyond that is taken for this.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(60 * 60);

// A message becomes an event with a little around it; every byte of text may need six in JSON.
const _: () = assert!(CONTENT_BYTES_MAX * 6 + 4096 <= headwater_issue::limits::PAYLOAD_BYTES_MAX);
const _: () = assert!(THREAD_BYTES_MAX <= headwater_issue::limits::PAYLOAD_BYTES_MAX);
const _: () = assert!(PROMPT_TEXT_BYTES_MAX <= PROMPT_THREAD_BYTES_MAX);
const _: () = assert!(REPLY_BYTES_MAX < COMMENT_BYTES_MAX);
const _: () = assert!(PAGE_DEFAULT <= PAGE_MAX);
