-- Since when a ticket is handed over, in milliseconds since 1970 of the database, and why; NULL if it is not, or unknown.
ALTER TABLE tickets ADD COLUMN handed_over_at INTEGER;
ALTER TABLE tickets ADD COLUMN hand_over_reason TEXT;
-- The person who answers a ticket that is handed over; NULL if nobody has taken it.
ALTER TABLE tickets ADD COLUMN assignee TEXT;

UPDATE tickets SET handed_over_at = updated_at WHERE handed_over;

CREATE INDEX idx_tickets_handed_over ON tickets (number) WHERE handed_over;
