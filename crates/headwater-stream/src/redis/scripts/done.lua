-- Acknowledges entries under a lease: the usual end of deliveries, without what the others need.
-- KEYS: stream, lease and its record. ARGV: group, epoch, ids.
-- Answers: how many were settled.
local stream, group = KEYS[1], ARGV[1]
local problem = foreign('stream', stream) or fenced(ARGV[2], KEYS[2], KEYS[3])
if problem then return problem end
local applied = 0
for first = 3, #ARGV, 1000 do
  local last = math.min(first + 999, #ARGV)
  applied = applied + redis.call('XACK', stream, group, unpack(ARGV, first, last))
end
return applied
