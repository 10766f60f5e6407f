-- Settles deliveries, each row named at most once. A row that is delivered or dead makes the next row of its issue and kind
-- pending. This needs the lock of the issue: a row written at the same time would otherwise wait for a row that is gone.
CREATE OR REPLACE FUNCTION headwater_settle_outbox(
    p_id bigint[], p_deliveries bigint[], p_status text[], p_attempts bigint[], p_after_ms bigint[], p_error text[]
) RETURNS TABLE (o_id bigint)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
DECLARE
    v_now timestamptz;
    v_done bigint[];
    v_freed bigint[];
    v_freed_kind text[];
BEGIN
    PERFORM 1 FROM issues WHERE id IN (SELECT issue_id FROM outbox WHERE id = ANY (p_id)) ORDER BY id FOR UPDATE;
    v_now := headwater_now();
    WITH ended AS (
        UPDATE outbox o SET
            status = n.status, attempts = o.attempts + n.attempts, taken_by = NULL,
            -- A settled delivery is no crash of the deliverer: only consecutive crashes make a row dead.
            crashes = CASE WHEN n.status = 'pending' THEN 0 ELSE o.crashes END,
            due_at = coalesce(v_now + headwater_interval(n.after_ms), o.due_at),
            last_error = coalesce(n.error, o.last_error),
            delivered_at = CASE WHEN n.status = 'delivered' THEN v_now END
        FROM unnest(p_id, p_deliveries, p_status, p_attempts, p_after_ms, p_error)
            AS n (id, deliveries, status, attempts, after_ms, error)
        WHERE o.id = n.id AND o.deliveries = n.deliveries AND o.status = 'taken'
        RETURNING o.id, o.issue_id, o.kind, o.status
    )
    SELECT array_agg(id), array_agg(issue_id) FILTER (WHERE status IN ('delivered', 'dead')),
        array_agg(kind) FILTER (WHERE status IN ('delivered', 'dead'))
    INTO v_done, v_freed, v_freed_kind FROM ended;

    -- At most one row per issue and kind is taken, so no pair is named twice.
    UPDATE outbox o SET status = 'pending'
    FROM unnest(v_freed, v_freed_kind) AS freed (issue_id, kind)
    WHERE o.id = (SELECT w.id FROM outbox w WHERE w.issue_id = freed.issue_id AND w.kind = freed.kind
        AND w.status IN ('waiting', 'pending', 'taken') ORDER BY w.id LIMIT 1) AND o.status = 'waiting';
    RETURN QUERY SELECT unnest(v_done);
END $$;
