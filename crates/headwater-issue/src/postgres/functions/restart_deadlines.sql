-- After a clock step: ends waits, and restarts the leases of claims and taken outbox rows with their full TTL. Deadlines within
-- their TTL from now stay. Each process notices a step; the first one handles it, and calls within ten seconds after it do
-- nothing. Returns the number of rows left, because there are more than p_limit or other transactions have them locked; -1
-- if another process is running this function. Waits for no lock.
CREATE OR REPLACE FUNCTION headwater_restart_deadlines(
    p_claim_ttl_ms bigint, p_outbox_ttl_ms bigint, p_limit bigint
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := headwater_now();
    v_clock headwater_clock;
    v_claim_end timestamptz;
    v_outbox_end timestamptz;
    v_left bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock(7523377802141824870) THEN
        RETURN -1;
    END IF;
    SELECT * INTO v_clock FROM headwater_clock;
    IF v_clock.restarted_at <= v_now AND v_clock.restarted_at > v_now - interval '10 seconds' THEN
        RETURN 0;
    END IF;
    v_claim_end := v_now + headwater_interval(greatest(p_claim_ttl_ms, v_clock.claim_ttl_ms));
    v_outbox_end := v_now + headwater_interval(greatest(p_outbox_ttl_ms, v_clock.outbox_ttl_ms));
    -- Lock order as in all functions: issues by id, then outbox rows.
    UPDATE issues SET
        not_before = CASE WHEN not_before > v_now THEN NULL ELSE not_before END,
        first_pending_at = CASE WHEN first_pending_at > v_now THEN v_now ELSE first_pending_at END,
        -- Overdue at once, so that the sweep finds it: there may be no nudge in flight.
        nudged_at = CASE WHEN processing_status = 'queued' THEN NULL
            WHEN nudged_at > v_now THEN v_now ELSE nudged_at END,
        claim_expires_at = CASE WHEN processing_status = 'processing'
                AND (claim_expires_at <= v_now OR claim_expires_at > v_claim_end) THEN v_claim_end
            ELSE claim_expires_at END,
        updated_at = v_now
    WHERE id IN (
        SELECT id FROM issues WHERE processing_status <> 'idle'
            AND (not_before > v_now OR first_pending_at > v_now OR nudged_at > v_now
                OR (processing_status = 'processing'
                    AND (claim_expires_at <= v_now OR claim_expires_at > v_claim_end)))
        ORDER BY id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    UPDATE outbox SET due_at = CASE WHEN status = 'taken' THEN v_outbox_end ELSE v_now END
    WHERE id IN (
        SELECT id FROM outbox WHERE status IN ('waiting', 'pending', 'taken')
            AND ((status = 'taken' AND (due_at <= v_now OR due_at > v_outbox_end))
                OR (status <> 'taken' AND due_at > v_now))
        ORDER BY id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    v_left := (SELECT count(*) FROM issues WHERE processing_status <> 'idle'
            AND (not_before > v_now OR first_pending_at > v_now OR nudged_at > v_now
                OR (processing_status = 'processing'
                    AND (claim_expires_at <= v_now OR claim_expires_at > v_claim_end))))
        + (SELECT count(*) FROM outbox WHERE status IN ('waiting', 'pending', 'taken')
            AND ((status = 'taken' AND (due_at <= v_now OR due_at > v_outbox_end))
                OR (status <> 'taken' AND due_at > v_now)));
    UPDATE workers SET expires_at = v_now + (expires_at - seen_at), seen_at = v_now
    WHERE worker IN (SELECT worker FROM workers ORDER BY worker FOR UPDATE SKIP LOCKED);
    UPDATE headwater_clock SET seen_at = v_now, restarted_at = CASE WHEN v_left = 0 THEN v_now END;
    RETURN v_left;
END $$;
