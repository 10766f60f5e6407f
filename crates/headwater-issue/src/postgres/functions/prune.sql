-- Deletes delivered outbox rows and released dead letters older than p_keep_ms. Skips locked rows. Returns the larger of the
-- two counts.
CREATE OR REPLACE FUNCTION headwater_prune(p_limit bigint, p_keep_ms bigint) RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
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
