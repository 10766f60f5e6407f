-- Releases leases. KEYS: for each: lease, its epoch record. ARGV: holder, notification channel, epochs.
-- Returns for each: 1 released, 0 not held. A value of another type counts as not held and is kept.
local holder, channel = ARGV[1], ARGV[2]
local results = {}
for i = 1, #KEYS, 2 do
  local lease, record = KEYS[i], KEYS[i + 1]
  local released = 0
  if not check_type('string', lease, record) and redis.call('GET', lease) == holder and current_epoch(lease, record) == ARGV[2 + (i + 1) / 2] then
    released = redis.call('DEL', lease)
    -- Best effort: without permission to publish, others find the free lease by polling.
    redis.pcall('PUBLISH', channel, lease)
  end
  results[#results + 1] = released
end
return results
