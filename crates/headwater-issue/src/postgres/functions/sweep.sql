-- Requeues issues whose claim expired and finds issues whose nudge is overdue. Skips locked issues.
CREATE OR REPLACE FUNCTION headwater_sweep(p_limit bigint, p_overdue_ms bigint, p_crashes_max bigint)
RETURNS TABLE (o_issue_id bigint, o_event_log_id bigint, o_requeued boolean, o_quarantined boolean, o_nudge boolean)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off SET enable_sort = off
AS $$
DECLARE
    v_now timestamptz := headwater_now();
    v_expired bigint[];
    v_overdue bigint[];
    v_quarantined bigint[];
BEGIN
    SELECT coalesce(array_agg(id), '{}') INTO v_expired FROM (
        SELECT id FROM issues WHERE processing_status = 'processing'
            AND coalesce(claim_expires_at, '-infinity'::timestamptz) <= v_now
        ORDER BY id LIMIT p_limit FOR UPDATE SKIP LOCKED) e;
    SELECT coalesce(array_agg(id), '{}') INTO v_overdue FROM (
        SELECT id FROM issues WHERE processing_status = 'queued'
            AND coalesce(greatest(nudged_at, not_before), '-infinity'::timestamptz)
                <= v_now - headwater_interval(p_overdue_ms)
        ORDER BY coalesce(greatest(nudged_at, not_before), '-infinity'::timestamptz)
        LIMIT p_limit FOR UPDATE SKIP LOCKED) o;

    SELECT coalesce(array_agg(id), '{}') INTO v_quarantined
    FROM issues WHERE id = ANY (v_expired) AND crashes + 1 >= p_crashes_max;

    RETURN QUERY
    WITH ended AS (
        INSERT INTO issue_runs (issue_id, epoch, worker, claimed_at, ended_at, result, events)
        SELECT id, claim_epoch, coalesce(claim_owner, ''), coalesce(processing_started_at, v_now), v_now,
            CASE WHEN id = ANY (v_quarantined) THEN 'quarantined' ELSE 'expired' END, 0
        FROM issues WHERE id = ANY (v_expired)
        ON CONFLICT DO NOTHING
    )
    UPDATE issues i SET
        crashes = i.crashes + 1, claim_owner = NULL, claim_expires_at = NULL,
        last_error = 'claim of worker `' || coalesce(i.claim_owner, '') || '` expired',
        processing_status = CASE WHEN d.quarantines OR i.pending_events = 0 THEN 'idle' ELSE 'queued' END,
        quarantined_at = CASE WHEN d.quarantines THEN v_now END,
        not_before = CASE WHEN NOT d.quarantines AND i.pending_events > 0 THEN i.not_before END,
        first_pending_at = CASE WHEN d.quarantines THEN i.first_pending_at
            WHEN i.pending_events > 0 THEN coalesce(i.first_pending_at, v_now) END,
        nudged_at = CASE WHEN d.quarantines OR i.pending_events = 0 THEN i.nudged_at ELSE v_now END,
        updated_at = v_now
    FROM (SELECT id, id = ANY (v_quarantined) AS quarantines FROM unnest(v_expired) AS id) d
    WHERE i.id = d.id
    RETURNING i.id,
        coalesce((SELECT min(e.id) FROM event_logs e WHERE e.issue_id = i.id AND e.processed_at IS NULL), 0),
        i.processing_status = 'queued', d.quarantines,
        i.processing_status = 'queued' AND coalesce(i.not_before <= v_now, true);
    PERFORM headwater_quarantine(v_quarantined);

    RETURN QUERY
    UPDATE issues i SET nudged_at = v_now, updated_at = v_now WHERE i.id = ANY (v_overdue)
    RETURNING i.id,
        coalesce((SELECT min(e.id) FROM event_logs e WHERE e.issue_id = i.id AND e.processed_at IS NULL), 0),
        false, false, true;
END $$;
