-- What all scripts share. A script checks first and changes afterwards.

-- The error for the first of these keys that holds something else than `kind`.
local function foreign(kind, ...)
  for _, key in ipairs({...}) do
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= kind then return redis.error_reply('HWTYPE ' .. key) end
  end
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function whole(number)
  return string.format('%.0f', number)
end

-- The epoch in which a lease is held now: none if nobody holds it, or a program that knows no epochs.
local function current_epoch(lease, record)
  local holder, known = redis.call('GET', lease), redis.call('GET', record)
  if not holder or not known then return nil end
  local epoch, by = known:match('^(%d+) (.*)$')
  if by == holder then return epoch end
end

-- The error for whoever presents an epoch that is not current; '' presents none.
local function fenced(epoch, lease, record)
  if epoch == '' then return nil end
  local problem = foreign('string', lease, record)
  if problem then return problem end
  if current_epoch(lease, record) ~= epoch then return redis.error_reply('HWFENCED ' .. lease) end
end

-- Calls a command with many ids, a part of them at a time: Lua hands over no more than some thousand values.
local function with_ids(ids, call)
  for first = 1, #ids, 1000 do
    call(unpack(ids, first, math.min(first + 999, #ids)))
  end
end

-- When an entry is due: `after` so many milliseconds from now, or `at` a time.
local function due_at(kind, ms)
  if kind == 'after' then return whole(now_ms() + tonumber(ms)) end
  return ms
end

-- The earliest due time of a delay set.
local function earliest(set)
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  return tonumber(first[2])
end

-- Puts an entry aside and returns its number. Numbers grow, also when the set was deleted or flushed meanwhile.
local function put_aside(set, entries, target, due, packed)
  local time = redis.call('TIME')
  local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local last = tonumber(redis.call('HGET', entries, 'last') or '0')
  local number = string.format('%020.0f', math.max(last + 1, micros))
  redis.call('HSET', entries, number, packed, 'last', number)
  redis.call('ZADD', set, due, number .. ':' .. target)
  return number
end

-- Tells those who wait for a due time later than the one that is now the earliest.
local function ring(set, channel, before)
  if before and earliest(set) >= before then return end
  -- A hint: whoever may not be told will find out.
  redis.pcall('PUBLISH', channel, set)
end

-- Takes an entry out of its set, and what surrounds the set when nothing is left.
local function take_out(set, entries, member, number)
  local removed = redis.call('ZREM', set, member)
  redis.call('HDEL', entries, number)
  if redis.call('EXISTS', set) == 0 then redis.call('DEL', entries) end
  return removed
end

