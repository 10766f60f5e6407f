-- Releases claims without a result. Each pair of issue and epoch is named at most once per call.
CREATE OR REPLACE FUNCTION headwater_release_claims(p_issue bigint[], p_epoch bigint[], p_superseded boolean[])
RETURNS TABLE (o_issue_id bigint, o_epoch bigint, o_not_before bigint)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
DECLARE
    v_now timestamptz;
BEGIN
    PERFORM 1 FROM issues WHERE id = ANY (p_issue) ORDER BY id FOR UPDATE;
    v_now := headwater_now();
    RETURN QUERY
    WITH held AS (
        SELECT i.id, i.claim_epoch, i.claim_owner, i.processing_started_at, n.superseded
        FROM unnest(p_issue, p_epoch, p_superseded) AS n (issue, epoch, superseded)
        JOIN issues i ON i.id = n.issue AND i.claim_epoch = n.epoch AND i.processing_status = 'processing'
    ), ended AS (
        INSERT INTO issue_runs (issue_id, epoch, worker, claimed_at, ended_at, result, events)
        SELECT id, claim_epoch, coalesce(claim_owner, ''), coalesce(processing_started_at, v_now), v_now,
            CASE WHEN superseded THEN 'superseded' ELSE 'released' END, 0
        FROM held
        ON CONFLICT DO NOTHING
    )
    UPDATE issues i SET
        superseded = i.superseded + h.superseded::int, claim_owner = NULL, claim_expires_at = NULL,
        processing_status = CASE WHEN i.pending_events > 0 THEN 'queued' ELSE 'idle' END,
        not_before = CASE WHEN i.pending_events > 0 THEN i.not_before END,
        first_pending_at = CASE WHEN i.pending_events > 0 THEN coalesce(i.first_pending_at, v_now) END,
        nudged_at = CASE WHEN i.pending_events > 0 THEN v_now ELSE i.nudged_at END,
        updated_at = v_now
    FROM held h WHERE i.id = h.id
    RETURNING i.id, i.claim_epoch, headwater_ms(i.not_before);
END $$;
