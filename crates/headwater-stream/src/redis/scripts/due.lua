-- Lists entries that are due, earliest first. KEYS: set. ARGV: offset, count. Answers: their members.
local problem = foreign('zset', KEYS[1])
if problem then return problem end
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', ARGV[1], ARGV[2])
