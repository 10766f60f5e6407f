-- One row for each process and minute: samples of its metrics as JSON, without zeros.
CREATE TABLE metrics_history (
    -- Minutes since 1970.
    minute INTEGER NOT NULL,
    -- Name of the process, unique for each start.
    process TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (minute, process)
) STRICT, WITHOUT ROWID;
