-- Deletes a stream without entries that has no group but this one. KEYS: stream. ARGV: group. Returns: whether it was deleted.
local problem = check_type('stream', KEYS[1])
if problem then return problem end
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('XLEN', KEYS[1]) > 0 then return 0 end
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  for i = 1, #group, 2 do
    if group[i] == 'name' and group[i + 1] ~= ARGV[1] then return 0 end
  end
end
return redis.call('DEL', KEYS[1])
