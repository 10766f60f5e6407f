-- Order follows ids and not times, since the clock may be set back: which event logs an issue had when a run was committed.
-- By triggers, so that it holds whichever version of a function writes the row. Both run under the lock of the issue. A
-- transaction that records an event holds that lock until its commit, so what the triggers see is exact.
ALTER TABLE issues ADD COLUMN IF NOT EXISTS completed_event_log_id bigint;
ALTER TABLE outbox ADD COLUMN IF NOT EXISTS newest_event_log_id bigint;

CREATE OR REPLACE FUNCTION headwater_note_completion() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    NEW.completed_event_log_id :=
        (SELECT e.id FROM event_logs e WHERE e.issue_id = NEW.id ORDER BY e.id DESC LIMIT 1);
    RETURN NEW;
END $$;

CREATE OR REPLACE FUNCTION headwater_note_reply() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    NEW.newest_event_log_id :=
        (SELECT e.id FROM event_logs e WHERE e.issue_id = NEW.issue_id ORDER BY e.id DESC LIMIT 1);
    RETURN NEW;
END $$;

DROP TRIGGER IF EXISTS headwater_note_completion ON issues;
CREATE TRIGGER headwater_note_completion BEFORE UPDATE OF completed_epoch ON issues
    FOR EACH ROW WHEN (NEW.completed_epoch > OLD.completed_epoch) EXECUTE FUNCTION headwater_note_completion();
DROP TRIGGER IF EXISTS headwater_note_reply ON outbox;
CREATE TRIGGER headwater_note_reply BEFORE INSERT ON outbox
    FOR EACH ROW WHEN (NEW.kind = 'reply') EXECUTE FUNCTION headwater_note_reply();

-- Asked beside a claim. A function, and volatile, because it must see what was committed while the claim waited for its lock.
CREATE OR REPLACE FUNCTION headwater_completed_event_log_1(p_issue bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN (SELECT completed_event_log_id FROM issues WHERE id = p_issue);
END $$;

-- What the clock showed when it was last looked at: a process that connects and finds it earlier knows that it was set back.
-- For how long the process with the longest settings holds claims and rows of the outbox. When deadlines were last restarted.
CREATE TABLE IF NOT EXISTS headwater_clock (
    seen_at timestamptz NOT NULL, claim_ttl_ms bigint NOT NULL DEFAULT 0, outbox_ttl_ms bigint NOT NULL DEFAULT 0,
    restarted_at timestamptz
);
INSERT INTO headwater_clock (seen_at) SELECT headwater_now() WHERE NOT EXISTS (SELECT 1 FROM headwater_clock);

-- The clock was set: ends waits, and gives those who hold something their whole time again. A deadline that was set after the
-- step, within its time, is left alone. Each process notices a step by itself; the first one deals with it, and those that come
-- within ten seconds find it done. Returns how many rows are left, because there are more than `p_limit` of a kind or because
-- other transactions have them locked; -1 if another process is at it. Waits for no lock.
CREATE OR REPLACE FUNCTION headwater_restart_deadlines_1(
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
    -- Issues before rows of the outbox, in the order of their ids, as all functions lock them.
    UPDATE issues SET
        not_before = CASE WHEN not_before > v_now THEN NULL ELSE not_before END,
        first_pending_at = CASE WHEN first_pending_at > v_now THEN v_now ELSE first_pending_at END,
        -- Overdue at once: no nudge may be on its way.
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

DO $$
DECLARE
    v_function text;
    v_setting text;
BEGIN
    -- As for the other functions: plans by the index, and no compiler.
    FOREACH v_function IN ARRAY ARRAY[
        'headwater_note_completion', 'headwater_note_reply', 'headwater_completed_event_log_1'
    ] LOOP
        FOREACH v_setting IN ARRAY ARRAY['enable_seqscan', 'enable_bitmapscan', 'enable_sort', 'jit'] LOOP
            EXECUTE format('ALTER FUNCTION %I SET %I = off', v_function, v_setting);
        END LOOP;
    END LOOP;
END $$;
