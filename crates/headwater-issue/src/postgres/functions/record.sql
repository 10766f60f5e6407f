-- Stores events, each key at most once per call. An unknown integration returns no issue. If the returned event log is not
-- new, the key was used before; o_same says whether its digest is the same.
CREATE OR REPLACE FUNCTION headwater_record(
    p_integration text[], p_project text[], p_issue text[], p_source text[], p_event_type text[], p_key text[],
    p_digest bytea[], p_payload text[], p_quiet_ms bigint, p_max_wait_ms bigint,
    p_quiet_events_max bigint, p_original bytea[], p_trace text[]
) RETURNS TABLE (
    o_place bigint, o_known boolean, o_issue_id bigint, o_event_log_id bigint, o_new boolean, o_same boolean,
    o_processed boolean, o_became_queued boolean, o_status text, o_not_before bigint
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
DECLARE
    v_integration bigint[];
    v_issue bigint[];
    v_log bigint[];
    v_queued bigint[];
    v_now timestamptz;
BEGIN
    SELECT array_agg(g.id ORDER BY n.place) INTO v_integration
    FROM unnest(p_integration) WITH ORDINALITY AS n (name, place) LEFT JOIN integrations g ON g.name = n.name;

    FOR tries IN 1..2 LOOP
        SELECT array_agg(i.id ORDER BY n.place) INTO v_issue
        FROM unnest(v_integration, p_project, p_issue) WITH ORDINALITY AS n (integration, project, issue, place)
        LEFT JOIN issues i ON i.integration_id = n.integration AND i.external_project_id = n.project
            AND i.external_issue_id = n.issue;
        EXIT WHEN tries = 2 OR array_position(v_issue, NULL) IS NULL;
        -- In the order of names, so that two calls cannot deadlock. An event whose key was used before creates no issue.
        INSERT INTO issues (integration_id, external_project_id, external_issue_id)
        SELECT DISTINCT n.integration, n.project COLLATE "C", n.issue COLLATE "C"
        FROM unnest(v_integration, p_project, p_issue, p_key, v_issue) AS n (integration, project, issue, key, id)
        WHERE n.id IS NULL AND n.integration IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM event_logs e WHERE e.integration_id = n.integration AND e.dedup_key = n.key)
        ORDER BY 1, 2, 3
        ON CONFLICT DO NOTHING;
    END LOOP;

    PERFORM 1 FROM issues WHERE id = ANY (v_issue) ORDER BY id FOR UPDATE;
    v_now := headwater_now();

    -- Ids in the order of the call, rows in the order of keys, so that two calls cannot deadlock on keys.
    SELECT array_agg(nextval('event_logs_id_seq') ORDER BY place) INTO v_log
    FROM generate_series(1, cardinality(p_key)) AS place;

    WITH inserted AS (
        INSERT INTO event_logs (id, issue_id, integration_id, source, event_type, dedup_key, digest, payload,
            payload_bytes, trace, created_at)
        SELECT n.id, n.issue_id, n.integration, n.source, n.event_type, n.key, n.digest, n.payload::jsonb,
            -- Size as read back: jsonb rewrites numbers.
            octet_length(n.payload::jsonb::text), n.trace, v_now
        FROM unnest(v_log, v_issue, v_integration, p_source, p_event_type, p_key, p_digest, p_payload, p_trace)
            AS n (id, issue_id, integration, source, event_type, key, digest, payload, trace)
        WHERE n.issue_id IS NOT NULL
        ORDER BY n.integration, n.key COLLATE "C"
        ON CONFLICT (integration_id, dedup_key) DO NOTHING
        RETURNING id, issue_id
    ), kept AS (
        INSERT INTO event_log_originals (event_log_id, body)
        SELECT n.id, n.original FROM inserted JOIN unnest(v_log, p_original) AS n (id, original) ON n.id = inserted.id
        WHERE n.original IS NOT NULL
    ), counted AS (
        SELECT issue_id, count(*) AS events FROM inserted GROUP BY issue_id
    ), updated AS (
        UPDATE issues i SET
            pending_events = i.pending_events + c.events,
            first_pending_at = coalesce(i.first_pending_at, v_now),
            not_before = CASE WHEN before.is_full THEN NULL
                WHEN i.quarantined_at IS NOT NULL OR p_quiet_ms = 0 THEN i.not_before
                ELSE greatest(i.not_before, least(v_now + headwater_interval(p_quiet_ms),
                    coalesce(i.first_pending_at, v_now) + headwater_interval(p_max_wait_ms))) END,
            processing_status = CASE WHEN before.wakes THEN 'queued' ELSE i.processing_status END,
            nudged_at = CASE WHEN before.wakes THEN v_now ELSE i.nudged_at END,
            updated_at = v_now
        FROM counted c CROSS JOIN LATERAL (
            -- A full batch ends the debounce window, but not the backoff after a failure or a deferral: last_error marks
            -- both, attempts only the former.
            SELECT f.is_full, b.quarantined_at IS NULL AND (b.processing_status = 'idle'
                OR f.is_full AND b.not_before > v_now) AS wakes
            FROM issues b CROSS JOIN LATERAL (SELECT p_quiet_events_max > 0 AND b.quarantined_at IS NULL
                AND b.pending_events + c.events >= p_quiet_events_max
                AND b.processing_status <> 'processing' AND b.last_error IS NULL) AS f (is_full)
            WHERE b.id = c.issue_id
        ) before
        WHERE i.id = c.issue_id
        RETURNING i.id, before.wakes
    )
    SELECT coalesce(array_agg(id) FILTER (WHERE wakes), '{}') INTO v_queued FROM updated;

    RETURN QUERY
    SELECT n.place, n.integration IS NOT NULL, e.issue_id, e.id, e.id = n.id, e.digest = n.digest,
        e.processed_at IS NOT NULL, e.issue_id = ANY (v_queued), i.processing_status, headwater_ms(i.not_before)
    FROM unnest(v_integration, p_key, p_digest, v_log) WITH ORDINALITY AS n (integration, key, digest, id, place)
    LEFT JOIN event_logs e ON e.integration_id = n.integration AND e.dedup_key = n.key
    LEFT JOIN issues i ON i.id = e.issue_id
    ORDER BY n.place;
END $$;
