-- Time in whole milliseconds, the resolution that callers see: a row is due exactly at the due time that was returned.
CREATE OR REPLACE FUNCTION headwater_now() RETURNS timestamptz
LANGUAGE sql VOLATILE
AS $$ SELECT date_trunc('milliseconds', clock_timestamp()) $$;
