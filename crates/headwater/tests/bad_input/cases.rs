//! The routes with the access that each requires and a valid body.

use serde_json::{Value, json};

/// Who may call a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequiredAccess {
    /// Everyone.
    Nothing,
    /// A signed request of an integration, see `tests/webhooks.rs`.
    Signature,
    Read,
    Write,
    Admin,
}

/// A valid body; each text in it is replaced by hostile ones.
pub(crate) type Body = Option<fn() -> Value>;

use RequiredAccess::{Admin, Nothing, Read, Signature, Write};

/// One or more cases for every route.
pub(crate) const CASES: &[(&str, RequiredAccess, Body)] = &[
    ("get /metrics", Read, None),
    ("get /openapi.json", Read, None),
    ("get /health", Nothing, None),
    ("get /health/live", Nothing, None),
    ("get /health/ready", Nothing, None),
    ("post /webhooks/{provider}/{integration}", Signature, Some(|| json!({"zen": "x"}))),
    ("get /api/v1/analytics", Read, None),
    ("post /api/v1/analytics/rebuild", Admin, None),
    ("get /api/v1/reports", Read, None),
    ("get /api/v1/reports/{name}", Read, None),
    ("get /api/v1/sql", Read, None),
    ("get /api/v1/audit", Admin, None),
    ("get /api/v1/audit/books", Read, None),
    ("get /api/v1/doctor", Admin, None),
    ("get /api/v1/status", Read, None),
    ("get /api/v1/me", Read, None),
    ("get /api/v1/overview", Read, None),
    ("get /api/v1/history", Read, None),
    ("get /api/v1/failures", Read, None),
    ("get /api/v1/failures/{id}", Read, None),
    ("get /api/v1/search", Read, None),
    ("get /api/v1/processes", Read, None),
    ("get /api/v1/settings", Admin, None),
    ("get /api/v1/webhooks", Read, None),
    ("get /api/v1/drafts", Read, None),
    ("get /api/v1/drafts/{id}", Read, None),
    ("get /api/v1/drafts/{id}/link", Write, None),
    ("post /api/v1/drafts/{id}/approve", Write, Some(|| json!({"content": "c", "version": 1}))),
    ("post /api/v1/drafts/{id}/edit", Write, Some(|| json!({"content": "c", "version": 1}))),
    ("post /api/v1/drafts/{id}/reject", Write, Some(|| json!({"reason": "r", "version": 1}))),
    ("get /api/v1/effects", Read, None),
    ("get /api/v1/effects/{id}", Read, None),
    ("get /api/v1/plans", Read, None),
    ("get /api/v1/plans/{id}", Read, None),
    ("post /api/v1/plans", Write, Some(|| json!({"failure": "f", "dry_run": true}))),
    (
        "post /api/v1/plans",
        Write,
        Some(
            || json!({"topics": ["a"], "reason": "r", "key": "k", "from": "2026-01-01T00:00:00Z", "to": "2026-01-02T00:00:00Z"}),
        ),
    ),
    ("post /api/v1/plans/{id}/pause", Write, None),
    ("post /api/v1/plans/{id}/resume", Write, None),
    ("post /api/v1/plans/{id}/cancel", Write, None),
    ("get /api/v1/prompts", Read, None),
    ("get /api/v1/prompts/{integration}", Read, None),
    ("get /api/v1/prompts/{integration}/versions", Read, None),
    ("get /api/v1/prompts/{integration}/diff", Read, None),
    ("post /api/v1/prompts/{integration}", Admin, Some(|| json!({"content": "c", "comment": "d"}))),
    ("post /api/v1/prompts/{integration}/rollback", Admin, Some(|| json!({"version": 0}))),
    ("get /api/v1/assignments/{service}", Read, None),
    ("get /api/v1/assignments/{service}/streams", Read, None),
    (
        "post /api/v1/assignments/{service}/streams",
        Write,
        Some(|| json!({"stream": "s", "info": {"a": "b"}})),
    ),
    ("get /api/v1/assignments/{service}/streams/{stream}", Read, None),
    ("post /api/v1/assignments/{service}/streams/{stream}/release", Admin, None),
    ("get /api/v1/event-logs/{id}", Read, None),
    ("get /api/v1/event-logs/{id}/original", Read, None),
    ("get /api/v1/issues", Read, None),
    ("get /api/v1/issues/{id}", Read, None),
    ("get /api/v1/issues/{id}/events", Read, None),
    ("get /api/v1/issues/{id}/events/{event}/original", Read, None),
    ("get /api/v1/issues/{id}/why", Read, None),
    ("get /api/v1/issues/{id}/timeline", Read, None),
    ("post /api/v1/issues/{id}/retry", Write, None),
    (
        "post /api/v1/issues/retry",
        Write,
        Some(|| json!({"integration": "i", "error": "e", "waiting": true, "cursor": 1})),
    ),
    ("post /api/v1/issues/{id}/release", Write, None),
    (
        "post /api/v1/issues/release",
        Write,
        Some(|| json!({"integration": "i", "error": "e", "cursor": 1})),
    ),
    ("get /api/v1/outbox", Read, None),
    ("get /api/v1/outbox/dead", Read, None),
    ("get /api/v1/outbox/{id}", Read, None),
    ("get /api/v1/outbox/{id}/why", Read, None),
    ("post /api/v1/outbox/{id}/retry", Write, None),
    ("post /api/v1/outbox/retry", Write, Some(|| json!({"integration": "i", "cursor": 1}))),
    ("get /api/v1/sessions", Read, None),
    ("get /api/v1/sessions/{session}", Read, None),
    ("get /api/v1/sessions/{session}/events", Read, None),
    ("get /api/v1/sessions/{session}/diff", Read, None),
    ("get /api/v1/sessions/{session}/export", Read, None),
    ("get /api/v1/sessions/{session}/replay", Read, None),
    (
        "post /api/v1/sessions/{session}/fork",
        Write,
        Some(|| json!({"session": "a", "until": "1-0"})),
    ),
    ("post /api/v1/sessions/{session}/import", Write, Some(|| json!({"session": "a"}))),
    ("get /api/v1/export", Admin, None),
    ("post /api/v1/erase", Admin, Some(|| json!({"user": "u", "cursor": 1}))),
    ("get /api/v1/tickets", Read, None),
    ("post /api/v1/tickets", Write, Some(new_ticket)),
    ("get /api/v1/tickets/{id}", Read, None),
    ("get /api/v1/tickets/{id}/events", Read, None),
    ("get /api/v1/tickets/{id}/messages", Read, None),
    ("post /api/v1/tickets/{id}/messages", Write, Some(new_message)),
    ("post /api/v1/tickets/{id}/close", Write, None),
    ("post /api/v1/tickets/{id}/reopen", Write, None),
    ("post /api/v1/tickets/{id}/take", Write, None),
    ("post /api/v1/tickets/{id}/assign", Write, Some(|| json!({"assignee": "a"}))),
    ("post /api/v1/tickets/{id}/unassign", Write, None),
    ("get /api/v1/tickets/{id}/why", Read, None),
    ("get /api/v1/topics", Read, None),
    (
        "post /api/v1/topics",
        Admin,
        Some(|| json!({"name": "a", "partitions": 1, "entry_format": "compact"})),
    ),
    ("get /api/v1/topics/{topic}", Read, None),
    ("delete /api/v1/topics/{topic}", Admin, None),
    (
        "post /api/v1/topics/{topic}/alter",
        Admin,
        Some(|| json!({"retention_count": 1, "entry_format": "full"})),
    ),
    ("post /api/v1/topics/{topic}/grow", Admin, Some(|| json!({"partitions": 2}))),
    ("post /api/v1/topics/{topic}/trim", Admin, Some(|| json!({"count": 1}))),
    ("get /api/v1/topics/{topic}/messages", Read, None),
    ("get /api/v1/topics/{topic}/messages/{id}", Read, None),
    ("get /api/v1/topics/{topic}/messages/{id}/why", Read, None),
    ("post /api/v1/topics/{topic}/messages", Write, Some(produce)),
    (
        "post /api/v1/topics/{topic}/messages",
        Write,
        Some(|| json!({"messages": [{"payload_base64": "cA=="}]})),
    ),
    ("get /api/v1/topics/{topic}/delayed", Read, None),
    ("get /api/v1/topics/{topic}/tail", Read, None),
    ("get /api/v1/topics/{topic}/dead-letters", Read, None),
    ("get /api/v1/topics/{topic}/dead-letters/{id}", Read, None),
    ("post /api/v1/topics/{topic}/dead-letters/replay", Write, Some(letters)),
    ("post /api/v1/topics/{topic}/dead-letters/purge", Admin, Some(letters)),
    ("post /api/v1/topics/{topic}/dead-letters/replay", Write, Some(letters_by_id)),
    ("post /api/v1/topics/{topic}/dead-letters/purge", Admin, Some(letters_by_id)),
    (
        "post /api/v1/topics/{topic}/dead-letters/{id}/replay",
        Write,
        Some(|| json!({"payload": "p"})),
    ),
    (
        "post /api/v1/topics/{topic}/dead-letters/{id}/replay",
        Write,
        Some(|| json!({"payload_base64": "cA=="})),
    ),
    ("get /api/v1/topics/{topic}/groups", Read, None),
    ("delete /api/v1/topics/{topic}/groups/{group}", Admin, None),
    ("get /api/v1/topics/{topic}/groups/{group}", Read, None),
    ("get /api/v1/topics/{topic}/groups/{group}/pending", Read, None),
    ("get /api/v1/topics/{topic}/groups/{group}/why", Read, None),
    ("get /api/v1/assignment", Read, None),
    ("get /api/v1/assignment/moves", Read, None),
    ("post /api/v1/topics/{topic}/groups/{group}/reset", Admin, Some(|| json!({"to": "end"}))),
    ("post /api/v1/topics/{topic}/groups/{group}/pull", Write, Some(|| json!({"wait_ms": 0}))),
    ("post /api/v1/topics/{topic}/groups/{group}/settle", Write, Some(settle)),
    ("post /api/v1/topics/{topic}/groups/{group}/extend", Write, Some(extend)),
];

fn new_ticket() -> Value {
    json!({"title": "t", "content": "c", "user_id": "u", "message_id": "0190b6d7-0000-7000-8000-000000000001"})
}

fn new_message() -> Value {
    let message_id = "0190b6d7-0000-7000-8000-000000000002";
    json!({"content": "c", "author": "agent", "agent": "a", "message_id": message_id})
}

fn produce() -> Value {
    let message = json!({"key": "k", "payload": "p", "headers": {"h": "v"}, "id": "i"});
    json!({"messages": [message], "partitioner": "hash"})
}

fn letters() -> Value {
    json!({"from": "1-0", "to": "2-0", "key": "k", "reason": "r"})
}

fn letters_by_id() -> Value {
    json!({"ids": ["1-0"]})
}

/// The lease `0/1-0/pull:30000:0:x`.
const LEASE: &str = "MC8xLTAvcHVsbDozMDAwMDowOng";

fn extend() -> Value {
    json!({"leases": [LEASE]})
}

fn settle() -> Value {
    json!({"settlements": [{"lease": LEASE, "outcome": "retry", "reason": "r"}]})
}
