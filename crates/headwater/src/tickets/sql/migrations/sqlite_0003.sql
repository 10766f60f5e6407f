-- Reservations of tokens, one row each, so that no run waits for the row of another. A budget is what `desk_usage` has
-- summed up for its scope, plus its rows here that are not rolled up.
CREATE TABLE desk_reservations (
    id TEXT PRIMARY KEY,
    issue_id INTEGER NOT NULL,
    day INTEGER NOT NULL,
    -- What counts: the reserved tokens until it is settled, then the used ones.
    tokens INTEGER NOT NULL CHECK (tokens >= 0),
    -- What counts if it expires without being settled.
    tokens_if_lost INTEGER NOT NULL CHECK (tokens_if_lost >= 0),
    expires_at INTEGER NOT NULL,
    settled_at INTEGER,
    -- Whether `desk_usage` contains it. The row stays for a while, so that a settlement that is repeated counts once.
    rolled_up INTEGER NOT NULL DEFAULT FALSE
);

CREATE INDEX idx_desk_reservations_issue ON desk_reservations (issue_id) WHERE NOT rolled_up;
CREATE INDEX idx_desk_reservations_day ON desk_reservations (day) WHERE NOT rolled_up;
CREATE INDEX idx_desk_reservations_expired ON desk_reservations (expires_at) WHERE rolled_up;
