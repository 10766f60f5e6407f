-- Renames a stream, unless the target has entries. KEYS: stream, target. Returns: whether it was renamed.
local problem = check_type('stream', KEYS[1], KEYS[2])
if problem then return problem end
if KEYS[1] == KEYS[2] or redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if redis.call('XLEN', KEYS[2]) > 0 then return 0 end
redis.call('RENAME', KEYS[1], KEYS[2])
return 1
