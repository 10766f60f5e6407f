-- Removes idle consumers without pending entries.
-- KEYS: stream. ARGV: group, minimum idle time in ms, optionally the only name to remove. Returns: their names.
local stream, group, min_idle, only = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
local problem = check_type('stream', stream)
if problem then return problem end
local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
if consumers.err then return consumers end
local removed = {}
for _, list in ipairs(consumers) do
  local consumer = {}
  for i = 1, #list, 2 do consumer[list[i]] = list[i + 1] end
  if consumer.pending == 0 and consumer.idle >= min_idle and (not only or consumer.name == only) then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer.name)
    removed[#removed + 1] = consumer.name
  end
end
return removed
