-- The active version of the prompt of each integration; 0 is the built-in prompt. Integrations without a row use it, too. Times
-- are milliseconds since 1970, of the database.
CREATE TABLE prompts (
    integration text COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL,
    -- The newest version that was ever stored, so that no number is used twice.
    newest bigint NOT NULL,
    changed_at bigint NOT NULL,
    changed_by text NOT NULL
);

CREATE TABLE prompt_versions (
    integration text COLLATE "C" NOT NULL,
    version bigint NOT NULL CHECK (version > 0),
    content text NOT NULL,
    -- Why it was written; NULL if unknown.
    comment text,
    created_at bigint NOT NULL,
    created_by text NOT NULL,
    PRIMARY KEY (integration, version)
);

-- The version of the prompt that a run used.
ALTER TABLE model_runs ADD COLUMN prompt_version bigint NOT NULL DEFAULT 0;
