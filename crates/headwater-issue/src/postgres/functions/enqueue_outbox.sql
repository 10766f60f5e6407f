-- Writes outbox rows of an issue in the caller's transaction, each key at most once per call. Returns no rows if the issue does
-- not exist. If a key was used for a different row, nothing is written and o_same is false. Takes the lock of the issue, as
-- completions do, so that ids grow in commit order.
CREATE OR REPLACE FUNCTION headwater_enqueue_outbox(p_issue bigint, p_key text[], p_kind text[], p_target text[], p_payload text[])
RETURNS TABLE (o_id bigint, o_duplicate boolean, o_same boolean)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
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
        INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, created_at,
            newest_event_log_id)
        SELECT i.id, i.integration_id, n.kind, n.target, n.key, n.payload::jsonb,
            headwater_outbox_status(p_issue, n.kind, row_number() OVER (PARTITION BY n.kind ORDER BY n.place)),
            v_now, v_now, (SELECT max(e.id) FROM event_logs e WHERE e.issue_id = p_issue)
        FROM issues i CROSS JOIN unnest(v_known, v_key, p_kind, p_target, p_payload) WITH ORDINALITY
            AS n (known, key, kind, target, payload, place)
        WHERE i.id = p_issue AND n.known IS NULL
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
