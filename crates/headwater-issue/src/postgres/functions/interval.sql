CREATE OR REPLACE FUNCTION headwater_interval(bigint) RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT $1 * interval '1 millisecond' $$;
