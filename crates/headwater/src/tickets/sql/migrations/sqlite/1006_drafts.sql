-- Answers that wait for the approval of a person, the decisions about them, and internal notes. Times are milliseconds since
-- 1970, of the database.
CREATE TABLE drafts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    -- Id of the message that it becomes.
    draft_id TEXT NOT NULL UNIQUE,
    issue_id INTEGER NOT NULL,
    integration TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'approved', 'rejected', 'outdated', 'note')),
    -- The text of the model, that of a person instead of it, and the one that was posted.
    content TEXT NOT NULL,
    edited TEXT,
    posted TEXT,
    -- What else an approval does, as JSON: [{"target": ..., "reason": ...}].
    effects TEXT NOT NULL,
    session_id TEXT,
    -- What chose the mode: a rule, or the mode of the integration.
    chosen_by TEXT NOT NULL,
    -- What the run cost, as JSON.
    run TEXT,
    -- Newest event log that the run has seen. A newer one makes the draft outdated.
    up_to INTEGER NOT NULL,
    version INTEGER NOT NULL DEFAULT 1,
    created_at INTEGER NOT NULL,
    decided_at INTEGER,
    decided_by TEXT,
    decision_reason TEXT
) STRICT;

CREATE INDEX idx_drafts_issue ON drafts (issue_id);
CREATE INDEX idx_drafts_pending ON drafts (number) WHERE status = 'pending';
