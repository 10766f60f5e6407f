CREATE TABLE tickets (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    ticket_id TEXT NOT NULL UNIQUE,
    issue_id INTEGER NOT NULL UNIQUE REFERENCES issues (id),
    title TEXT NOT NULL,
    user_id TEXT,
    status TEXT NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'closed')),
    handed_over INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
);

CREATE INDEX idx_tickets_user ON tickets (user_id, number) WHERE user_id IS NOT NULL;
CREATE INDEX idx_tickets_status ON tickets (status, number);

CREATE TABLE ticket_messages (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    message_id TEXT NOT NULL UNIQUE,
    ticket_id TEXT NOT NULL REFERENCES tickets (ticket_id),
    author TEXT NOT NULL CHECK (author IN ('user', 'assistant', 'agent')),
    content TEXT NOT NULL,
    created_at INTEGER NOT NULL
);

CREATE INDEX idx_ticket_messages_ticket ON ticket_messages (ticket_id, seq);

CREATE TABLE desk_usage (
    scope TEXT PRIMARY KEY,
    tokens INTEGER NOT NULL CHECK (tokens >= 0)
);
