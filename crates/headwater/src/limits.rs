//! Hard limits of the desk and its integrations.
//!
//! Checked by `tickets`, `inbound`, `desk` and `outbound`. Input over a limit is rejected before it has any effect,
//! unless the constant says that it is truncated.

use std::time::Duration;

/// Maximum bytes of the text of one ticket message.
pub const CONTENT_BYTES_MAX: usize = 64 * 1024;

/// Maximum bytes of a ticket title.
pub const TITLE_BYTES_MAX: usize = 500;

/// Maximum bytes of a user id.
pub const USER_ID_BYTES_MAX: usize = 128;

/// Maximum number of tickets or messages on one page.
pub const PAGE_MAX: usize = 200;

/// Default number of tickets or messages on one page.
pub const PAGE_DEFAULT: usize = 50;

/// Maximum bytes of one model response, all chunks together; a longer response is an error.
pub const ANSWER_BYTES_MAX: usize = 256 * 1024;

/// Maximum bytes that a model server may send for one response, protocol overhead included.
pub const RESPONSE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Maximum bytes of one streamed line of a model server.
pub const LINE_BYTES_MAX: usize = 512 * 1024;

/// Maximum bytes of an error response that are read and kept.
pub const ERROR_BODY_BYTES_MAX: usize = 4 * 1024;

/// Maximum tool calls in one model response; more is an error.
pub const TOOL_CALLS_MAX: usize = 8;

/// Maximum bytes of the arguments of one tool call.
pub const TOOL_ARGUMENTS_BYTES_MAX: usize = 16 * 1024;

/// Maximum rounds of tool calls in one run; the next model call offers no tools.
pub const TOOL_ROUNDS_MAX: usize = 4;

/// Maximum bytes of a reason or query in a tool call; longer text is truncated.
pub const TOOL_TEXT_BYTES_MAX: usize = 1024;

/// Maximum number of tools beside the built-in ones.
pub const TOOLS_MAX: usize = 64;

/// Maximum bytes of the description of a tool.
pub const TOOL_DESCRIPTION_BYTES_MAX: usize = 2000;

/// Maximum bytes of the JSON Schema of a tool.
pub const TOOL_SCHEMA_BYTES_MAX: usize = 16 * 1024;

/// Limits and default of the time of one tool call.
pub const TOOL_TIMEOUT_MIN: Duration = Duration::from_millis(100);
/// See [`TOOL_TIMEOUT_MIN`].
pub const TOOL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
/// See [`TOOL_TIMEOUT_MIN`].
pub const TOOL_TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// Default of the maximum bytes of a response of an HTTP tool.
pub const TOOL_RESPONSE_BYTES_DEFAULT: usize = 16 * 1024;

/// Largest possible maximum of the bytes of a response of an HTTP tool.
pub const TOOL_RESPONSE_BYTES_MAX: usize = 64 * 1024;

/// Maximum redirects that a call of an HTTP tool follows.
pub const TOOL_REDIRECTS_MAX: usize = 3;

/// Effects of one issue that one run reads from the ledger, the newest.
pub const EFFECTS_PER_ISSUE_MAX: usize = 200;

/// How long a call without a known outcome is repeated or looked up before a person has to.
pub const EFFECT_RESOLVE_FOR: Duration = Duration::from_secs(60 * 60);

/// Maximum tickets returned by one search.
pub const SEARCH_RESULTS_MAX: usize = 5;

/// Maximum words of a query that are searched for.
pub const SEARCH_WORDS_MAX: usize = 8;

/// Maximum bytes of a found ticket's reply that the model sees; longer text is truncated.
pub const SEARCH_EXCERPT_BYTES_MAX: usize = 600;

/// Maximum entries of a conversation stored with an issue; the oldest are dropped.
pub const THREAD_ENTRIES_MAX: usize = 400;

/// Maximum bytes of a conversation stored with an issue; the oldest entries are dropped.
pub const THREAD_BYTES_MAX: usize = 512 * 1024;

/// Maximum number of values that one run replaces by placeholders and restores.
pub const REDACTED_VALUES_MAX: usize = 10_000;

/// Maximum number of `[[redaction]]` sections.
pub const REDACTION_PATTERNS_MAX: usize = 32;

/// Maximum bytes of the pattern of a `[[redaction]]`.
pub const REDACTION_PATTERN_BYTES_MAX: usize = 1000;

/// Maximum bytes of an answer that listeners see while it is being written; the message that follows is complete.
pub const PROVISIONAL_BYTES_MAX: usize = 16 * 1024;

/// Maximum bytes of a conversation in a prompt; older entries are left out, and the prompt says how many.
pub const PROMPT_THREAD_BYTES_MAX: usize = 96 * 1024;

/// A prompt that is too long for the model is shortened, its conversation at most to this many bytes.
pub const PROMPT_THREAD_BYTES_MIN: usize = 6 * 1024;

/// How many times the limit of output tokens is raised in one run for an answer that reaches it.
pub const OUTPUT_LIMIT_RAISES_MAX: u32 = 2;

/// Maximum bytes of one text in a prompt; longer text is truncated, and the prompt says so.
pub const PROMPT_TEXT_BYTES_MAX: usize = 24 * 1024;

/// Maximum bytes of the prompt of an integration.
pub const PROMPT_TEMPLATE_BYTES_MAX: usize = 16 * 1024;

/// Maximum lines of the prompt of an integration.
pub const PROMPT_TEMPLATE_LINES_MAX: usize = 500;

/// Versions of a prompt that are kept for each integration; the oldest ones that are not active are removed.
pub const PROMPT_VERSIONS_KEPT: i64 = 200;

/// Maximum bytes of the comment of a prompt version.
pub const PROMPT_COMMENT_BYTES_MAX: usize = 500;

/// Maximum bytes of a reply; a longer one is truncated. GitHub allows 65536 characters, and escaping lengthens the
/// text.
pub const REPLY_BYTES_MAX: usize = 48 * 1024;

/// Maximum bytes of a comment sent to GitHub or GitLab, after escaping and with its marker.
pub const COMMENT_BYTES_MAX: usize = 64 * 1024;

/// Maximum bytes of a response to a reply that a provider of an embedding program delivers.
pub const PROVIDER_RESPONSE_BYTES_MAX: usize = 1024 * 1024;

/// Maximum pages of comments, since the reply was committed, that are searched for it. With more, the reply is not
/// posted.
pub const COMMENT_PAGES_MAX: usize = 100;

/// Maximum bytes of one page of existing comments.
pub const COMMENT_PAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Maximum bytes of the `data` field of a `ticket_events` entry.
pub const ENTRY_BYTES_MAX: usize = 256 * 1024;

/// Number of `ticket_events` entries kept after all groups have read them.
pub const TICKET_EVENTS_KEPT: u64 = 10_000;

/// How long the ids of handled messages are kept in the stream backend.
pub const PROCESSED_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// How long the stream backend remembers appended event ids: longer than the outbox retries.
pub const APPENDED_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// Maximum number of open server-sent event streams of tickets in one process.
pub const LISTENERS_MAX: usize = 1000;

/// Maximum `Retry-After` accepted from a model server; a longer one is shortened to this.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(60 * 60);

// A message becomes an event with some fields added; JSON escaping may need six bytes per byte of text.
const _: () = assert!(CONTENT_BYTES_MAX * 6 + 4096 <= headwater_issue::limits::PAYLOAD_BYTES_MAX);
const _: () = assert!(THREAD_BYTES_MAX <= headwater_issue::limits::PAYLOAD_BYTES_MAX);
const _: () = assert!(PROMPT_TEXT_BYTES_MAX <= PROMPT_THREAD_BYTES_MAX);
const _: () = assert!(REPLY_BYTES_MAX < COMMENT_BYTES_MAX);
const _: () = assert!(PAGE_DEFAULT <= PAGE_MAX);
