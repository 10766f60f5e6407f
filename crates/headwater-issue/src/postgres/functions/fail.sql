-- Ends failed runs. p_after_ms is the backoff, NULL if a retry is pointless; p_blamed is false for a deferred run, which counts
-- no attempt. Each pair of issue and epoch is named at most once per call.
CREATE OR REPLACE FUNCTION headwater_fail(
    p_issue bigint[], p_epoch bigint[], p_error text[], p_after_ms bigint[], p_blamed boolean[],
    p_attempts_max bigint, p_events_max bigint
) RETURNS TABLE (o_issue_id bigint, o_epoch bigint, o_attempts bigint, o_quarantined boolean, o_not_before bigint)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
DECLARE
    v_now timestamptz;
    v_quarantined bigint[];
BEGIN
    PERFORM 1 FROM issues WHERE id = ANY (p_issue) ORDER BY id FOR UPDATE;
    v_now := headwater_now();
    SELECT coalesce(array_agg(i.id), '{}') INTO v_quarantined
    FROM unnest(p_issue, p_epoch, p_after_ms, p_blamed) AS n (issue, epoch, after_ms, blamed)
    JOIN issues i ON i.id = n.issue AND i.claim_epoch = n.epoch AND i.processing_status = 'processing'
    WHERE n.after_ms IS NULL OR (n.blamed AND i.attempts + 1 >= p_attempts_max);
    RETURN QUERY
    WITH held AS (
        SELECT i.id, i.claim_epoch, i.claim_owner, i.processing_started_at, n.error, n.after_ms, n.blamed,
            i.id = ANY (v_quarantined) AS quarantines
        FROM unnest(p_issue, p_epoch, p_error, p_after_ms, p_blamed) AS n (issue, epoch, error, after_ms, blamed)
        JOIN issues i ON i.id = n.issue AND i.claim_epoch = n.epoch AND i.processing_status = 'processing'
    ), kept AS (
        UPDATE event_logs e SET processing_error = oldest.error
        FROM (SELECT h.error, l.id FROM held h CROSS JOIN LATERAL (
            SELECT id FROM event_logs WHERE issue_id = h.id AND processed_at IS NULL ORDER BY id LIMIT p_events_max
        ) l) oldest
        WHERE e.id = oldest.id
    ), ended AS (
        INSERT INTO issue_runs (issue_id, epoch, worker, claimed_at, ended_at, result, error, events)
        SELECT id, claim_epoch, coalesce(claim_owner, ''), coalesce(processing_started_at, v_now), v_now,
            CASE WHEN quarantines THEN 'quarantined' WHEN blamed THEN 'failed' ELSE 'deferred' END, error, 0
        FROM held
        ON CONFLICT DO NOTHING
    )
    UPDATE issues i SET
        attempts = i.attempts + h.blamed::int, last_error = h.error, claim_owner = NULL, claim_expires_at = NULL,
        processing_status = CASE WHEN h.quarantines OR i.pending_events = 0 THEN 'idle' ELSE 'queued' END,
        quarantined_at = CASE WHEN h.quarantines THEN v_now END,
        not_before = CASE WHEN NOT h.quarantines AND i.pending_events > 0
            THEN greatest(i.not_before, v_now + headwater_interval(h.after_ms)) END,
        first_pending_at = CASE WHEN h.quarantines THEN i.first_pending_at
            WHEN i.pending_events > 0 THEN coalesce(i.first_pending_at, v_now) END,
        nudged_at = CASE WHEN h.quarantines OR i.pending_events = 0 THEN i.nudged_at ELSE v_now END,
        updated_at = v_now
    FROM held h WHERE i.id = h.id
    RETURNING i.id, i.claim_epoch, i.attempts, h.quarantines, headwater_ms(coalesce(i.not_before, v_now));
    PERFORM headwater_quarantine(v_quarantined);
END $$;
