-- The budget of the day of all strangers; empty if the author is not a stranger.
ALTER TABLE desk_reservations ADD COLUMN strangers_scope TEXT NOT NULL DEFAULT '';

-- The same table with one more kind of budget.
CREATE TABLE budget_waits_new (
    issue_id INTEGER PRIMARY KEY,
    -- day: of the integration, user: of the author, strangers: of all strangers of the integration.
    budget TEXT NOT NULL CHECK (budget IN ('day', 'user', 'strangers')),
    tokens_max INTEGER NOT NULL,
    -- The day ends: the issue continues without a release.
    until_at INTEGER NOT NULL
) STRICT;
INSERT INTO budget_waits_new (issue_id, budget, tokens_max, until_at)
SELECT issue_id, budget, tokens_max, until_at FROM budget_waits;
DROP TABLE budget_waits;
ALTER TABLE budget_waits_new RENAME TO budget_waits;

-- Id of the entry of `ticket_events` that a message was imported from, in sortable form; NULL for other messages.
ALTER TABLE ticket_messages ADD COLUMN entry TEXT;
-- Id of the event of this program that decided the status last; NULL when its entry of `ticket_events` was read back.
ALTER TABLE tickets ADD COLUMN status_event TEXT;
