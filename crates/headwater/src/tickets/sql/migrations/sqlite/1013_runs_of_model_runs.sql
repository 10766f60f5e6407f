-- Which run of the issue called the model, and its session. NULL in rows of older versions.
ALTER TABLE model_runs ADD COLUMN epoch INTEGER;
ALTER TABLE model_runs ADD COLUMN session TEXT;
