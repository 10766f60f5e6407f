-- Claims issues. An issue is named at most once per call. Returns a row per issue, a claimed one with its oldest unprocessed
-- event log; the next rows of a claimed issue are its further event logs, with NULL in the columns of the issue.
CREATE OR REPLACE FUNCTION headwater_claim_issues(
    p_issue bigint[], p_worker text, p_ttl_ms bigint, p_events_max bigint, p_bytes_max bigint, p_crashes_max bigint
) RETURNS TABLE (
    o_id bigint, o_won boolean, o_quarantined_now boolean, o_now timestamptz, o_integration text, o_provider text,
    o_project text, o_issue text, o_pending_events bigint, o_claim_epoch bigint, o_claim_owner text,
    o_claim_expires_at timestamptz, o_not_before timestamptz, o_attempts bigint, o_crashes bigint, o_superseded bigint,
    o_quarantined_at timestamptz, o_last_error text, o_fields text, o_discussions text,
    o_processing_started_at timestamptz, o_last_processed_at timestamptz, o_nudged_at timestamptz,
    o_created_at timestamptz, o_updated_at timestamptz, o_completed_event_log_id bigint, o_log_id bigint, o_source text,
    o_event_type text, o_key text, o_payload text, o_log_created_at timestamptz, o_error text, o_trace text
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_now timestamptz;
    v_expired bigint[];
    v_quarantined bigint[] := '{}';
    v_won bigint[];
    v_many bigint[];
BEGIN
    -- A claim without an expiry was not written by this program. It counts as expired, or it would be held for ever.
    SELECT array_agg(l.id) FILTER (WHERE l.processing_status = 'processing'
        AND coalesce(l.claim_expires_at <= headwater_now(), true)) INTO v_expired
    FROM (SELECT id, processing_status, claim_expires_at FROM issues WHERE id = ANY (p_issue) ORDER BY id FOR UPDATE) l;
    v_now := headwater_now();
    IF v_expired IS NOT NULL THEN
        v_quarantined := headwater_expire_claims(v_expired, v_now, p_crashes_max);
    END IF;

    WITH claimed AS (
        UPDATE issues i SET
            processing_status = 'processing', claim_epoch = i.claim_epoch + 1, claim_owner = p_worker,
            claim_expires_at = v_now + headwater_interval(p_ttl_ms), processing_started_at = v_now,
            not_before = NULL, first_pending_at = NULL, updated_at = v_now
        WHERE i.id = ANY (p_issue) AND i.processing_status = 'queued' AND coalesce(i.not_before <= v_now, true)
        RETURNING i.id, i.pending_events
    )
    SELECT coalesce(array_agg(id), '{}'), array_agg(id) FILTER (WHERE pending_events > 1) INTO v_won, v_many
    FROM claimed;

    RETURN QUERY
    SELECT i.id, true, false, v_now, g.name, g.provider, i.external_project_id, i.external_issue_id,
        i.pending_events, i.claim_epoch, i.claim_owner, i.claim_expires_at, i.not_before, i.attempts, i.crashes,
        i.superseded, i.quarantined_at, i.last_error, i.fields::text, i.discussions::text, i.processing_started_at,
        i.last_processed_at, i.nudged_at, i.created_at, i.updated_at, i.completed_event_log_id,
        e.id, e.source, e.event_type, e.dedup_key, e.payload::text, e.created_at, e.processing_error, e.trace
    FROM issues i JOIN integrations g ON g.id = i.integration_id
    LEFT JOIN LATERAL (
        SELECT * FROM event_logs l WHERE l.issue_id = i.id AND l.processed_at IS NULL ORDER BY l.id LIMIT 1
    ) e ON true
    WHERE i.id = ANY (v_won);

    IF v_many IS NOT NULL THEN
        RETURN QUERY
        SELECT i.id, NULL::boolean, NULL::boolean, NULL::timestamptz, NULL::text, NULL::text, NULL::text, NULL::text,
            NULL::bigint, NULL::bigint, NULL::text, NULL::timestamptz, NULL::timestamptz, NULL::bigint, NULL::bigint,
            NULL::bigint, NULL::timestamptz, NULL::text, NULL::text, NULL::text, NULL::timestamptz, NULL::timestamptz,
            NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::bigint,
            e.id, e.source, e.event_type, e.dedup_key, e.payload::text, e.created_at, e.processing_error, e.trace
        FROM unnest(v_many) AS i (id) CROSS JOIN LATERAL (
            SELECT oldest.*, sum(oldest.payload_bytes) OVER (ORDER BY oldest.id) AS bytes,
                row_number() OVER (ORDER BY oldest.id) AS number
            FROM (
                SELECT * FROM event_logs l WHERE l.issue_id = i.id AND l.processed_at IS NULL
                ORDER BY l.id LIMIT p_events_max
            ) oldest
        ) e WHERE e.number > 1 AND e.bytes <= p_bytes_max ORDER BY e.id;
    END IF;

    IF cardinality(v_won) < cardinality(p_issue) THEN
        RETURN QUERY
        SELECT i.id, false, i.id = ANY (v_quarantined), v_now, NULL::text, NULL::text, NULL::text, NULL::text,
            i.pending_events, i.claim_epoch, i.claim_owner, i.claim_expires_at, i.not_before, i.attempts, i.crashes,
            i.superseded, i.quarantined_at, NULL::text, NULL::text, NULL::text, NULL::timestamptz, NULL::timestamptz,
            NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::bigint, NULL::bigint, NULL::text,
            NULL::text, NULL::text, NULL::text, NULL::timestamptz, NULL::text, NULL::text
        FROM issues i WHERE i.id = ANY (p_issue) AND NOT i.id = ANY (v_won);
    END IF;
END $$;
