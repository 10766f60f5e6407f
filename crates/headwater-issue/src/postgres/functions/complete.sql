-- Completes runs: marks their event logs processed and writes their outbox rows. Each pair of issue and epoch is named at
-- most once per call; event logs and outbox rows refer to their run by its position. A row of issue_runs that exists, because
-- tables were changed by hand, stays: history never prevents a completion.
CREATE OR REPLACE FUNCTION headwater_complete(
    p_issue bigint[], p_epoch bigint[], p_fields text[], p_discussions text[], p_log_run bigint[], p_log_id bigint[],
    p_outbox_run bigint[], p_kind text[], p_target text[], p_idempotency_key text[], p_payload text[],
    p_fields_bytes_max bigint
) RETURNS TABLE (o_place bigint, o_repeated boolean, o_status text, o_not_before bigint)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
DECLARE
    v_now timestamptz;
    v_held bigint[];
    v_events bigint[];
    v_large record;
BEGIN
    PERFORM 1 FROM issues WHERE id = ANY (p_issue) ORDER BY id FOR UPDATE;
    v_now := headwater_now();

    RETURN QUERY
    SELECT n.place, true, i.processing_status, headwater_ms(i.not_before)
    FROM unnest(p_issue, p_epoch) WITH ORDINALITY AS n (issue, epoch, place)
    JOIN issues i ON i.id = n.issue AND i.completed_epoch = n.epoch AND n.epoch > 0;

    SELECT array_agg(CASE WHEN i.id IS NOT NULL THEN n.place END ORDER BY n.place) INTO v_held
    FROM unnest(p_issue, p_epoch) WITH ORDINALITY AS n (issue, epoch, place)
    LEFT JOIN issues i ON i.id = n.issue AND i.claim_epoch = n.epoch AND i.processing_status = 'processing';

    IF cardinality(p_outbox_run) > 0 THEN
        INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, created_at,
            newest_event_log_id)
        SELECT i.id, i.integration_id, n.kind, n.target, n.key, n.payload::jsonb,
            headwater_outbox_status(i.id, n.kind,
                row_number() OVER (PARTITION BY n.run, n.kind ORDER BY n.place)), v_now, v_now,
            (SELECT max(e.id) FROM event_logs e WHERE e.issue_id = i.id)
        FROM unnest(p_outbox_run, p_kind, p_target, p_idempotency_key, p_payload) WITH ORDINALITY
            AS n (run, kind, target, key, payload, place)
        JOIN issues i ON i.id = p_issue[n.run]
        WHERE v_held[n.run] IS NOT NULL
        ORDER BY n.place;
        PERFORM pg_notify('headwater_outbox', '');
    END IF;

    -- Number of event logs that each run processed, in the order of runs.
    WITH processed AS (
        UPDATE event_logs e SET processed_at = v_now, processing_error = NULL
        FROM unnest(p_log_run, p_log_id) AS done (run, id)
        WHERE v_held[done.run] IS NOT NULL AND e.id = done.id AND e.issue_id = p_issue[done.run]
            AND e.processed_at IS NULL
        RETURNING done.run
    ), counted AS (
        SELECT place, 0 AS events FROM generate_series(1, cardinality(p_issue)) AS place
        UNION ALL SELECT run, 1 FROM processed
    )
    SELECT array_agg(events ORDER BY place) INTO v_events
    FROM (SELECT place, sum(events) AS events FROM counted GROUP BY place) AS run;

    RETURN QUERY
    WITH d AS (
        SELECT n.place, i.id, i.claim_epoch, i.claim_owner, i.processing_started_at, n.events,
            i.pending_events - n.events AS left_over, n.fields::jsonb AS fields, n.discussions::jsonb AS discussions
        FROM unnest(v_held, p_issue, v_events, p_fields, p_discussions) AS n (place, issue, events, fields, discussions)
        JOIN issues i ON i.id = n.issue
        WHERE n.place IS NOT NULL
    ), ended AS (
        INSERT INTO issue_runs (issue_id, epoch, worker, claimed_at, ended_at, result, events)
        SELECT id, claim_epoch, coalesce(claim_owner, ''), coalesce(processing_started_at, v_now), v_now, 'done', events
        FROM d
        ON CONFLICT DO NOTHING
    )
    UPDATE issues i SET
        pending_events = greatest(d.left_over, 0),
        processing_status = CASE WHEN d.left_over > 0 THEN 'queued' ELSE 'idle' END,
        completed_epoch = i.claim_epoch,
        completed_event_log_id = (SELECT max(e.id) FROM event_logs e WHERE e.issue_id = i.id), claim_owner = NULL, claim_expires_at = NULL,
        not_before = CASE WHEN d.left_over > 0 THEN i.not_before END,
        first_pending_at = CASE WHEN d.left_over > 0 THEN coalesce(i.first_pending_at, v_now) END,
        nudged_at = CASE WHEN d.left_over > 0 THEN v_now ELSE i.nudged_at END,
        attempts = 0, crashes = 0, superseded = 0, last_error = NULL,
        fields = CASE WHEN d.fields IS NULL THEN i.fields ELSE (i.fields || d.fields) - ARRAY(
            SELECT change.key FROM jsonb_each(d.fields) change WHERE change.value = 'null') END,
        discussions = coalesce(d.discussions, i.discussions),
        last_processed_at = v_now, updated_at = v_now
    FROM d WHERE i.id = d.id
    RETURNING d.place, false, i.processing_status, headwater_ms(i.not_before);

    SELECT i.id, octet_length(i.fields::text) AS bytes INTO v_large
    FROM unnest(v_held, p_issue, p_fields) AS n (place, issue, fields) JOIN issues i ON i.id = n.issue
    WHERE n.place IS NOT NULL AND n.fields IS NOT NULL AND octet_length(i.fields::text) > p_fields_bytes_max LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'fields of issue % would have % bytes; the limit is %',
            v_large.id, v_large.bytes, p_fields_bytes_max USING ERRCODE = 'string_data_right_truncation';
    END IF;

    IF array_position(v_held, NULL) IS NOT NULL THEN
        UPDATE issue_runs r SET result = 'fenced'
        FROM unnest(v_held, p_issue, p_epoch) AS n (place, issue, epoch)
        WHERE n.place IS NULL AND r.issue_id = n.issue AND r.epoch = n.epoch AND r.result = 'expired';
    END IF;
END $$;
