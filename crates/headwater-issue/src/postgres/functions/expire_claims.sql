-- Ends expired claims of issues that the caller has locked: each issue is queued, idle without pending events, or quarantined after
-- too many expired claims. Returns the quarantined issues.
CREATE OR REPLACE FUNCTION headwater_expire_claims(p_issue bigint[], p_now timestamptz, p_crashes_max bigint)
RETURNS bigint[]
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_quarantined bigint[];
BEGIN
    WITH ended AS (
        INSERT INTO issue_runs (issue_id, epoch, worker, claimed_at, ended_at, result, events)
        SELECT id, claim_epoch, coalesce(claim_owner, ''), coalesce(processing_started_at, p_now), p_now,
            CASE WHEN crashes + 1 >= p_crashes_max THEN 'quarantined' ELSE 'expired' END, 0
        FROM issues WHERE id = ANY (p_issue)
        ON CONFLICT DO NOTHING
    ), expired AS (
        UPDATE issues i SET
            crashes = i.crashes + 1, claim_owner = NULL, claim_expires_at = NULL,
            last_error = 'claim of worker `' || coalesce(i.claim_owner, '') || '` expired',
            processing_status = CASE WHEN i.crashes + 1 >= p_crashes_max OR i.pending_events = 0
                THEN 'idle' ELSE 'queued' END,
            quarantined_at = CASE WHEN i.crashes + 1 >= p_crashes_max THEN p_now ELSE i.quarantined_at END,
            not_before = CASE WHEN i.crashes + 1 < p_crashes_max AND i.pending_events > 0 THEN i.not_before END,
            first_pending_at = CASE WHEN i.crashes + 1 >= p_crashes_max THEN i.first_pending_at
                WHEN i.pending_events > 0 THEN coalesce(i.first_pending_at, p_now) END,
            nudged_at = CASE WHEN i.crashes + 1 >= p_crashes_max OR i.pending_events = 0
                THEN i.nudged_at ELSE p_now END,
            updated_at = p_now
        WHERE i.id = ANY (p_issue)
        RETURNING i.id, i.crashes >= p_crashes_max AS quarantines
    )
    SELECT coalesce(array_agg(id) FILTER (WHERE quarantines), '{}') INTO v_quarantined FROM expired;
    PERFORM headwater_quarantine(v_quarantined);
    RETURN v_quarantined;
END $$;
