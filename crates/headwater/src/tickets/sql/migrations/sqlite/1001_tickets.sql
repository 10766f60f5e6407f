CREATE TABLE tickets (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    ticket_id TEXT NOT NULL UNIQUE,
    issue_id INTEGER NOT NULL UNIQUE REFERENCES issues (id),
    title TEXT NOT NULL,
    user_id TEXT,
    status TEXT NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'closed')),
    handed_over INTEGER NOT NULL DEFAULT 0,
    -- Id of the entry of `ticket_events` that decided the status, in sortable form; NULL if no entry did.
    status_entry TEXT,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT;

CREATE INDEX idx_tickets_user ON tickets (user_id, number) WHERE user_id IS NOT NULL;
CREATE INDEX idx_tickets_status ON tickets (status, number);

CREATE TABLE ticket_messages (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    message_id TEXT NOT NULL UNIQUE,
    ticket_id TEXT NOT NULL REFERENCES tickets (ticket_id),
    author TEXT NOT NULL CHECK (author IN ('user', 'assistant', 'agent')),
    content TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    -- What an answer cost, as JSON: events, tokens_in, tokens_out, cost. NULL for messages of people.
    run TEXT
) STRICT;

CREATE INDEX idx_ticket_messages_ticket ON ticket_messages (ticket_id, seq);

CREATE TABLE desk_usage (
    scope TEXT PRIMARY KEY,
    tokens INTEGER NOT NULL CHECK (tokens >= 0)
) STRICT;

-- Token reservations, one row each, so that runs do not wait for each other's rows. The used budget of a scope is the sum in
-- `desk_usage` plus its rows here that are not rolled up. Times are milliseconds since 1970.
CREATE TABLE desk_reservations (
    id TEXT PRIMARY KEY,
    issue_id INTEGER NOT NULL,
    -- The budgets of the day: of the integration, and of the author (empty if unknown).
    day_scope TEXT NOT NULL,
    user_scope TEXT NOT NULL,
    -- Reserved tokens; after settling, used tokens.
    tokens INTEGER NOT NULL CHECK (tokens >= 0),
    -- Tokens that count if the reservation expires without being settled.
    tokens_if_lost INTEGER NOT NULL CHECK (tokens_if_lost >= 0),
    expires_at INTEGER NOT NULL,
    settled_at INTEGER,
    -- Whether `desk_usage` includes it. The row is kept for a while, so that a repeated settlement counts once.
    rolled_up INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE INDEX idx_desk_reservations_issue ON desk_reservations (issue_id) WHERE NOT rolled_up;
CREATE INDEX idx_desk_reservations_day ON desk_reservations (day_scope) WHERE NOT rolled_up;
CREATE INDEX idx_desk_reservations_expired ON desk_reservations (expires_at) WHERE rolled_up;
