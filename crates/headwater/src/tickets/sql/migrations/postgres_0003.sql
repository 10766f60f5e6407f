-- Reservations of tokens, one row each, so that no run waits for the row of another. A budget is what `desk_usage` has
-- summed up for its scope, plus its rows here that are not rolled up. Times are milliseconds since 1970.
CREATE TABLE desk_reservations (
    id text COLLATE "C" PRIMARY KEY,
    issue_id bigint NOT NULL,
    day bigint NOT NULL,
    -- What counts: the reserved tokens until it is settled, then the used ones.
    tokens bigint NOT NULL CHECK (tokens >= 0),
    -- What counts if it expires without being settled.
    tokens_if_lost bigint NOT NULL CHECK (tokens_if_lost >= 0),
    expires_at bigint NOT NULL,
    settled_at bigint,
    -- Whether `desk_usage` contains it. The row stays for a while, so that a settlement that is repeated counts once.
    rolled_up boolean NOT NULL DEFAULT false
);

CREATE INDEX idx_desk_reservations_issue ON desk_reservations (issue_id) WHERE NOT rolled_up;
CREATE INDEX idx_desk_reservations_day ON desk_reservations (day) WHERE NOT rolled_up;
CREATE INDEX idx_desk_reservations_expired ON desk_reservations (expires_at) WHERE rolled_up;
