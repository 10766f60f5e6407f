-- Resets the idle time of entries that are pending for the consumer.
-- KEYS: stream. ARGV: group, consumer, ids. Returns: the ids that are not pending for it.
local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local problem = check_type('stream', stream)
if problem then return problem end
local mine = {}
for i = 3, #ARGV do
  local rows = redis.pcall('XPENDING', stream, group, ARGV[i], ARGV[i], 1, consumer)
  if not rows.err and rows[1] then mine[#mine + 1] = ARGV[i] end
end
local kept = {}
with_ids(mine, function(...)
  local arguments = {'XCLAIM', stream, group, consumer, 0, ...}
  arguments[#arguments + 1] = 'JUSTID'
  for _, id in ipairs(redis.call(unpack(arguments))) do kept[id] = true end
end)
local lost = {}
for i = 3, #ARGV do
  if not kept[ARGV[i]] then lost[#lost + 1] = ARGV[i] end
end
return lost
