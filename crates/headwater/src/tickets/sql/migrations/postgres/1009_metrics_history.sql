-- One row for each process and minute: samples of its metrics as JSON, without zeros.
CREATE TABLE metrics_history (
    -- Minutes since 1970.
    minute bigint NOT NULL,
    -- Name of the process, unique for each start.
    process text NOT NULL,
    data text NOT NULL,
    PRIMARY KEY (minute, process)
);
