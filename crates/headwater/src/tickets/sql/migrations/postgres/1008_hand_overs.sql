-- Since when a ticket is handed over, in milliseconds since 1970 of the database, and why; NULL if it is not, or unknown.
ALTER TABLE tickets ADD COLUMN handed_over_at bigint;
ALTER TABLE tickets ADD COLUMN hand_over_reason text;
-- The person who answers a ticket that is handed over; NULL if nobody has taken it.
ALTER TABLE tickets ADD COLUMN assignee text COLLATE "C";

UPDATE tickets SET handed_over_at = (extract(epoch FROM updated_at) * 1000)::bigint WHERE handed_over;

CREATE INDEX idx_tickets_handed_over ON tickets (number) WHERE handed_over;
