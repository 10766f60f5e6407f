CREATE TABLE audit_log (
    id text COLLATE "C" PRIMARY KEY,
    at timestamptz NOT NULL,
    caller text NOT NULL,
    role text NOT NULL,
    client text NOT NULL,
    method text NOT NULL,
    path text NOT NULL,
    status bigint
);
