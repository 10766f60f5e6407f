-- Status of a new outbox row: pending if it is the first of its issue and kind that is not settled, otherwise waiting. The
-- caller holds the lock of the issue. Sees rows that were there before the calling statement began.
CREATE OR REPLACE FUNCTION headwater_outbox_status(p_issue bigint, p_kind text, p_number bigint) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN p_number > 1 OR EXISTS (SELECT 1 FROM outbox WHERE issue_id = p_issue AND kind = p_kind
        AND status IN ('waiting', 'pending', 'taken')) THEN 'waiting' ELSE 'pending' END
$$;
