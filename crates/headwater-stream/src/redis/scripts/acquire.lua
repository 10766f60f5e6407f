-- Takes a lease that is free, or one's own again.
-- KEYS: lease, its record. ARGV: holder, life of the lease in ms, life of the record in ms.
-- Answers: {1, epoch}, or {0, holder, remaining ms} if somebody else has it.
local lease, record, holder = KEYS[1], KEYS[2], ARGV[1]
local problem = foreign('string', lease, record)
if problem then return problem end
local held = redis.call('GET', lease)
if held and held ~= holder then return {0, held, redis.call('PTTL', lease)} end
local epoch = current_epoch(lease, record)
if not epoch then
  local last = tonumber((redis.call('GET', record) or ''):match('^%d+') or '0')
  epoch = whole(math.max(last + 1, now_ms()))
end
redis.call('SET', record, epoch .. ' ' .. holder, 'PX', ARGV[3])
redis.call('SET', lease, holder, 'PX', ARGV[2])
return {1, epoch}
