-- The active version of the prompt of each integration; 0 is the built-in prompt. Integrations without a row use it, too. Times
-- are milliseconds since 1970, of the database.
CREATE TABLE prompts (
    integration TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    -- The newest version that was ever stored, so that no number is used twice.
    newest INTEGER NOT NULL,
    changed_at INTEGER NOT NULL,
    changed_by TEXT NOT NULL
) STRICT;

CREATE TABLE prompt_versions (
    integration TEXT NOT NULL,
    version INTEGER NOT NULL CHECK (version > 0),
    content TEXT NOT NULL,
    -- Why it was written; NULL if unknown.
    comment TEXT,
    created_at INTEGER NOT NULL,
    created_by TEXT NOT NULL,
    PRIMARY KEY (integration, version)
) STRICT;

-- The version of the prompt that a run used.
ALTER TABLE model_runs ADD COLUMN prompt_version INTEGER NOT NULL DEFAULT 0;
