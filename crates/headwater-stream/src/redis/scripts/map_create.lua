-- Creates a map. KEYS: map. ARGV: names and values. Returns: whether it is new.
local problem = check_type('hash', KEYS[1])
if problem then return problem end
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
