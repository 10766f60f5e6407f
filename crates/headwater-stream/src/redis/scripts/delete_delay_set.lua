-- Deletes a delay set. KEYS: set, entries. Returns: whether it existed.
local set, entries = KEYS[1], KEYS[2]
local problem = check_type('zset', set) or check_type('hash', entries)
if problem then return problem end
redis.call('UNLINK', entries)
return redis.call('UNLINK', set)
