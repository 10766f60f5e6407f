-- Renews claims and returns those that are still held.
CREATE OR REPLACE FUNCTION headwater_renew_claims(p_issue bigint[], p_epoch bigint[], p_ttl_ms bigint)
RETURNS TABLE (o_issue_id bigint, o_epoch bigint, o_expires_at bigint, o_pending_events bigint)
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
    UPDATE issues i SET claim_expires_at = v_now + headwater_interval(p_ttl_ms), updated_at = v_now
    FROM (SELECT DISTINCT * FROM unnest(p_issue, p_epoch) AS n (issue, epoch)) asked
    WHERE i.id = asked.issue AND i.claim_epoch = asked.epoch AND i.processing_status = 'processing'
    RETURNING i.id, i.claim_epoch, headwater_ms(i.claim_expires_at), i.pending_events;
END $$;
