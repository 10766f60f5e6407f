-- Requeues a dead outbox row as the next one of its issue. Returns no row if there is no such dead row.
CREATE OR REPLACE FUNCTION headwater_requeue_dead_outbox(p_id bigint)
RETURNS TABLE (o_id bigint)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
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
