CREATE OR REPLACE FUNCTION headwater_each(text) RETURNS TABLE (value text)
LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT jsonb_array_elements_text($1::jsonb) $$;
