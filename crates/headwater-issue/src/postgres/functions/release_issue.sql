-- An operator releases an issue from quarantine or, with p_retry, ends any wait.
CREATE OR REPLACE FUNCTION headwater_release_issue(p_issue bigint, p_retry boolean)
RETURNS TABLE (o_was_quarantined boolean, o_changed boolean, o_status text)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
DECLARE
    v_now timestamptz;
BEGIN
    PERFORM 1 FROM issues WHERE id = p_issue FOR UPDATE;
    v_now := headwater_now();
    UPDATE dead_letters SET released_at = v_now WHERE issue_id = p_issue AND released_at IS NULL;
    RETURN QUERY
    WITH decided AS (
        SELECT id, quarantined_at IS NOT NULL AS frees, p_retry AND processing_status = 'queued' AS hurries
        FROM issues WHERE id = p_issue
    ), updated AS (
        UPDATE issues i SET
            attempts = CASE WHEN d.frees THEN 0 ELSE i.attempts END,
            crashes = CASE WHEN d.frees THEN 0 ELSE i.crashes END,
            superseded = CASE WHEN d.frees THEN 0 ELSE i.superseded END,
            quarantined_at = NULL, not_before = NULL,
            processing_status = CASE WHEN i.pending_events > 0 THEN 'queued' ELSE 'idle' END,
            first_pending_at = CASE WHEN i.pending_events > 0 THEN coalesce(i.first_pending_at, v_now) END,
            -- Overdue at once, so that the sweep finds it: this function sends no nudge.
            nudged_at = NULL,
            updated_at = v_now
        FROM decided d WHERE i.id = d.id AND (d.frees OR d.hurries)
        RETURNING i.id, i.processing_status
    )
    SELECT d.frees, u.id IS NOT NULL, coalesce(u.processing_status, i.processing_status)
    FROM decided d JOIN issues i ON i.id = d.id LEFT JOIN updated u ON u.id = d.id;
END $$;
