-- Payloads as they were received, of event logs whose `payload` does not say the same.
CREATE TABLE event_log_originals (
    event_log_id INTEGER PRIMARY KEY REFERENCES event_logs (id) ON DELETE CASCADE,
    body BLOB NOT NULL
) STRICT;

-- The integration of each row that is not delivered, so that the rows of one target are found without reading those of
-- others.
ALTER TABLE outbox ADD COLUMN integration_id INTEGER;
UPDATE outbox SET integration_id = (SELECT integration_id FROM issues WHERE issues.id = outbox.issue_id)
    WHERE status <> 'delivered';
CREATE TRIGGER outbox_integration AFTER INSERT ON outbox WHEN NEW.integration_id IS NULL
BEGIN
    UPDATE outbox SET integration_id = (SELECT integration_id FROM issues WHERE issues.id = NEW.issue_id)
    WHERE id = NEW.id;
END;

CREATE INDEX idx_outbox_target ON outbox (integration_id, kind, target, due_at, id) WHERE status IN ('pending', 'taken');
