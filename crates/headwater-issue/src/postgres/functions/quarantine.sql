-- Records why issues were quarantined: on their oldest unprocessed event logs, and as one dead letter each. The caller has
-- locked the issues and set quarantined_at.
CREATE OR REPLACE FUNCTION headwater_quarantine(p_issue bigint[]) RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET jit = off
AS $$
BEGIN
    IF cardinality(p_issue) > 0 THEN
        UPDATE event_logs e SET processing_error = oldest.error
        FROM (SELECT i.last_error AS error, l.id FROM issues i CROSS JOIN LATERAL (
            -- A run has at most this many events.
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
