-- STABLE because `extract` is: the planner inlines it only if the volatility matches.
CREATE OR REPLACE FUNCTION headwater_ms(timestamptz) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT floor(extract(epoch FROM $1) * 1000)::bigint $$;
