-- Acknowledges entries with a fence. Fast path of settle.lua.
-- KEYS: stream, lease and its epoch record. ARGV: group, epoch, ids.
-- Returns: how many were settled.
local stream, group = KEYS[1], ARGV[1]
local problem = check_type('stream', stream) or fenced(ARGV[2], KEYS[2], KEYS[3])
if problem then return problem end
local applied = 0
for first = 3, #ARGV, 1000 do
  local last = math.min(first + 999, #ARGV)
  applied = applied + redis.call('XACK', stream, group, unpack(ARGV, first, last))
end
return applied
