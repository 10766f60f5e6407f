-- Creates a group. KEYS: stream, and the map of the condition. ARGV: group, start, condition: 'always' (a missing stream is
-- created), 'stream' (it exists), or 'map' and a field (the stream exists, or the map does and lacks the field).
-- Returns: 1 created, 0 it existed, -1 the condition does not hold.
local problem = check_type('stream', KEYS[1]) or (KEYS[2] and check_type('hash', KEYS[2]))
if problem then return problem end
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    for i = 1, #group, 2 do
      if group[i] == 'name' and group[i + 1] == ARGV[1] then return 0 end
    end
  end
elseif ARGV[3] == 'stream' then
  return -1
elseif ARGV[3] == 'map' and (redis.call('EXISTS', KEYS[2]) == 0 or redis.call('HGET', KEYS[2], ARGV[4])) then
  return -1
end
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], ARGV[2], 'MKSTREAM')
return 1
