-- Reads leases. KEYS: for each: lease, its epoch record.
-- Returns for each: nil if free, or holder, epoch ('0' if it has none), remaining ms. A value of another type has no holder ('')
-- and no expiry (-1).
local results = {}
for i = 1, #KEYS, 2 do
  local lease, record = KEYS[i], KEYS[i + 1]
  local result
  if check_type('string', lease, record) then
    result = {'', '0', -1}
  else
    local holder = redis.call('GET', lease)
    result = holder and {holder, current_epoch(lease, record) or '0', redis.call('PTTL', lease)}
  end
  results[#results + 1] = result
end
return results
