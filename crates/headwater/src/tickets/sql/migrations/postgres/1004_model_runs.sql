-- What each run of a model used, whatever became of the run. Times are milliseconds since 1970.
CREATE TABLE model_runs (
    id text COLLATE "C" PRIMARY KEY,
    at bigint NOT NULL,
    issue_id bigint NOT NULL,
    integration text NOT NULL,
    model text NOT NULL,
    -- done, handed_over, failed or superseded.
    result text NOT NULL,
    -- Calls of the model in this run.
    calls bigint NOT NULL,
    tokens_in bigint NOT NULL,
    tokens_out bigint NOT NULL,
    -- In millionths of the currency of the prices; NULL if no price is set.
    cost_micros bigint
);

CREATE INDEX idx_model_runs_at ON model_runs (at);
CREATE INDEX idx_model_runs_issue ON model_runs (issue_id, at);

-- Issues that wait because a budget of the day is used up, and the limit that they met. A process with a higher limit
-- releases them when it starts.
CREATE TABLE budget_waits (
    issue_id bigint PRIMARY KEY,
    -- day: of the integration, user: of the author.
    budget text NOT NULL CHECK (budget IN ('day', 'user')),
    tokens_max bigint NOT NULL,
    -- The day ends: the issue continues without a release.
    until_at bigint NOT NULL
);
