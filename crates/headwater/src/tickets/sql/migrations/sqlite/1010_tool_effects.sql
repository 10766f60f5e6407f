-- The effect ledger: calls of tools that change something, or that a person has to approve.
CREATE TABLE tool_effects (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    -- The idempotency key, the same for every attempt.
    effect_key TEXT NOT NULL UNIQUE,
    issue_id INTEGER NOT NULL,
    integration TEXT NOT NULL,
    -- The oldest event log without an answer when the call was asked for.
    request INTEGER NOT NULL,
    tool TEXT NOT NULL,
    -- JSON.
    arguments TEXT NOT NULL,
    -- SHA-256 of tool and arguments. A request calls a tool once with the same arguments.
    digest TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('approved', 'started', 'done', 'failed', 'rejected', 'unknown')),
    attempts INTEGER NOT NULL DEFAULT 0,
    -- Epoch of the claim under which the last attempt began.
    epoch INTEGER,
    -- Until when the last attempt may be in progress, in milliseconds since 1970.
    lease_until INTEGER,
    -- What the model is told, as JSON.
    result TEXT,
    problem TEXT,
    -- The draft that named the call, and who decided about it.
    draft INTEGER,
    decided_by TEXT,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    ended_at INTEGER,
    UNIQUE (issue_id, request, digest)
) STRICT;

CREATE INDEX idx_tool_effects_open ON tool_effects (issue_id) WHERE status IN ('approved', 'started');

-- Calls that are made when the draft is approved, as JSON: [{"tool": ..., "arguments": ..., "request": ...}]; NULL if none.
ALTER TABLE drafts ADD COLUMN calls TEXT;
