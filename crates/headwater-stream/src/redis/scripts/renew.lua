-- Extends leases. KEYS: for each: lease, its epoch record. ARGV: holder, TTL of a lease in ms, TTL of a record in ms, epochs.
-- Returns for each: 1 kept, 0 lost. A value of another type counts as lost and does not affect the other leases.
local holder = ARGV[1]
local results = {}
for i = 1, #KEYS, 2 do
  local lease, record = KEYS[i], KEYS[i + 1]
  local kept = 0
  if not check_type('string', lease, record) and redis.call('GET', lease) == holder and current_epoch(lease, record) == ARGV[3 + (i + 1) / 2] then
    redis.call('PEXPIRE', record, ARGV[3])
    kept = redis.call('PEXPIRE', lease, ARGV[2])
  end
  results[#results + 1] = kept
end
return results
