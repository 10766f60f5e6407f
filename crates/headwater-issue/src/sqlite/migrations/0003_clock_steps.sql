-- Order follows ids and not times, since the clock may be set back: which event logs an issue had when a run was committed.
ALTER TABLE issues ADD COLUMN completed_event_log_id INTEGER;
ALTER TABLE outbox ADD COLUMN newest_event_log_id INTEGER;

-- What the clock showed when it was last looked at. A process that opens the file and finds it earlier knows that it was set back.
-- And for how long the process with the longest settings holds claims and rows of the outbox.
CREATE TABLE headwater_clock (
    seen_at INTEGER NOT NULL, claim_ttl_ms INTEGER NOT NULL DEFAULT 0, outbox_ttl_ms INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO headwater_clock (seen_at) VALUES (0);
