-- Runs that have ended. The run in progress is in `issues`: claim_epoch, claim_owner and processing_started_at. So a run costs one
-- row, written with its end, and one index. No foreign key, because it would cost a lookup per run; `history` deletes runs with
-- their issue.
CREATE TABLE issue_runs (
    issue_id bigint NOT NULL,
    epoch bigint NOT NULL,
    worker text NOT NULL,
    claimed_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL,
    -- done, failed, deferred, quarantined, superseded, released, expired, or fenced: expired, and its result came later and was
    -- discarded. A quarantined run without an error had expired.
    result text NOT NULL,
    error text,
    -- Event logs that it marked as processed; their processed_at is ended_at.
    events bigint NOT NULL,
    PRIMARY KEY (issue_id, epoch)
);
