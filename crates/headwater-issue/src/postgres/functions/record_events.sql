-- Stores events, each key at most once per call. p_first is the position of the first event of the same issue in the call, and
-- p_events the number of events of that issue. p_original is empty if no event has one. An unknown integration returns no issue. If the returned event log is not
-- new, the key was used before; o_same says whether its digest is the same.
CREATE OR REPLACE FUNCTION headwater_record_events(
    p_integration text[], p_project text[], p_issue text[], p_first bigint[], p_events bigint[], p_source text[],
    p_event_type text[], p_key text[], p_digest bytea[], p_payload text[], p_quiet_ms bigint, p_max_wait_ms bigint,
    p_quiet_events_max bigint, p_original bytea[], p_trace text[]
) RETURNS TABLE (
    o_place bigint, o_known boolean, o_issue_id bigint, o_event_log_id bigint, o_new boolean, o_same boolean,
    o_processed boolean, o_became_queued boolean, o_queued boolean, o_not_before timestamptz
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_integration bigint[];
    v_issue bigint[];
    v_new bigint[];
    v_created bigint[] := '{}';
    v_log bigint[];
    v_inserted bigint;
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
        v_now := headwater_now();
        IF EXISTS (SELECT 1 FROM unnest(v_integration, p_key, v_issue) AS n (integration, key, id)
            JOIN event_logs e ON e.integration_id = n.integration AND e.dedup_key = n.key WHERE n.id IS NULL) THEN
            -- An event whose key was used before creates no issue. In the order of names, so that two calls cannot deadlock.
            INSERT INTO issues (integration_id, external_project_id, external_issue_id)
            SELECT DISTINCT n.integration, n.project COLLATE "C", n.issue COLLATE "C"
            FROM unnest(v_integration, p_project, p_issue, p_key, v_issue) AS n (integration, project, issue, key, id)
            WHERE n.id IS NULL AND n.integration IS NOT NULL AND NOT EXISTS (
                SELECT 1 FROM event_logs e WHERE e.integration_id = n.integration AND e.dedup_key = n.key)
            ORDER BY 1, 2, 3
            ON CONFLICT DO NOTHING;
        ELSE
            -- New issues are created in the state that their events give them, which saves a second version of each row, and
            -- with ids of this call, which saves a second lookup.
            SELECT array_agg(CASE WHEN n.id IS NULL AND n.integration IS NOT NULL AND n.place = n.first
                THEN nextval('issues_id_seq') ELSE 0 END ORDER BY n.place) INTO v_new
            FROM unnest(v_integration, p_first, v_issue) WITH ORDINALITY AS n (integration, first, id, place);
            WITH created AS (
                INSERT INTO issues (id, integration_id, external_project_id, external_issue_id, processing_status,
                    pending_events, first_pending_at, nudged_at, not_before, created_at, updated_at)
                SELECT n.new_id, n.integration, n.project, n.issue, 'queued', n.events, v_now, v_now,
                    CASE WHEN p_quiet_ms > 0 AND NOT (p_quiet_events_max > 0 AND n.events >= p_quiet_events_max)
                        THEN least(v_now + headwater_interval(p_quiet_ms), v_now + headwater_interval(p_max_wait_ms))
                    END, v_now, v_now
                FROM unnest(v_new, v_integration, p_project, p_issue, p_events)
                    AS n (new_id, integration, project, issue, events)
                WHERE n.new_id > 0
                ORDER BY n.integration, n.project COLLATE "C", n.issue COLLATE "C"
                ON CONFLICT DO NOTHING
                RETURNING id
            )
            SELECT coalesce(array_agg(id), '{}') INTO v_created FROM created;
            IF cardinality(v_created) = cardinality(array_remove(v_new, 0)) THEN
                SELECT array_agg(coalesce(n.id, nullif(v_new[n.first], 0)) ORDER BY n.place) INTO v_issue
                FROM unnest(v_issue, p_first) WITH ORDINALITY AS n (id, first, place);
                EXIT;
            END IF;
        END IF;
    END LOOP;

    PERFORM 1 FROM issues WHERE id = ANY (v_issue) AND NOT id = ANY (v_created) ORDER BY id FOR UPDATE;
    v_now := headwater_now();

    -- Ids in the order of the call, rows in the order of keys, so that two calls cannot deadlock on keys.
    SELECT array_agg(nextval('event_logs_id_seq') ORDER BY place) INTO v_log
    FROM generate_series(1, cardinality(p_key)) AS place;

    WITH inserted AS (
        INSERT INTO event_logs (id, issue_id, integration_id, source, event_type, dedup_key, digest, payload,
            payload_bytes, trace, created_at)
        SELECT n.id, n.issue_id, n.integration, n.source, n.event_type, n.key, n.digest, parsed.payload,
            -- Size as read back: jsonb rewrites numbers.
            octet_length(parsed.payload::text), n.trace, v_now
        FROM unnest(v_log, v_issue, v_integration, p_source, p_event_type, p_key, p_digest, p_payload, p_trace)
            AS n (id, issue_id, integration, source, event_type, key, digest, payload, trace)
        -- OFFSET: parsed once, not once for each use.
        CROSS JOIN LATERAL (SELECT n.payload::jsonb AS payload OFFSET 0) parsed
        WHERE n.issue_id IS NOT NULL
        ORDER BY n.integration, n.key COLLATE "C"
        ON CONFLICT (integration_id, dedup_key) DO NOTHING
        RETURNING id, issue_id
    ), counted AS (
        SELECT issue_id, count(*) AS events FROM inserted WHERE NOT issue_id = ANY (v_created) GROUP BY issue_id
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
    SELECT (SELECT count(*) FROM inserted), coalesce(array_agg(id) FILTER (WHERE wakes), '{}')
    INTO v_inserted, v_queued FROM updated;

    IF cardinality(p_original) > 0 THEN
        INSERT INTO event_log_originals (event_log_id, body)
        SELECT e.id, n.original FROM unnest(v_log, p_original) AS n (id, original) JOIN event_logs e ON e.id = n.id
        WHERE n.original IS NOT NULL;
    END IF;

    IF v_inserted = cardinality(p_key) THEN
        RETURN QUERY
        SELECT n.place, true, n.issue_id, n.id, true, true, false, i.id = ANY (v_created) OR i.id = ANY (v_queued),
            i.processing_status = 'queued', i.not_before
        FROM unnest(v_issue, v_log) WITH ORDINALITY AS n (issue_id, id, place) JOIN issues i ON i.id = n.issue_id
        ORDER BY n.place;
        RETURN;
    END IF;

    -- Another transaction stored some of these keys after they were looked up: new issues may have fewer events than they count.
    UPDATE issues i SET pending_events = n.events,
        processing_status = CASE WHEN n.events > 0 THEN 'queued' ELSE 'idle' END,
        first_pending_at = CASE WHEN n.events > 0 THEN i.first_pending_at END,
        not_before = CASE WHEN n.events > 0 THEN i.not_before END
    FROM (SELECT c.id, (SELECT count(*) FROM event_logs e WHERE e.issue_id = c.id) AS events
        FROM unnest(v_created) AS c (id)) n
    WHERE i.id = n.id AND i.pending_events <> n.events;

    RETURN QUERY
    SELECT n.place, n.integration IS NOT NULL, e.issue_id, e.id, e.id = n.id, e.digest = n.digest,
        e.processed_at IS NOT NULL, e.issue_id = ANY (v_created) OR e.issue_id = ANY (v_queued),
        i.processing_status = 'queued', i.not_before
    FROM unnest(v_integration, p_key, p_digest, v_log) WITH ORDINALITY AS n (integration, key, digest, id, place)
    LEFT JOIN event_logs e ON e.integration_id = n.integration AND e.dedup_key = n.key
    LEFT JOIN issues i ON i.id = e.issue_id
    ORDER BY n.place;
END $$;
