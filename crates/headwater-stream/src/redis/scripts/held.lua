-- Which of these entries the consumer has in hand.
-- KEYS: stream, then lease and its record (with an epoch). ARGV: group, consumer, epoch or '', ids.
-- Answers: their ids.
local stream, group, consumer, epoch = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local problem = foreign('stream', stream) or fenced(epoch, KEYS[2], KEYS[3])
if problem then return problem end
local held = {}
for i = 4, #ARGV do
  local rows = redis.pcall('XPENDING', stream, group, ARGV[i], ARGV[i], 1, consumer)
  if not rows.err and rows[1] then held[#held + 1] = ARGV[i] end
end
return held
