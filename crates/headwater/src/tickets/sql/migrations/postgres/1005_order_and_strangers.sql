-- The budget of the day of all strangers; empty if the author is not a stranger.
ALTER TABLE desk_reservations ADD COLUMN strangers_scope text NOT NULL DEFAULT '';

-- The same table with one more kind of budget.
CREATE TABLE budget_waits_new (
    issue_id bigint PRIMARY KEY,
    -- day: of the integration, user: of the author, strangers: of all strangers of the integration.
    budget text NOT NULL CHECK (budget IN ('day', 'user', 'strangers')),
    tokens_max bigint NOT NULL,
    -- The day ends: the issue continues without a release.
    until_at bigint NOT NULL
);
INSERT INTO budget_waits_new (issue_id, budget, tokens_max, until_at)
SELECT issue_id, budget, tokens_max, until_at FROM budget_waits;
DROP TABLE budget_waits;
ALTER TABLE budget_waits_new RENAME TO budget_waits;

-- Id of the entry of `ticket_events` that a message was imported from, in sortable form; NULL for other messages.
ALTER TABLE ticket_messages ADD COLUMN entry text;
-- Id of the event of this program that decided the status last; NULL when its entry of `ticket_events` was read back.
ALTER TABLE tickets ADD COLUMN status_event text;
