-- KEYS: set, doorbell. Answers: how many wait, the earliest due time or nil, the time, the last ring or nil.
local set, wake = KEYS[1], KEYS[2]
local problem = foreign('zset', set) or foreign('stream', wake)
if problem then return problem end
local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
local last = redis.call('XREVRANGE', wake, '+', '-', 'COUNT', 1)[1]
return {redis.call('ZCARD', set), first[2] or false, now_ms(), last and last[1] or false}
