CREATE OR REPLACE FUNCTION headwater_time(bigint) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT to_timestamp($1 / 1000.0) $$;
