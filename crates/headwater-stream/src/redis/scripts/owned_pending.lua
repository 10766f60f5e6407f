-- Filters entries that are pending for the consumer.
-- KEYS: stream, then lease and its epoch record (with an epoch). ARGV: group, consumer, epoch or '', ids.
-- Returns: their ids.
local stream, group, consumer, epoch = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local problem = check_type('stream', stream) or fenced(epoch, KEYS[2], KEYS[3])
if problem then return problem end
local owned = {}
for i = 4, #ARGV do
  local rows = redis.pcall('XPENDING', stream, group, ARGV[i], ARGV[i], 1, consumer)
  if not rows.err and rows[1] then owned[#owned + 1] = ARGV[i] end
end
return owned
