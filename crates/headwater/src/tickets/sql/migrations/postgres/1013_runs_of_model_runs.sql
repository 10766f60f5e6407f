-- Which run of the issue called the model, and its session. NULL in rows of older versions.
ALTER TABLE model_runs ADD COLUMN epoch bigint;
ALTER TABLE model_runs ADD COLUMN session text;
