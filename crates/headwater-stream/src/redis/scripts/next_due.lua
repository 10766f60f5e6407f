-- KEYS: set. Answers: how many wait, the earliest due time or nil, the time.
local set = KEYS[1]
local problem = foreign('zset', set)
if problem then return problem end
local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
return {redis.call('ZCARD', set), first[2] or false, now_ms()}
