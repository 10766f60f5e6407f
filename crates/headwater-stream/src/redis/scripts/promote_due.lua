-- Moves due entries that are still in the set to their streams.
-- KEYS: set, entries, target streams. ARGV: for each: member, id, index of the target's key.
-- Returns for each: {0} not found, {1, entry id} moved, {2, error} its stream cannot take it, {3} its fields are missing.
local set, entries = KEYS[1], KEYS[2]
local problem = check_type('zset', set) or check_type('hash', entries)
if problem then return problem end
local results = {}
for i = 1, #ARGV, 3 do
  local member, number, target = ARGV[i], ARGV[i + 1], KEYS[tonumber(ARGV[i + 2])]
  local result = {0}
  if redis.call('ZSCORE', set, member) then
    local packed = redis.call('HGET', entries, number)
    if not packed then
      remove_delayed(set, entries, member, number)
      result = {3}
    else
      local id = redis.pcall('XADD', target, '*', unpack(cmsgpack.unpack(packed), 2))
      if type(id) == 'table' and string.find(id.err, 'OOM command not allowed', 1, true) then
        -- Only the first write of a script can be rejected: nothing is moved. It is sent again with the flag allow-oom.
        return redis.error_reply('OOM command not allowed: the server is at its memory limit')
      elseif type(id) == 'table' then
        result = {2, id.err}
      else
        remove_delayed(set, entries, member, number)
        result = {1, id}
      end
    end
  end
  results[#results + 1] = result
end
return results
