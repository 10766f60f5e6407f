-- Completes runs: marks their event logs processed and writes their outbox rows. Each pair of issue and epoch is named at
-- most once per call, in the order of issues; event logs and outbox rows name their run by its position. p_changes says
-- whether p_fields or p_discussions has a value. Returns a row per run that is completed, now or earlier. A row
-- of issue_runs that exists, because tables were changed by hand, stays: history never prevents a completion.
CREATE OR REPLACE FUNCTION headwater_complete_runs(
    p_issue bigint[], p_epoch bigint[], p_changes boolean, p_fields text[], p_discussions text[],
    p_log_run bigint[], p_log_issue bigint[], p_log_id bigint[],
    p_outbox_run bigint[], p_outbox_issue bigint[], p_kind text[], p_target text[], p_idempotency_key text[],
    p_payload text[], p_fields_bytes_max bigint
) RETURNS TABLE (o_place bigint, o_repeated boolean, o_queued boolean, o_not_before timestamptz)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_now timestamptz;
    v_fenced bigint[];
    v_events bigint[];
    v_owners text[];
    v_started timestamptz[];
    v_large record;
BEGIN
    -- Locks in the order of ids, like every function.
    SELECT coalesce(array_agg(n.place) FILTER (WHERE l.held IS NOT TRUE), '{}'), array_agg(l.claim_owner ORDER BY n.place),
        array_agg(l.processing_started_at ORDER BY n.place)
    INTO v_fenced, v_owners, v_started
    FROM unnest(p_issue, p_epoch) WITH ORDINALITY AS n (issue, epoch, place)
    LEFT JOIN LATERAL (
        SELECT i.claim_epoch = n.epoch AND i.processing_status = 'processing' AS held, i.claim_owner,
            i.processing_started_at
        FROM issues i WHERE i.id = n.issue FOR UPDATE
    ) l ON true;
    v_now := headwater_now();

    IF cardinality(v_fenced) > 0 THEN
        RETURN QUERY
        SELECT n.place, true, i.processing_status = 'queued', i.not_before
        FROM unnest(p_issue, p_epoch) WITH ORDINALITY AS n (issue, epoch, place)
        JOIN issues i ON i.id = n.issue AND i.completed_epoch = n.epoch AND n.epoch > 0;
    END IF;

    IF cardinality(p_outbox_run) > 0 THEN
        INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, created_at,
            newest_event_log_id)
        SELECT i.id, i.integration_id, n.kind, n.target, n.key, n.payload::jsonb,
            headwater_outbox_status(i.id, n.kind,
                row_number() OVER (PARTITION BY n.run, n.kind ORDER BY n.place)), v_now, v_now,
            (SELECT max(e.id) FROM event_logs e WHERE e.issue_id = i.id)
        FROM unnest(p_outbox_run, p_outbox_issue, p_kind, p_target, p_idempotency_key, p_payload) WITH ORDINALITY
            AS n (run, issue, kind, target, key, payload, place)
        JOIN issues i ON i.id = n.issue
        WHERE NOT n.run = ANY (v_fenced)
        ORDER BY n.place;
        PERFORM pg_notify('headwater_outbox', '');
    END IF;

    -- Number of event logs that each run processed, in the order of runs.
    WITH processed AS (
        UPDATE event_logs e SET processed_at = v_now, processing_error = NULL
        FROM unnest(p_log_run, p_log_issue, p_log_id) AS done (run, issue, id)
        WHERE NOT done.run = ANY (v_fenced) AND e.id = done.id AND e.issue_id = done.issue AND e.processed_at IS NULL
        RETURNING done.run
    ), counted AS (
        SELECT place, 0 AS events FROM generate_series(1, cardinality(p_issue)) AS place
        UNION ALL SELECT run, 1 FROM processed
    )
    SELECT array_agg(run.events ORDER BY run.place) INTO v_events
    FROM (SELECT place, sum(events) AS events FROM counted GROUP BY place) AS run;

    RETURN QUERY
    WITH ended AS (
        INSERT INTO issue_runs (issue_id, epoch, worker, claimed_at, ended_at, result, events)
        SELECT n.issue, n.epoch, coalesce(n.owner, ''), coalesce(n.started, v_now), v_now, 'done', n.events
        FROM unnest(p_issue, p_epoch, v_owners, v_started, v_events) WITH ORDINALITY
            AS n (issue, epoch, owner, started, events, place)
        -- Not ON CONFLICT, which writes twice as much: the issue is locked, so no other transaction adds this row.
        WHERE NOT n.place = ANY (v_fenced)
            AND NOT EXISTS (SELECT FROM issue_runs r WHERE r.issue_id = n.issue AND r.epoch = n.epoch)
    )
    UPDATE issues i SET
        pending_events = greatest(i.pending_events - n.events, 0),
        processing_status = CASE WHEN i.pending_events > n.events THEN 'queued' ELSE 'idle' END,
        completed_epoch = i.claim_epoch,
        completed_event_log_id = (SELECT max(e.id) FROM event_logs e WHERE e.issue_id = i.id),
        claim_owner = NULL, claim_expires_at = NULL,
        not_before = CASE WHEN i.pending_events > n.events THEN i.not_before END,
        first_pending_at = CASE WHEN i.pending_events > n.events THEN coalesce(i.first_pending_at, v_now) END,
        nudged_at = CASE WHEN i.pending_events > n.events THEN v_now ELSE i.nudged_at END,
        attempts = 0, crashes = 0, superseded = 0, last_error = NULL,
        fields = CASE WHEN n.fields IS NULL THEN i.fields ELSE (i.fields || n.fields::jsonb) - ARRAY(
            SELECT change.key FROM jsonb_each(n.fields::jsonb) change WHERE change.value = 'null') END,
        discussions = CASE WHEN n.discussions IS NULL THEN i.discussions ELSE n.discussions::jsonb END,
        last_processed_at = v_now, updated_at = v_now
    FROM unnest(p_issue, v_events, p_fields, p_discussions) WITH ORDINALITY
        AS n (issue, events, fields, discussions, place)
    WHERE i.id = n.issue AND NOT n.place = ANY (v_fenced)
    RETURNING n.place, false, i.processing_status = 'queued', i.not_before;

    IF cardinality(v_fenced) > 0 THEN
        UPDATE issue_runs r SET result = 'fenced'
        FROM unnest(p_issue, p_epoch) WITH ORDINALITY AS n (issue, epoch, place)
        WHERE n.place = ANY (v_fenced) AND r.issue_id = n.issue AND r.epoch = n.epoch AND r.result = 'expired';
    END IF;

    IF p_changes THEN
        SELECT i.id, octet_length(i.fields::text) AS bytes INTO v_large
        FROM unnest(p_issue, p_fields) WITH ORDINALITY AS n (issue, fields, place) JOIN issues i ON i.id = n.issue
        WHERE n.fields IS NOT NULL AND NOT n.place = ANY (v_fenced)
            AND octet_length(i.fields::text) > p_fields_bytes_max LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'fields of issue % would have % bytes; the limit is %',
                v_large.id, v_large.bytes, p_fields_bytes_max USING ERRCODE = 'string_data_right_truncation';
        END IF;
    END IF;
END $$;
