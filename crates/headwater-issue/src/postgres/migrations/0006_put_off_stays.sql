-- A run that was put off stays put off, however many events come. Arguments and answers are what they were, so this serves
-- processes of the version before as well.

-- Stores events. Keys differ within a call. Integrations that do not exist have no issue in the answer; an event log with
-- another id or digest than the one given was there before.
CREATE OR REPLACE FUNCTION headwater_record_1(
    p_integration text[], p_project text[], p_issue text[], p_source text[], p_event_type text[], p_key text[],
    p_digest bytea[], p_payload text[], p_quiet_ms bigint, p_max_wait_ms bigint,
    p_quiet_events_max bigint
) RETURNS TABLE (
    o_place bigint, o_known boolean, o_issue_id bigint, o_event_log_id bigint, o_new boolean, o_same boolean,
    o_processed boolean, o_became_queued boolean, o_status text, o_not_before bigint
) LANGUAGE plpgsql AS $$
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
        -- In the order of names: who waits here for another creator holds nothing that one can want. An event whose key
        -- was used before creates nothing.
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

    -- Ids in the order of the call, rows in the order of keys: who waits for a key holds no later one.
    SELECT array_agg(nextval('event_logs_id_seq') ORDER BY place) INTO v_log
    FROM generate_series(1, cardinality(p_key)) AS place;

    WITH inserted AS (
        INSERT INTO event_logs (id, issue_id, integration_id, source, event_type, dedup_key, digest, payload,
            payload_bytes, created_at)
        SELECT n.id, n.issue_id, n.integration, n.source, n.event_type, n.key, n.digest, n.payload::jsonb,
            -- As it will be read: numbers are written out by then.
            octet_length(n.payload::jsonb::text), v_now
        FROM unnest(v_log, v_issue, v_integration, p_source, p_event_type, p_key, p_digest, p_payload)
            AS n (id, issue_id, integration, source, event_type, key, digest, payload)
        WHERE n.issue_id IS NOT NULL
        ORDER BY n.integration, n.key COLLATE "C"
        ON CONFLICT (integration_id, dedup_key) DO NOTHING
        RETURNING issue_id
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
            -- With enough events for a run, a quiet window is over. What follows a failure, or a run that was put off, is not: the
            -- error tells that, not the attempts, for what is put off has none.
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

DO $$
DECLARE
    v_setting text;
BEGIN
    -- As for the other functions: plans by the index, and no compiler. A function that is made anew has lost its settings.
    FOREACH v_setting IN ARRAY ARRAY[
        'enable_seqscan', 'enable_bitmapscan', 'enable_hashjoin', 'enable_mergejoin', 'enable_material', 'jit'
    ] LOOP
        EXECUTE format('ALTER FUNCTION headwater_record_1 SET %I = off', v_setting);
    END LOOP;
END $$;
