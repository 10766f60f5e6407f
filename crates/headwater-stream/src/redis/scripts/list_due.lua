-- Lists due entries, earliest first. KEYS: set. ARGV: offset, count. Returns: their members.
local problem = check_type('zset', KEYS[1])
if problem then return problem end
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', ARGV[1], ARGV[2])
