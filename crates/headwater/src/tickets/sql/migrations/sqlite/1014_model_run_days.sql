-- The sums of `model_runs` for each day that is over, so that a report of all days does not read all runs.
CREATE TABLE model_run_days (
    -- Days since 1970.
    day INTEGER NOT NULL,
    integration TEXT NOT NULL,
    model TEXT NOT NULL,
    runs INTEGER NOT NULL,
    unanswered INTEGER NOT NULL,
    tokens_in INTEGER NOT NULL,
    tokens_out INTEGER NOT NULL,
    cost_micros INTEGER,
    PRIMARY KEY (day, integration, model)
) STRICT;
