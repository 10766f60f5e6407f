-- Removes a delay set. KEYS: set, entries. Answers: whether anything waited.
local set, entries = KEYS[1], KEYS[2]
local problem = foreign('zset', set) or foreign('hash', entries)
if problem then return problem end
redis.call('UNLINK', entries)
return redis.call('UNLINK', set)
