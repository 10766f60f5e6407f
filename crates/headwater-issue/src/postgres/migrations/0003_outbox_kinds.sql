-- The first of these databases had one order for all rows of an issue; now replies and events each have their own. What
-- waited behind a row of the other kind would wait for ever: only the end of a row of its own kind lets it go.
DO $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM pg_indexes WHERE schemaname = current_schema()
            AND indexname = 'idx_outbox_order' AND indexdef LIKE '%(issue_id, kind, id)%') THEN
        DROP INDEX IF EXISTS idx_outbox_order;
        CREATE INDEX idx_outbox_order ON outbox (issue_id, kind, id) WHERE status IN ('waiting', 'pending', 'taken');
    END IF;
END $$;
CREATE INDEX IF NOT EXISTS idx_outbox_delivered_at ON outbox (delivered_at) WHERE status = 'delivered';

UPDATE outbox SET status = 'pending' WHERE id IN (
    SELECT min(id) FROM outbox WHERE status IN ('waiting', 'pending', 'taken') GROUP BY issue_id, kind
    HAVING NOT bool_or(status IN ('pending', 'taken')));

-- Their functions are those of that time, too. The next migration makes all of them anew.
DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN
        SELECT oid FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
            AND (proname ~ '^headwater_[a-z_]+_1$' OR proname = 'headwater_outbox_status')
    LOOP
        EXECUTE format('DROP FUNCTION %s', v_function);
    END LOOP;
END $$;
