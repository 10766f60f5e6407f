-- When a draft was found to wait longer than `desk.draft_max_wait`, in milliseconds since 1970 of the database.
ALTER TABLE drafts ADD COLUMN overdue_at bigint;

-- For the drafts that wait, oldest first.
CREATE INDEX idx_drafts_waiting ON drafts (created_at) WHERE status = 'pending' AND overdue_at IS NULL;
