-- Times are milliseconds since 1970 by the clock of the machine that holds the file.

CREATE TABLE integrations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    provider TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE issues (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    integration_id INTEGER NOT NULL REFERENCES integrations (id),
    external_project_id TEXT NOT NULL,
    external_issue_id TEXT NOT NULL,
    processing_status TEXT NOT NULL DEFAULT 'idle'
        CONSTRAINT chk_issues_processing_status
        CHECK (processing_status IN ('idle', 'queued', 'processing')),
    processing_started_at INTEGER,
    last_processed_at INTEGER,
    discussions TEXT NOT NULL DEFAULT '[]',
    fields TEXT NOT NULL DEFAULT '{}',
    pending_events INTEGER NOT NULL DEFAULT 0 CHECK (pending_events >= 0),
    claim_epoch INTEGER NOT NULL DEFAULT 0,
    completed_epoch INTEGER NOT NULL DEFAULT 0,
    claim_owner TEXT,
    claim_expires_at INTEGER,
    not_before INTEGER,
    first_pending_at INTEGER,
    attempts INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0,
    superseded INTEGER NOT NULL DEFAULT 0,
    quarantined_at INTEGER,
    last_error TEXT,
    nudged_at INTEGER,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    -- Newest event log when the last run completed. Ids and not times, because the clock may be set back.
    completed_event_log_id INTEGER,
    UNIQUE (integration_id, external_project_id, external_issue_id)
) STRICT;

CREATE INDEX idx_issues_status_id ON issues (processing_status, id) WHERE processing_status != 'idle';
CREATE INDEX idx_issues_nudge_since ON issues (max(coalesce(nudged_at, 0), coalesce(not_before, 0)))
    WHERE processing_status = 'queued';
CREATE INDEX idx_issues_quarantined ON issues (id) WHERE quarantined_at IS NOT NULL;

CREATE TABLE event_logs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    issue_id INTEGER NOT NULL REFERENCES issues (id),
    integration_id INTEGER NOT NULL REFERENCES integrations (id),
    source TEXT NOT NULL,
    event_type TEXT NOT NULL,
    dedup_key TEXT NOT NULL,
    digest BLOB NOT NULL,
    payload TEXT NOT NULL,
    payload_bytes INTEGER NOT NULL,
    processed_at INTEGER,
    processing_error TEXT,
    -- W3C `traceparent` of the request or message that brought the event.
    trace TEXT,
    created_at INTEGER NOT NULL,
    UNIQUE (integration_id, dedup_key)
) STRICT;

CREATE INDEX idx_event_logs_issue_id ON event_logs (issue_id, id);
CREATE INDEX idx_event_logs_unprocessed ON event_logs (issue_id, id) WHERE processed_at IS NULL;

-- Payloads as received, of event logs whose `payload` differs.
CREATE TABLE event_log_originals (
    event_log_id INTEGER PRIMARY KEY REFERENCES event_logs (id) ON DELETE CASCADE,
    body BLOB NOT NULL
) STRICT;

CREATE TABLE outbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    issue_id INTEGER NOT NULL REFERENCES issues (id),
    kind TEXT NOT NULL CHECK (kind IN ('reply', 'event')),
    target TEXT NOT NULL,
    idempotency_key TEXT NOT NULL UNIQUE,
    payload TEXT NOT NULL,
    status TEXT NOT NULL
        CHECK (status IN ('waiting', 'pending', 'taken', 'delivered', 'dead')),
    deliveries INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0,
    due_at INTEGER NOT NULL,
    taken_by TEXT,
    last_error TEXT,
    created_at INTEGER NOT NULL,
    delivered_at INTEGER,
    -- Newest event log of the issue when the row was written; a reply with newer events is stale.
    newest_event_log_id INTEGER,
    integration_id INTEGER NOT NULL
) STRICT;

-- At most one row per issue and kind is pending or taken; later rows wait, and settling a row makes the next one
-- pending. Scans for due rows therefore never read rows that cannot be delivered yet. While a row is taken, due_at is
-- the end of the lease.
CREATE INDEX idx_outbox_due ON outbox (due_at, id) WHERE status IN ('pending', 'taken');
CREATE INDEX idx_outbox_order ON outbox (issue_id, kind, id) WHERE status IN ('waiting', 'pending', 'taken');
CREATE INDEX idx_outbox_target ON outbox (integration_id, kind, target, due_at, id)
    WHERE status IN ('pending', 'taken');
-- Deleting an issue finds its rows.
CREATE INDEX idx_outbox_issue ON outbox (issue_id);
CREATE INDEX idx_outbox_dead ON outbox (id) WHERE status = 'dead';
CREATE INDEX idx_outbox_delivered_at ON outbox (delivered_at) WHERE status = 'delivered';

-- Quarantines, open and released.
CREATE TABLE dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    issue_id INTEGER NOT NULL REFERENCES issues (id),
    error TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    crashes INTEGER NOT NULL,
    pending_events INTEGER NOT NULL,
    event_log_id INTEGER NOT NULL,
    quarantined_at INTEGER NOT NULL,
    released_at INTEGER
) STRICT;

CREATE INDEX idx_dead_letters_open ON dead_letters (issue_id) WHERE released_at IS NULL;
CREATE INDEX idx_dead_letters_released_at ON dead_letters (released_at) WHERE released_at IS NOT NULL;

CREATE TABLE workers (
    worker TEXT PRIMARY KEY,
    started_at INTEGER NOT NULL,
    seen_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT;

-- Prefix of idempotency keys, so that no other database, also one created anew, produces the same keys.
CREATE TABLE headwater_identity (identity TEXT NOT NULL) STRICT;
INSERT INTO headwater_identity VALUES (lower(hex(randomblob(8))));

-- Wall-clock time of the last check and the longest TTLs of any process. A process that reads an earlier time than seen_at
-- knows that the clock was set back.
CREATE TABLE headwater_clock (
    seen_at INTEGER NOT NULL,
    claim_ttl_ms INTEGER NOT NULL DEFAULT 0,
    outbox_ttl_ms INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO headwater_clock (seen_at) VALUES (0);
