-- Acquires a free lease, or extends the holder's own.
-- KEYS: lease, its epoch record. ARGV: holder, TTL of the lease in ms, TTL of the record in ms.
-- Returns: {1, epoch}, or {0, holder, remaining ms} if it is held by another holder.
local lease, record, holder = KEYS[1], KEYS[2], ARGV[1]
local problem = check_type('string', lease, record)
if problem then return problem end
local held = redis.call('GET', lease)
if held and held ~= holder then return {0, held, redis.call('PTTL', lease)} end
local epoch = current_epoch(lease, record)
if not epoch then
  local last = tonumber((redis.call('GET', record) or ''):match('^%d+') or '0')
  epoch = to_integer(math.max(last + 1, now_ms()))
end
redis.call('SET', record, epoch .. ' ' .. holder, 'PX', ARGV[3])
redis.call('SET', lease, holder, 'PX', ARGV[2])
return {1, epoch}
