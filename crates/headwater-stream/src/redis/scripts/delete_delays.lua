-- Removes a delay set. KEYS: set, entries, doorbell. Answers: whether anything waited.
local set, entries, wake = KEYS[1], KEYS[2], KEYS[3]
local problem = foreign('zset', set) or foreign('hash', entries) or foreign('stream', wake)
if problem then return problem end
redis.call('UNLINK', entries, wake)
return redis.call('UNLINK', set)
