-- Shared functions. A script checks everything before it writes.

-- The error for the first of these keys whose value is not of type `kind`; nil if there is none.
local function check_type(kind, ...)
  for _, key in ipairs({...}) do
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= kind then return redis.error_reply('HWTYPE ' .. key) end
  end
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function to_integer(number)
  return string.format('%.0f', number)
end

-- The current epoch of a lease; nil if it is free or held by a program without epochs.
local function current_epoch(lease, record)
  local holder, known = redis.call('GET', lease), redis.call('GET', record)
  if not holder or not known then return nil end
  local epoch, by = known:match('^(%d+) (.*)$')
  if by == holder then return epoch end
end

-- The error for a stale epoch; nil if it is current or '' (no fence).
local function fenced(epoch, lease, record)
  if epoch == '' then return nil end
  local problem = check_type('string', lease, record)
  if problem then return problem end
  if current_epoch(lease, record) ~= epoch then return redis.error_reply('HWFENCED ' .. lease) end
end

-- Calls a command with many ids in batches: Lua's unpack is limited to a few thousand values.
local function with_ids(ids, call)
  for first = 1, #ids, 1000 do
    call(unpack(ids, first, math.min(first + 999, #ids)))
  end
end

-- The due time of an entry: `after` this many milliseconds from now, or `at` a time.
local function due_at(kind, ms)
  if kind == 'after' then return to_integer(now_ms() + tonumber(ms)) end
  return ms
end

-- The earliest due time of a delay set.
local function earliest(set)
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  return tonumber(first[2])
end

-- Adds an entry to a delay set and returns its id. Ids increase even if the set was deleted or flushed meanwhile.
local function add_delayed(set, entries, target, due, packed)
  local time = redis.call('TIME')
  local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local last = tonumber(redis.call('HGET', entries, 'last') or '0')
  local number = string.format('%020.0f', math.max(last + 1, micros))
  redis.call('HSET', entries, number, packed, 'last', number)
  redis.call('ZADD', set, due, number .. ':' .. target)
  return number
end

-- Notifies waiting consumers if the earliest due time moved forward.
local function notify_due(set, channel, before)
  if before and earliest(set) >= before then return end
  -- Best effort: without permission to publish, waiters poll.
  redis.pcall('PUBLISH', channel, set)
end

-- Removes an entry from its set; deletes the hash when the set is empty.
local function remove_delayed(set, entries, member, number)
  local removed = redis.call('ZREM', set, member)
  redis.call('HDEL', entries, number)
  if redis.call('EXISTS', set) == 0 then redis.call('DEL', entries) end
  return removed
end

