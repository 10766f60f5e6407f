-- Acknowledges entries with a fence. Fast path of settle.lua: what is wrong is found out only if something is.
-- KEYS: stream, lease and its epoch record. ARGV: group, epoch, ids.
-- Returns: how many were settled.
local stream, group = KEYS[1], ARGV[1]
local holder, known = redis.pcall('GET', KEYS[2]), redis.pcall('GET', KEYS[3])
-- The same as `current_epoch`; a table is the error of a value of another type.
local is_current = type(holder) == 'string' and known == ARGV[2] .. ' ' .. holder
-- Without ids, no XACK would find a stream of another type.
if not is_current or #ARGV < 3 then
  local problem = check_type('stream', stream) or fenced(ARGV[2], KEYS[2], KEYS[3])
  if problem then return problem end
end
local applied = 0
for first = 3, #ARGV, 1000 do
  local last = math.min(first + 999, #ARGV)
  local acknowledged = redis.pcall('XACK', stream, group, unpack(ARGV, first, last))
  if type(acknowledged) == 'table' then
    -- The first call fails if the stream is of another type, so nothing was written. Other errors are raised as anywhere.
    return check_type('stream', stream) or redis.call('XACK', stream, group, unpack(ARGV, first, last))
  end
  applied = applied + acknowledged
end
return applied
