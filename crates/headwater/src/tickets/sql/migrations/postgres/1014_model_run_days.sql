-- The sums of `model_runs` for each day that is over, so that a report of all days does not read all runs.
CREATE TABLE model_run_days (
    -- Days since 1970.
    day bigint NOT NULL,
    integration text NOT NULL,
    model text NOT NULL,
    runs bigint NOT NULL,
    unanswered bigint NOT NULL,
    tokens_in bigint NOT NULL,
    tokens_out bigint NOT NULL,
    cost_micros bigint,
    PRIMARY KEY (day, integration, model)
);
