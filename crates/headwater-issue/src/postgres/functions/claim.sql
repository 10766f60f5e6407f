-- Claims issues and returns the oldest unprocessed event logs of each claimed one. An issue is named at most once per call.
CREATE OR REPLACE FUNCTION headwater_claim(
    p_issue bigint[], p_worker text, p_ttl_ms bigint, p_events_max bigint, p_bytes_max bigint, p_crashes_max bigint
) RETURNS TABLE (
    o_id bigint, o_integration text, o_provider text, o_project text, o_issue text, o_status text,
    o_pending_events bigint, o_claim_epoch bigint, o_claim_owner text, o_claim_expires_at bigint, o_not_before bigint,
    o_attempts bigint, o_crashes bigint, o_superseded bigint, o_quarantined_at bigint, o_last_error text, o_fields text,
    o_discussions text, o_processing_started_at bigint, o_last_processed_at bigint, o_nudged_at bigint,
    o_created_at bigint, o_updated_at bigint, o_won boolean, o_quarantined_now boolean, o_now bigint,
    o_log_ids bigint[], o_sources text[], o_event_types text[], o_keys text[], o_payloads text[],
    o_log_created_at bigint[], o_errors text[], o_traces text[], o_completed_event_log_id bigint
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
DECLARE
    v_now timestamptz;
    v_won bigint[];
    v_quarantined bigint[];
BEGIN
    PERFORM 1 FROM issues WHERE id = ANY (p_issue) ORDER BY id FOR UPDATE;
    v_now := headwater_now();

    WITH decided AS (
        SELECT i.id, i.claim_epoch, i.claim_owner, i.processing_started_at, i.expired,
            i.expired AND i.crashes + 1 >= p_crashes_max AS quarantines,
            (i.processing_status = 'queued'
                OR (i.expired AND i.crashes + 1 < p_crashes_max AND i.pending_events > 0))
                AND coalesce(i.not_before <= v_now, true) AS wins
        FROM (
            -- A claim without an expiry was not written by this program. It counts as expired, or it would be held for ever.
            SELECT *, processing_status = 'processing' AND coalesce(claim_expires_at <= v_now, true) AS expired
            FROM issues WHERE id = ANY (p_issue)
        ) i
    ), ended AS (
        INSERT INTO issue_runs (issue_id, epoch, worker, claimed_at, ended_at, result, events)
        SELECT id, claim_epoch, coalesce(claim_owner, ''), coalesce(processing_started_at, v_now), v_now,
            CASE WHEN quarantines THEN 'quarantined' ELSE 'expired' END, 0
        FROM decided WHERE expired
        ON CONFLICT DO NOTHING
    ), updated AS (
        UPDATE issues i SET
            processing_status = CASE WHEN d.wins THEN 'processing'
                WHEN d.quarantines OR i.pending_events = 0 THEN 'idle' ELSE 'queued' END,
            claim_epoch = i.claim_epoch + CASE WHEN d.wins THEN 1 ELSE 0 END,
            claim_owner = CASE WHEN d.wins THEN p_worker END,
            claim_expires_at = CASE WHEN d.wins THEN v_now + headwater_interval(p_ttl_ms) END,
            processing_started_at = CASE WHEN d.wins THEN v_now ELSE i.processing_started_at END,
            not_before = CASE WHEN d.wins OR d.quarantines OR i.pending_events = 0 THEN NULL ELSE i.not_before END,
            first_pending_at = CASE WHEN d.wins THEN NULL WHEN d.quarantines THEN i.first_pending_at
                WHEN i.pending_events = 0 THEN NULL ELSE coalesce(i.first_pending_at, v_now) END,
            crashes = i.crashes + CASE WHEN d.expired THEN 1 ELSE 0 END,
            last_error = CASE WHEN d.expired
                THEN 'claim of worker `' || coalesce(i.claim_owner, '') || '` expired' ELSE i.last_error END,
            nudged_at = CASE WHEN d.expired AND NOT d.quarantines AND i.pending_events > 0
                THEN v_now ELSE i.nudged_at END,
            quarantined_at = CASE WHEN d.quarantines THEN v_now ELSE i.quarantined_at END,
            updated_at = v_now
        FROM decided d WHERE d.id = i.id AND (d.wins OR d.expired)
        RETURNING i.id, d.wins, d.quarantines
    )
    SELECT coalesce(array_agg(id) FILTER (WHERE wins), '{}'), coalesce(array_agg(id) FILTER (WHERE quarantines), '{}')
    INTO v_won, v_quarantined FROM updated;
    PERFORM headwater_quarantine(v_quarantined);

    RETURN QUERY
    SELECT i.id, g.name, g.provider, i.external_project_id, i.external_issue_id, i.processing_status, i.pending_events,
        i.claim_epoch, i.claim_owner, headwater_ms(i.claim_expires_at), headwater_ms(i.not_before), i.attempts,
        i.crashes, i.superseded, headwater_ms(i.quarantined_at), i.last_error, i.fields::text, i.discussions::text,
        headwater_ms(i.processing_started_at), headwater_ms(i.last_processed_at), headwater_ms(i.nudged_at),
        headwater_ms(i.created_at), headwater_ms(i.updated_at), i.id = ANY (v_won), i.id = ANY (v_quarantined),
        headwater_ms(v_now), logs.ids, logs.sources, logs.event_types, logs.keys, logs.payloads, logs.created_at,
        logs.errors, logs.traces, i.completed_event_log_id
    FROM issues i JOIN integrations g ON g.id = i.integration_id
    LEFT JOIN LATERAL (
        SELECT array_agg(e.id ORDER BY e.id) AS ids, array_agg(e.source ORDER BY e.id) AS sources,
            array_agg(e.event_type ORDER BY e.id) AS event_types, array_agg(e.dedup_key ORDER BY e.id) AS keys,
            array_agg(e.payload::text ORDER BY e.id) AS payloads,
            array_agg(headwater_ms(e.created_at) ORDER BY e.id) AS created_at,
            array_agg(e.processing_error ORDER BY e.id) AS errors, array_agg(e.trace ORDER BY e.id) AS traces
        FROM (
            SELECT oldest.*, sum(oldest.payload_bytes) OVER (ORDER BY oldest.id) AS bytes,
                row_number() OVER (ORDER BY oldest.id) AS number
            FROM (
                SELECT * FROM event_logs l WHERE l.issue_id = i.id AND l.processed_at IS NULL
                ORDER BY l.id LIMIT p_events_max
            ) oldest
        ) e WHERE e.number = 1 OR e.bytes <= p_bytes_max
    ) logs ON i.id = ANY (v_won)
    WHERE i.id = ANY (p_issue);
END $$;
