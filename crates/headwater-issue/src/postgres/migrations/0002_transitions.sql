-- The transitions of issues, one round trip each. Every function first locks the issues it may change, in the order of
-- their ids, and then looks at them: each statement of a function sees what was committed before it began, and a locked
-- issue changes no more. That order is the same in all functions, so no two calls wait for each other for good.
--
-- Every access is by an index and every set is small, whatever the planner thinks: it keeps the plans of functions, and
-- those made while the tables were empty would read all of them long after they have grown. Hence the settings at the
-- end: without them a batch of 64 took 20 to 40 times as long on 200,000 issues, until the tables were next analyzed.
--
-- A later version of this program that needs other arguments or answers adds functions with the next number.

-- Stores events. Keys differ within a call. Integrations that do not exist have no issue in the answer; an event log with
-- another id or digest than the one given was there before.
CREATE FUNCTION headwater_record_1(
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
            -- With enough events for a run, a quiet window is over; a backoff, which follows a failure, is not.
            SELECT f.is_full, b.quarantined_at IS NULL AND (b.processing_status = 'idle'
                OR f.is_full AND b.not_before > v_now) AS wakes
            FROM issues b CROSS JOIN LATERAL (SELECT p_quiet_events_max > 0 AND b.quarantined_at IS NULL
                AND b.pending_events + c.events >= p_quiet_events_max
                AND b.processing_status <> 'processing' AND b.attempts = 0) AS f (is_full)
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

-- Keeps why issues were quarantined: on their oldest unprocessed event logs, and as a dead letter of each. The issues are
-- locked and say so already.
CREATE FUNCTION headwater_bury_1(p_issue bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(p_issue) > 0 THEN
        UPDATE event_logs e SET processing_error = oldest.error
        FROM (SELECT i.last_error AS error, l.id FROM issues i CROSS JOIN LATERAL (
            -- No run has more of them.
            SELECT id FROM event_logs WHERE issue_id = i.id AND processed_at IS NULL ORDER BY id LIMIT 1000
        ) l WHERE i.id = ANY (p_issue)) oldest
        WHERE e.id = oldest.id;
        INSERT INTO dead_letters (issue_id, error, attempts, crashes, pending_events, event_log_id, quarantined_at)
        SELECT i.id, coalesce(i.last_error, ''), i.attempts, i.crashes, i.pending_events,
            coalesce((SELECT min(e.id) FROM event_logs e WHERE e.issue_id = i.id AND e.processed_at IS NULL), 0),
            i.quarantined_at
        FROM issues i WHERE i.id = ANY (p_issue) ORDER BY i.id;
    END IF;
END $$;

-- Claims issues, each named once, and brings the oldest unprocessed event logs of those that were won.
CREATE FUNCTION headwater_claim_1(
    p_issue bigint[], p_worker text, p_ttl_ms bigint, p_events_max bigint, p_bytes_max bigint, p_crashes_max bigint
) RETURNS TABLE (
    o_id bigint, o_integration text, o_provider text, o_project text, o_issue text, o_status text,
    o_pending_events bigint, o_claim_epoch bigint, o_claim_owner text, o_claim_expires_at bigint, o_not_before bigint,
    o_attempts bigint, o_crashes bigint, o_superseded bigint, o_quarantined_at bigint, o_last_error text, o_fields text,
    o_discussions text, o_processing_started_at bigint, o_last_processed_at bigint, o_nudged_at bigint,
    o_created_at bigint, o_updated_at bigint, o_won boolean, o_quarantined_now boolean, o_now bigint,
    o_log_ids bigint[], o_sources text[], o_event_types text[], o_keys text[], o_payloads text[],
    o_log_created_at bigint[], o_errors text[]
) LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz;
    v_won bigint[];
    v_quarantined bigint[];
BEGIN
    PERFORM 1 FROM issues WHERE id = ANY (p_issue) ORDER BY id FOR UPDATE;
    v_now := headwater_now();

    WITH decided AS (
        SELECT i.id, i.expired, i.expired AND i.crashes + 1 >= p_crashes_max AS quarantines,
            (i.processing_status = 'queued'
                OR (i.expired AND i.crashes + 1 < p_crashes_max AND i.pending_events > 0))
                AND coalesce(i.not_before <= v_now, true) AS wins
        FROM (
            -- A claim without an end is none of ours; left alone it would never end.
            SELECT *, processing_status = 'processing' AND coalesce(claim_expires_at <= v_now, true) AS expired
            FROM issues WHERE id = ANY (p_issue)
        ) i
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
                THEN 'the claim of worker ' || coalesce(i.claim_owner, '') || ' ran out' ELSE i.last_error END,
            nudged_at = CASE WHEN d.expired AND NOT d.quarantines AND i.pending_events > 0
                THEN v_now ELSE i.nudged_at END,
            quarantined_at = CASE WHEN d.quarantines THEN v_now ELSE i.quarantined_at END,
            updated_at = v_now
        FROM decided d WHERE d.id = i.id AND (d.wins OR d.expired)
        RETURNING i.id, d.wins, d.quarantines
    )
    SELECT coalesce(array_agg(id) FILTER (WHERE wins), '{}'), coalesce(array_agg(id) FILTER (WHERE quarantines), '{}')
    INTO v_won, v_quarantined FROM updated;
    PERFORM headwater_bury_1(v_quarantined);

    RETURN QUERY
    SELECT i.id, g.name, g.provider, i.external_project_id, i.external_issue_id, i.processing_status, i.pending_events,
        i.claim_epoch, i.claim_owner, headwater_ms(i.claim_expires_at), headwater_ms(i.not_before), i.attempts,
        i.crashes, i.superseded, headwater_ms(i.quarantined_at), i.last_error, i.fields::text, i.discussions::text,
        headwater_ms(i.processing_started_at), headwater_ms(i.last_processed_at), headwater_ms(i.nudged_at),
        headwater_ms(i.created_at), headwater_ms(i.updated_at), i.id = ANY (v_won), i.id = ANY (v_quarantined),
        headwater_ms(v_now), logs.ids, logs.sources, logs.event_types, logs.keys, logs.payloads, logs.created_at,
        logs.errors
    FROM issues i JOIN integrations g ON g.id = i.integration_id
    LEFT JOIN LATERAL (
        SELECT array_agg(e.id ORDER BY e.id) AS ids, array_agg(e.source ORDER BY e.id) AS sources,
            array_agg(e.event_type ORDER BY e.id) AS event_types, array_agg(e.dedup_key ORDER BY e.id) AS keys,
            array_agg(e.payload::text ORDER BY e.id) AS payloads,
            array_agg(headwater_ms(e.created_at) ORDER BY e.id) AS created_at,
            array_agg(e.processing_error ORDER BY e.id) AS errors
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

CREATE FUNCTION headwater_heartbeat_1(p_issue bigint[], p_epoch bigint[], p_ttl_ms bigint)
RETURNS TABLE (o_issue_id bigint, o_epoch bigint, o_expires_at bigint, o_pending_events bigint)
LANGUAGE plpgsql AS $$
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

-- What a new row of the outbox is: the first one of its kind and issue that has none on its way can go, others wait. Only
-- under the lock of the issue, and with what was there before the statement that asks began.
CREATE FUNCTION headwater_outbox_status(p_issue bigint, p_kind text, p_number bigint) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN p_number > 1 OR EXISTS (SELECT 1 FROM outbox WHERE issue_id = p_issue AND kind = p_kind
        AND status IN ('waiting', 'pending', 'taken')) THEN 'waiting' ELSE 'pending' END
$$;

-- Completes runs; an issue and an epoch are named together once. Event logs and outbox rows name their run by its place.
CREATE FUNCTION headwater_complete_1(
    p_issue bigint[], p_epoch bigint[], p_fields text[], p_discussions text[], p_log_run bigint[], p_log_id bigint[],
    p_outbox_run bigint[], p_kind text[], p_target text[], p_idempotency_key text[], p_payload text[],
    p_fields_bytes_max bigint
) RETURNS TABLE (o_place bigint, o_repeated boolean, o_status text, o_not_before bigint)
LANGUAGE plpgsql AS $$
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
        INSERT INTO outbox (issue_id, kind, target, idempotency_key, payload, status, due_at, created_at)
        SELECT p_issue[n.run], n.kind, n.target, n.key, n.payload::jsonb,
            headwater_outbox_status(p_issue[n.run], n.kind,
                row_number() OVER (PARTITION BY n.run, n.kind ORDER BY n.place)), v_now, v_now
        FROM unnest(p_outbox_run, p_kind, p_target, p_idempotency_key, p_payload) WITH ORDINALITY
            AS n (run, kind, target, key, payload, place)
        WHERE v_held[n.run] IS NOT NULL
        ORDER BY n.place;
        PERFORM pg_notify('headwater_outbox', '');
    END IF;

    -- How many event logs each run has processed, in the order of runs.
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
    UPDATE issues i SET
        pending_events = greatest(d.left_over, 0),
        processing_status = CASE WHEN d.left_over > 0 THEN 'queued' ELSE 'idle' END,
        completed_epoch = i.claim_epoch, claim_owner = NULL, claim_expires_at = NULL,
        not_before = CASE WHEN d.left_over > 0 THEN i.not_before END,
        first_pending_at = CASE WHEN d.left_over > 0 THEN coalesce(i.first_pending_at, v_now) END,
        nudged_at = CASE WHEN d.left_over > 0 THEN v_now ELSE i.nudged_at END,
        attempts = 0, crashes = 0, superseded = 0, last_error = NULL,
        fields = CASE WHEN d.fields IS NULL THEN i.fields ELSE (i.fields || d.fields) - ARRAY(
            SELECT change.key FROM jsonb_each(d.fields) change WHERE change.value = 'null') END,
        discussions = coalesce(d.discussions, i.discussions),
        last_processed_at = v_now, updated_at = v_now
    FROM (
        SELECT n.place, i.id, i.pending_events - n.events AS left_over, n.fields::jsonb AS fields,
            n.discussions::jsonb AS discussions
        FROM unnest(v_held, p_issue, v_events, p_fields, p_discussions) AS n (place, issue, events, fields, discussions)
        JOIN issues i ON i.id = n.issue
        WHERE n.place IS NOT NULL
    ) d WHERE i.id = d.id
    RETURNING d.place, false, i.processing_status, headwater_ms(i.not_before);

    SELECT i.id, octet_length(i.fields::text) AS bytes INTO v_large
    FROM unnest(v_held, p_issue, p_fields) AS n (place, issue, fields) JOIN issues i ON i.id = n.issue
    WHERE n.place IS NOT NULL AND n.fields IS NOT NULL AND octet_length(i.fields::text) > p_fields_bytes_max LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the fields of issue % would have % bytes, at most % are allowed',
            v_large.id, v_large.bytes, p_fields_bytes_max USING ERRCODE = 'string_data_right_truncation';
    END IF;
END $$;

-- Puts rows into the outbox of an issue, in the transaction of a caller. Keys differ within a call. No answer: there is no
-- such issue. A key that was used for another row: nothing is written. Under the lock of the issue, as completions write
-- theirs, so that ids grow in the order of commits.
CREATE FUNCTION headwater_outbox_1(p_issue bigint, p_key text[], p_kind text[], p_target text[], p_payload text[])
RETURNS TABLE (o_id bigint, o_duplicate boolean, o_same boolean)
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz;
    v_key text[];
    v_known bigint[];
    v_same boolean[];
BEGIN
    PERFORM 1 FROM issues WHERE id = p_issue FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_now := headwater_now();

    SELECT array_agg(identity || '-' || p_issue || ':' || n.key ORDER BY n.place) INTO v_key
    FROM headwater_identity, unnest(p_key) WITH ORDINALITY AS n (key, place);

    SELECT array_agg(o.id ORDER BY n.place),
        array_agg(coalesce(o.kind = n.kind AND o.target = n.target AND o.payload = n.payload::jsonb, true)
            ORDER BY n.place)
    INTO v_known, v_same
    FROM unnest(v_key, p_kind, p_target, p_payload) WITH ORDINALITY AS n (key, kind, target, payload, place)
    LEFT JOIN outbox o ON o.idempotency_key = n.key;

    IF NOT false = ANY (v_same) THEN
        INSERT INTO outbox (issue_id, kind, target, idempotency_key, payload, status, due_at, created_at)
        SELECT p_issue, n.kind, n.target, n.key, n.payload::jsonb,
            headwater_outbox_status(p_issue, n.kind, row_number() OVER (PARTITION BY n.kind ORDER BY n.place)),
            v_now, v_now
        FROM unnest(v_known, v_key, p_kind, p_target, p_payload) WITH ORDINALITY
            AS n (known, key, kind, target, payload, place)
        WHERE n.known IS NULL
        ORDER BY n.place;
        IF FOUND THEN
            PERFORM pg_notify('headwater_outbox', '');
        END IF;
    END IF;

    RETURN QUERY
    SELECT coalesce(o.id, 0), n.known IS NOT NULL, n.same
    FROM unnest(v_key, v_known, v_same) WITH ORDINALITY AS n (key, known, same, place)
    LEFT JOIN outbox o ON o.idempotency_key = n.key
    ORDER BY n.place;
END $$;

-- Ends failed runs. `p_after_ms` is null where trying again is of no use. An issue and an epoch are named together once.
CREATE FUNCTION headwater_fail_1(
    p_issue bigint[], p_epoch bigint[], p_error text[], p_after_ms bigint[], p_attempts_max bigint, p_events_max bigint
) RETURNS TABLE (o_issue_id bigint, o_epoch bigint, o_attempts bigint, o_quarantined boolean, o_not_before bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz;
    v_quarantined bigint[];
BEGIN
    PERFORM 1 FROM issues WHERE id = ANY (p_issue) ORDER BY id FOR UPDATE;
    v_now := headwater_now();
    SELECT coalesce(array_agg(i.id), '{}') INTO v_quarantined
    FROM unnest(p_issue, p_epoch, p_after_ms) AS n (issue, epoch, after_ms)
    JOIN issues i ON i.id = n.issue AND i.claim_epoch = n.epoch AND i.processing_status = 'processing'
    WHERE n.after_ms IS NULL OR i.attempts + 1 >= p_attempts_max;
    RETURN QUERY
    WITH held AS (
        SELECT i.id, n.error, n.after_ms, i.id = ANY (v_quarantined) AS quarantines
        FROM unnest(p_issue, p_epoch, p_error, p_after_ms) AS n (issue, epoch, error, after_ms)
        JOIN issues i ON i.id = n.issue AND i.claim_epoch = n.epoch AND i.processing_status = 'processing'
    ), kept AS (
        UPDATE event_logs e SET processing_error = oldest.error
        FROM (SELECT h.error, l.id FROM held h CROSS JOIN LATERAL (
            SELECT id FROM event_logs WHERE issue_id = h.id AND processed_at IS NULL ORDER BY id LIMIT p_events_max
        ) l) oldest
        WHERE e.id = oldest.id
    )
    UPDATE issues i SET
        attempts = i.attempts + 1, last_error = h.error, claim_owner = NULL, claim_expires_at = NULL,
        processing_status = CASE WHEN h.quarantines OR i.pending_events = 0 THEN 'idle' ELSE 'queued' END,
        quarantined_at = CASE WHEN h.quarantines THEN v_now END,
        not_before = CASE WHEN NOT h.quarantines AND i.pending_events > 0
            THEN greatest(i.not_before, v_now + headwater_interval(h.after_ms)) END,
        first_pending_at = CASE WHEN h.quarantines THEN i.first_pending_at
            WHEN i.pending_events > 0 THEN coalesce(i.first_pending_at, v_now) END,
        nudged_at = CASE WHEN h.quarantines OR i.pending_events = 0 THEN i.nudged_at ELSE v_now END,
        updated_at = v_now
    FROM held h WHERE i.id = h.id
    RETURNING i.id, i.claim_epoch, i.attempts, h.quarantines, headwater_ms(coalesce(i.not_before, v_now));
    PERFORM headwater_bury_1(v_quarantined);
END $$;

-- Ends claims that came to nothing. An issue and an epoch are named together once.
CREATE FUNCTION headwater_give_back_1(p_issue bigint[], p_epoch bigint[], p_superseded boolean[])
RETURNS TABLE (o_issue_id bigint, o_epoch bigint, o_not_before bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz;
BEGIN
    PERFORM 1 FROM issues WHERE id = ANY (p_issue) ORDER BY id FOR UPDATE;
    v_now := headwater_now();
    RETURN QUERY
    UPDATE issues i SET
        superseded = i.superseded + n.superseded::int, claim_owner = NULL, claim_expires_at = NULL,
        processing_status = CASE WHEN i.pending_events > 0 THEN 'queued' ELSE 'idle' END,
        not_before = CASE WHEN i.pending_events > 0 THEN i.not_before END,
        first_pending_at = CASE WHEN i.pending_events > 0 THEN coalesce(i.first_pending_at, v_now) END,
        nudged_at = CASE WHEN i.pending_events > 0 THEN v_now ELSE i.nudged_at END,
        updated_at = v_now
    FROM unnest(p_issue, p_epoch, p_superseded) AS n (issue, epoch, superseded)
    WHERE i.id = n.issue AND i.claim_epoch = n.epoch AND i.processing_status = 'processing'
    RETURNING i.id, i.claim_epoch, headwater_ms(i.not_before);
END $$;

-- Requeues claims that have run out and finds overdue nudges; passes by what others hold.
CREATE FUNCTION headwater_sweep_1(p_limit bigint, p_overdue_ms bigint, p_crashes_max bigint)
RETURNS TABLE (o_issue_id bigint, o_event_log_id bigint, o_requeued boolean, o_quarantined boolean, o_nudge boolean)
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := headwater_now();
    v_expired bigint[];
    v_overdue bigint[];
    v_quarantined bigint[];
BEGIN
    SELECT coalesce(array_agg(id), '{}') INTO v_expired FROM (
        SELECT id FROM issues WHERE processing_status = 'processing'
            AND coalesce(claim_expires_at, '-infinity'::timestamptz) <= v_now
        ORDER BY coalesce(claim_expires_at, '-infinity'::timestamptz) LIMIT p_limit FOR UPDATE SKIP LOCKED) e;
    SELECT coalesce(array_agg(id), '{}') INTO v_overdue FROM (
        SELECT id FROM issues WHERE processing_status = 'queued'
            AND coalesce(greatest(nudged_at, not_before), '-infinity'::timestamptz)
                <= v_now - headwater_interval(p_overdue_ms)
        ORDER BY coalesce(greatest(nudged_at, not_before), '-infinity'::timestamptz)
        LIMIT p_limit FOR UPDATE SKIP LOCKED) o;

    SELECT coalesce(array_agg(id), '{}') INTO v_quarantined
    FROM issues WHERE id = ANY (v_expired) AND crashes + 1 >= p_crashes_max;

    RETURN QUERY
    UPDATE issues i SET
        crashes = i.crashes + 1, claim_owner = NULL, claim_expires_at = NULL,
        last_error = 'the claim of worker ' || coalesce(i.claim_owner, '') || ' ran out',
        processing_status = CASE WHEN d.quarantines OR i.pending_events = 0 THEN 'idle' ELSE 'queued' END,
        quarantined_at = CASE WHEN d.quarantines THEN v_now END,
        not_before = CASE WHEN NOT d.quarantines AND i.pending_events > 0 THEN i.not_before END,
        first_pending_at = CASE WHEN d.quarantines THEN i.first_pending_at
            WHEN i.pending_events > 0 THEN coalesce(i.first_pending_at, v_now) END,
        nudged_at = CASE WHEN d.quarantines OR i.pending_events = 0 THEN i.nudged_at ELSE v_now END,
        updated_at = v_now
    FROM (SELECT id, id = ANY (v_quarantined) AS quarantines FROM unnest(v_expired) AS id) d
    WHERE i.id = d.id
    RETURNING i.id,
        coalesce((SELECT min(e.id) FROM event_logs e WHERE e.issue_id = i.id AND e.processed_at IS NULL), 0),
        i.processing_status = 'queued', d.quarantines,
        i.processing_status = 'queued' AND coalesce(i.not_before <= v_now, true);
    PERFORM headwater_bury_1(v_quarantined);

    RETURN QUERY
    UPDATE issues i SET nudged_at = v_now, updated_at = v_now WHERE i.id = ANY (v_overdue)
    RETURNING i.id,
        coalesce((SELECT min(e.id) FROM event_logs e WHERE e.issue_id = i.id AND e.processed_at IS NULL), 0),
        false, false, true;
END $$;

-- Removes delivered rows of the outbox, and dead letters of issues that were released, when they were kept for long enough;
-- passes by what others hold. Returns how many of the more numerous.
CREATE FUNCTION headwater_prune_1(p_limit bigint, p_keep_ms bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_old timestamptz := headwater_now() - headwater_interval(p_keep_ms);
    v_rows bigint;
    v_letters bigint;
BEGIN
    DELETE FROM outbox o USING (SELECT id FROM outbox WHERE status = 'delivered' AND delivered_at <= v_old
        ORDER BY delivered_at LIMIT p_limit FOR UPDATE SKIP LOCKED) old WHERE o.id = old.id;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    DELETE FROM dead_letters d USING (SELECT id FROM dead_letters WHERE released_at <= v_old
        ORDER BY released_at LIMIT p_limit FOR UPDATE SKIP LOCKED) old WHERE d.id = old.id;
    GET DIAGNOSTICS v_letters = ROW_COUNT;
    RETURN greatest(v_rows, v_letters);
END $$;

-- Takes rows of the outbox that are due, the longest due first; passes by what others hold. A row that was taken and whose
-- time is over has cost a deliverer.
CREATE FUNCTION headwater_take_1(p_worker text, p_limit bigint, p_ttl_ms bigint)
RETURNS TABLE (
    o_id bigint, o_issue_id bigint, o_integration text, o_provider text, o_project text, o_issue text, o_kind text,
    o_target text, o_idempotency_key text, o_payload text, o_deliveries bigint, o_attempts bigint, o_created_at bigint,
    o_crashes bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := headwater_now();
BEGIN
    RETURN QUERY
    WITH due AS (
        SELECT id FROM outbox WHERE status IN ('pending', 'taken') AND due_at <= v_now
        ORDER BY due_at, id LIMIT p_limit FOR UPDATE SKIP LOCKED
    ), o AS (
        UPDATE outbox SET status = 'taken', deliveries = outbox.deliveries + 1, taken_by = p_worker,
            crashes = outbox.crashes + CASE WHEN outbox.status = 'taken' THEN 1 ELSE 0 END,
            due_at = v_now + headwater_interval(p_ttl_ms)
        FROM due WHERE outbox.id = due.id RETURNING outbox.*
    )
    SELECT o.id, o.issue_id, g.name, g.provider, i.external_project_id, i.external_issue_id, o.kind, o.target,
        o.idempotency_key, o.payload::text, o.deliveries, o.attempts, headwater_ms(o.created_at), o.crashes
    FROM o JOIN issues i ON i.id = o.issue_id JOIN integrations g ON g.id = i.integration_id
    ORDER BY o.id;
END $$;

-- Ends deliveries, each row named once. A row that has gone, or is dead, lets the next one of its kind and issue go: under the
-- lock of the issue, or a row that is written at the same moment would wait for one that is gone.
CREATE FUNCTION headwater_settle_1(
    p_id bigint[], p_deliveries bigint[], p_status text[], p_attempts bigint[], p_after_ms bigint[], p_error text[]
) RETURNS TABLE (o_id bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz;
    v_done bigint[];
    v_freed bigint[];
    v_freed_kind text[];
BEGIN
    PERFORM 1 FROM issues WHERE id IN (SELECT issue_id FROM outbox WHERE id = ANY (p_id)) ORDER BY id FOR UPDATE;
    v_now := headwater_now();
    WITH ended AS (
        UPDATE outbox o SET
            status = n.status, attempts = o.attempts + n.attempts, taken_by = NULL,
            due_at = coalesce(v_now + headwater_interval(n.after_ms), o.due_at),
            last_error = coalesce(n.error, o.last_error),
            delivered_at = CASE WHEN n.status = 'delivered' THEN v_now END
        FROM unnest(p_id, p_deliveries, p_status, p_attempts, p_after_ms, p_error)
            AS n (id, deliveries, status, attempts, after_ms, error)
        WHERE o.id = n.id AND o.deliveries = n.deliveries AND o.status = 'taken'
        RETURNING o.id, o.issue_id, o.kind, o.status
    )
    SELECT array_agg(id), array_agg(issue_id) FILTER (WHERE status IN ('delivered', 'dead')),
        array_agg(kind) FILTER (WHERE status IN ('delivered', 'dead'))
    INTO v_done, v_freed, v_freed_kind FROM ended;

    -- Of one kind and issue only one row is in hand, so none is named twice.
    UPDATE outbox o SET status = 'pending'
    FROM unnest(v_freed, v_freed_kind) AS freed (issue_id, kind)
    WHERE o.id = (SELECT w.id FROM outbox w WHERE w.issue_id = freed.issue_id AND w.kind = freed.kind
        AND w.status IN ('waiting', 'pending', 'taken') ORDER BY w.id LIMIT 1) AND o.status = 'waiting';
    RETURN QUERY SELECT unnest(v_done);
END $$;

-- Lets a dead row go again, as the next one of its issue. No answer: there is no such dead row.
CREATE FUNCTION headwater_revive_1(p_id bigint)
RETURNS TABLE (o_id bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz;
BEGIN
    PERFORM 1 FROM issues WHERE id = (SELECT issue_id FROM outbox WHERE id = p_id) FOR UPDATE;
    v_now := headwater_now();
    RETURN QUERY
    UPDATE outbox o SET status = headwater_outbox_status(o.issue_id, o.kind, 1), attempts = 0, crashes = 0, due_at = v_now
    WHERE o.id = p_id AND o.status = 'dead'
    RETURNING o.id;
    PERFORM pg_notify('headwater_outbox', '');
END $$;

-- An operator ends a quarantine, or (`p_retry`) any wait.
CREATE FUNCTION headwater_free_1(p_issue bigint, p_retry boolean)
RETURNS TABLE (o_was_quarantined boolean, o_changed boolean, o_status text)
LANGUAGE plpgsql AS $$
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
            -- Overdue at once: operators send no nudge.
            nudged_at = NULL,
            updated_at = v_now
        FROM decided d WHERE i.id = d.id AND (d.frees OR d.hurries)
        RETURNING i.id, i.processing_status
    )
    SELECT d.frees, u.id IS NOT NULL, coalesce(u.processing_status, i.processing_status)
    FROM decided d JOIN issues i ON i.id = d.id LEFT JOIN updated u ON u.id = d.id;
END $$;

DO $$
DECLARE
    v_function regprocedure;
    v_setting text;
BEGIN
    FOR v_function IN
        SELECT oid FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
            AND proname IN ('headwater_record_1', 'headwater_claim_1', 'headwater_heartbeat_1', 'headwater_complete_1',
                'headwater_bury_1', 'headwater_prune_1', 'headwater_outbox_1', 'headwater_take_1', 'headwater_settle_1', 'headwater_revive_1',
                'headwater_fail_1', 'headwater_give_back_1', 'headwater_sweep_1', 'headwater_free_1')
    LOOP
        -- A plan that is forced onto an index looks expensive, and what looks expensive would be compiled first: a second
        -- of work for a statement of a millisecond.
        FOREACH v_setting IN ARRAY ARRAY[
            'enable_seqscan', 'enable_bitmapscan', 'enable_hashjoin', 'enable_mergejoin', 'enable_material', 'jit'
        ] LOOP
            EXECUTE format('ALTER FUNCTION %s SET %I = off', v_function, v_setting);
        END LOOP;
    END LOOP;
END $$;

-- The oldest first, by the index, however many there are.
ALTER FUNCTION headwater_sweep_1 SET enable_sort = off;
ALTER FUNCTION headwater_take_1 SET enable_sort = off;
