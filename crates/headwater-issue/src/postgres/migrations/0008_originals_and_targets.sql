-- Payloads as they were received, of event logs whose `payload` does not say the same: `jsonb` holds no NUL, no lone
-- surrogate and no repeated key.
CREATE TABLE IF NOT EXISTS event_log_originals (
    event_log_id bigint PRIMARY KEY REFERENCES event_logs (id) ON DELETE CASCADE,
    body bytea NOT NULL
);

-- headwater_record_1, and the original of each new event log where one is given.
CREATE OR REPLACE FUNCTION headwater_record_original_1(
    p_integration text[], p_project text[], p_issue text[], p_source text[], p_event_type text[], p_key text[],
    p_digest bytea[], p_payload text[], p_quiet_ms bigint, p_max_wait_ms bigint, p_quiet_events_max bigint,
    p_original bytea[]
) RETURNS TABLE (
    o_place bigint, o_known boolean, o_issue_id bigint, o_event_log_id bigint, o_new boolean, o_same boolean,
    o_processed boolean, o_became_queued boolean, o_status text, o_not_before bigint
) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    WITH recorded AS MATERIALIZED (
        SELECT * FROM headwater_record_1(p_integration, p_project, p_issue, p_source, p_event_type, p_key, p_digest,
            p_payload, p_quiet_ms, p_max_wait_ms, p_quiet_events_max)
    ), kept AS (
        INSERT INTO event_log_originals (event_log_id, body)
        SELECT r.o_event_log_id, p_original[r.o_place] FROM recorded r
        WHERE r.o_new AND p_original[r.o_place] IS NOT NULL
    )
    SELECT r.* FROM recorded r ORDER BY r.o_place;
END $$;

-- The integration of each row that is not delivered, so that the rows of one target are found without reading those of
-- others. Functions that write rows do not know the column; the trigger does.
ALTER TABLE outbox ADD COLUMN IF NOT EXISTS integration_id bigint;
UPDATE outbox o SET integration_id = i.integration_id FROM issues i WHERE i.id = o.issue_id AND o.status <> 'delivered';

CREATE OR REPLACE FUNCTION headwater_outbox_integration() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    SELECT i.integration_id INTO NEW.integration_id FROM issues i WHERE i.id = NEW.issue_id;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS outbox_integration ON outbox;
CREATE TRIGGER outbox_integration BEFORE INSERT OR UPDATE ON outbox
    FOR EACH ROW WHEN (NEW.integration_id IS NULL) EXECUTE FUNCTION headwater_outbox_integration();

-- A delivery that was settled, however it ended, was no crash of its deliverer: only crashes in a row make a row dead.
CREATE OR REPLACE FUNCTION headwater_outbox_settled() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    NEW.crashes := 0;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS outbox_settled ON outbox;
CREATE TRIGGER outbox_settled BEFORE UPDATE ON outbox
    FOR EACH ROW WHEN (OLD.status = 'taken' AND NEW.status = 'pending') EXECUTE FUNCTION headwater_outbox_settled();

CREATE INDEX IF NOT EXISTS idx_outbox_target ON outbox (integration_id, kind, target, due_at, id) WHERE status IN ('pending', 'taken');

-- Takes rows of the outbox that are due, `p_limit` in all; skips rows that other transactions have locked. A target is an
-- integration, a kind and a `target`. Each gets at most `p_per_target` rows, or the room given for it; all that are failing
-- together at most `p_failing_limit`. Targets with fewer rows in flight come first, then those that were served longest
-- ago, then those with the oldest row. A row that was taken and whose lease has expired counts a crash.
CREATE OR REPLACE FUNCTION headwater_take_2(
    p_worker text, p_limit bigint, p_ttl_ms bigint, p_per_target bigint, p_failing_limit bigint,
    p_integration text[], p_kind text[], p_target text[], p_in_flight bigint[], p_room bigint[], p_failing boolean[],
    p_served bigint[]
) RETURNS TABLE (
    o_id bigint, o_issue_id bigint, o_integration text, o_provider text, o_project text, o_issue text, o_kind text,
    o_target text, o_idempotency_key text, o_payload text, o_deliveries bigint, o_attempts bigint, o_created_at bigint,
    o_crashes bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := headwater_now();
BEGIN
    RETURN QUERY
    WITH RECURSIVE targets AS (
        -- One index probe per target, however many rows it has.
        (SELECT f.integration_id, f.kind, f.target FROM outbox f WHERE f.status IN ('pending', 'taken')
            ORDER BY f.integration_id, f.kind, f.target LIMIT 1)
        UNION ALL
        SELECT n.integration_id, n.kind, n.target FROM targets t CROSS JOIN LATERAL (
            SELECT f.integration_id, f.kind, f.target FROM outbox f
            WHERE f.status IN ('pending', 'taken')
                AND (f.integration_id, f.kind, f.target) > (t.integration_id, t.kind, t.target)
            ORDER BY f.integration_id, f.kind, f.target LIMIT 1
        ) n
    ), known AS (
        SELECT g.id AS integration_id, n.kind, n.target, n.in_flight, n.room, n.failing, n.served
        FROM unnest(p_integration, p_kind, p_target, p_in_flight, p_room, p_failing, p_served)
            AS n (integration, kind, target, in_flight, room, failing, served)
        JOIN integrations g ON g.name = n.integration
    ), due AS (
        SELECT t.integration_id, t.kind, t.target, coalesce(k.in_flight, 0) AS in_flight,
            coalesce(k.failing, false) AS failing, coalesce(k.served, 0) AS served, d.rows, d.oldest
        FROM targets t
        LEFT JOIN known k ON k.integration_id = t.integration_id AND k.kind = t.kind AND k.target = t.target
        CROSS JOIN LATERAL (
            SELECT count(*) AS rows, min(f.due_at) AS oldest FROM (
                SELECT o.due_at FROM outbox o
                WHERE o.integration_id = t.integration_id AND o.kind = t.kind AND o.target = t.target
                    AND o.status IN ('pending', 'taken') AND o.due_at <= v_now
                ORDER BY o.due_at, o.id LIMIT least(coalesce(k.room, p_per_target), p_limit)
            ) f
        ) d
    ), ranked AS (
        SELECT d.*, d.in_flight + number AS slot,
            row_number() OVER (PARTITION BY d.failing ORDER BY d.in_flight + number, d.served, d.oldest) AS place
        FROM due d CROSS JOIN LATERAL generate_series(1, d.rows) AS number
    ), quotas AS (
        SELECT c.integration_id, c.kind, c.target, count(*) AS quota FROM (
            SELECT r.* FROM ranked r WHERE NOT r.failing OR r.place <= p_failing_limit
            ORDER BY r.slot, r.served, r.oldest LIMIT p_limit
        ) c GROUP BY c.integration_id, c.kind, c.target
    ), chosen AS (
        SELECT f.id FROM quotas q CROSS JOIN LATERAL (
            SELECT o.id FROM outbox o
            WHERE o.integration_id = q.integration_id AND o.kind = q.kind AND o.target = q.target
                AND o.status IN ('pending', 'taken') AND o.due_at <= v_now
            ORDER BY o.due_at, o.id LIMIT q.quota FOR UPDATE SKIP LOCKED
        ) f
    ), o AS (
        UPDATE outbox SET status = 'taken', deliveries = outbox.deliveries + 1, taken_by = p_worker,
            crashes = outbox.crashes + CASE WHEN outbox.status = 'taken' THEN 1 ELSE 0 END,
            due_at = v_now + headwater_interval(p_ttl_ms)
        FROM chosen WHERE outbox.id = chosen.id RETURNING outbox.*
    )
    SELECT o.id, o.issue_id, g.name, g.provider, i.external_project_id, i.external_issue_id, o.kind, o.target,
        o.idempotency_key, o.payload::text, o.deliveries, o.attempts, headwater_ms(o.created_at), o.crashes
    FROM o JOIN issues i ON i.id = o.issue_id JOIN integrations g ON g.id = i.integration_id
    ORDER BY o.id;
END $$;

DO $$
DECLARE
    v_setting text;
BEGIN
    -- As for the other functions: plans by the index, and no compiler.
    FOREACH v_setting IN ARRAY ARRAY[
        'enable_seqscan', 'enable_bitmapscan', 'enable_hashjoin', 'enable_mergejoin', 'enable_material', 'jit'
    ] LOOP
        EXECUTE format('ALTER FUNCTION headwater_take_2 SET %I = off', v_setting);
    END LOOP;
END $$;
ALTER FUNCTION headwater_take_2 SET enable_sort = off;
