-- The first of these files had one order for all rows of an issue; now replies and events each have their own. What waited
-- behind a row of the other kind would wait for ever: only the end of a row of its own kind lets it go.
DROP INDEX IF EXISTS idx_outbox_order;
CREATE INDEX idx_outbox_order ON outbox (issue_id, kind, id) WHERE status IN ('waiting', 'pending', 'taken');
CREATE INDEX IF NOT EXISTS idx_outbox_delivered_at ON outbox (delivered_at) WHERE status = 'delivered';

UPDATE outbox SET status = 'pending' WHERE id IN (
    SELECT min(id) FROM outbox WHERE status IN ('waiting', 'pending', 'taken') GROUP BY issue_id, kind
    HAVING max(status IN ('pending', 'taken')) = 0);
