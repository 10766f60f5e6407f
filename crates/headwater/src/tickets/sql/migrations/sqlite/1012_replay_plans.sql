-- Replay plans: which dead letters are replayed, how far each plan is, and which process runs it. Times are milliseconds
-- since 1970, of the database.
CREATE TABLE replay_plans (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    state TEXT NOT NULL CHECK (state IN ('running', 'paused', 'stopped', 'cancelled', 'done')),
    -- Why it stopped.
    reason TEXT,
    -- Whether a process looks after it: until it has ended and the outcomes of its letters are known.
    active INTEGER NOT NULL CHECK (active IN (0, 1)),
    -- Which dead letters, as JSON.
    selection TEXT NOT NULL,
    -- Counters and position, as JSON. Only the holder of the lease writes them.
    progress TEXT NOT NULL,
    -- How often it was resumed after it had stopped.
    resumes INTEGER NOT NULL DEFAULT 0,
    -- What it waits for, such as streams that do not answer.
    problem TEXT,
    created_by TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    -- When the state changed.
    changed_at INTEGER NOT NULL,
    lease_owner TEXT,
    lease_epoch INTEGER NOT NULL DEFAULT 0,
    lease_until INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE INDEX idx_replay_plans_active ON replay_plans (id) WHERE active = 1;

-- Letters of plans whose outcome is not known. A letter is stored before it is sent.
CREATE TABLE replay_plan_letters (
    plan_id INTEGER NOT NULL REFERENCES replay_plans (id) ON DELETE CASCADE,
    topic TEXT NOT NULL,
    letter TEXT NOT NULL,
    partition INTEGER NOT NULL,
    -- Identity for deduplication, the group that it is for, and a digest of its cause.
    identity TEXT NOT NULL,
    letter_group TEXT,
    cause TEXT NOT NULL,
    step INTEGER NOT NULL,
    -- Where its message is, once it is sent.
    entry TEXT,
    PRIMARY KEY (plan_id, topic, letter)
) STRICT, WITHOUT ROWID;

-- One row, locked while plans are counted and one is added.
CREATE TABLE replay_plan_lock (id INTEGER PRIMARY KEY) STRICT;
INSERT INTO replay_plan_lock (id) VALUES (1);
