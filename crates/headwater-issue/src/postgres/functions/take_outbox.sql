-- Takes rows of the outbox that are due, `p_limit` in all; skips rows that other transactions have locked. A target is an
-- integration, a kind and a `target`. Each gets at most `p_per_target` rows, or its p_room; all failing targets
-- together at most `p_failing_limit`. Targets with fewer rows in flight come first, then those that were served longest
-- ago, then those with the oldest row. A row that was taken and whose lease has expired counts a crash.
CREATE OR REPLACE FUNCTION headwater_take_outbox(
    p_worker text, p_limit bigint, p_ttl_ms bigint, p_per_target bigint, p_failing_limit bigint,
    p_integration text[], p_kind text[], p_target text[], p_in_flight bigint[], p_room bigint[], p_failing boolean[],
    p_served bigint[]
) RETURNS TABLE (
    o_id bigint, o_issue_id bigint, o_integration text, o_provider text, o_project text, o_issue text, o_kind text,
    o_target text, o_idempotency_key text, o_payload text, o_deliveries bigint, o_attempts bigint, o_created_at bigint,
    o_crashes bigint
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off SET enable_sort = off
AS $$
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
