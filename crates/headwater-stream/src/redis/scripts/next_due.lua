-- State of a delay set. KEYS: set. Returns: number of entries, the earliest due time or nil, the current time.
local set = KEYS[1]
local problem = check_type('zset', set)
if problem then return problem end
local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
return {redis.call('ZCARD', set), first[2] or false, now_ms()}
