-- Runs that have ended. The run in progress is in `issues`: claim_epoch, claim_owner and processing_started_at. So a run costs one
-- row, written with its end. `history` deletes runs with their issue.
CREATE TABLE issue_runs (
    issue_id INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    worker TEXT NOT NULL,
    claimed_at INTEGER NOT NULL,
    ended_at INTEGER NOT NULL,
    -- done, failed, deferred, quarantined, superseded, released, expired, or fenced: expired, and its result came later and was
    -- discarded. A quarantined run without an error had expired.
    result TEXT NOT NULL,
    error TEXT,
    -- Event logs that it marked as processed; their processed_at is ended_at.
    events INTEGER NOT NULL,
    PRIMARY KEY (issue_id, epoch)
) STRICT, WITHOUT ROWID;
