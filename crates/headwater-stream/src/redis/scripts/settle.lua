-- Ends deliveries. Follow-ups come first, acknowledgements second.
-- KEYS: stream, then lease and its record (with an epoch), then what ARGV points to.
-- ARGV: group, consumer, epoch or '', channel to tell of due times, then for each entry one of
--   done ID | delete ID | release ID | held ID
--   append ID key fields | aside ID key (set; entries follow it) after|at ms target target-and-fields
-- Answers: how many were settled.
local stream, group, consumer, epoch, channel = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]

-- Whether an owner whose lease has ended repeats what it did: the lease has had no other holder since, and all entries that
-- are to be deleted are gone.
local function is_repeated_delete()
  if epoch == '' or foreign('string', KEYS[2], KEYS[3]) or redis.call('EXISTS', KEYS[2]) == 1 then return false end
  if (redis.call('GET', KEYS[3]) or ''):match('^%d+') ~= epoch then return false end
  for i = 5, #ARGV, 2 do
    local id = ARGV[i + 1]
    if ARGV[i] ~= 'delete' or #redis.call('XRANGE', stream, id, id) > 0 then return false end
    local rows = redis.pcall('XPENDING', stream, group, id, id, 1)
    if rows.err or rows[1] then return false end
  end
  return ARGV[5] ~= nil
end

local problem = foreign('stream', stream)
if not problem then
  problem = fenced(epoch, KEYS[2], KEYS[3])
  if problem and is_repeated_delete() then return 0 end
end
if problem then return problem end

local words = {done = 2, delete = 2, release = 2, held = 2, append = 4, aside = 7}
local checked = {}
local function check(kind, key)
  if checked[key] == kind then return nil end
  checked[key] = kind
  return foreign(kind, key)
end

local at = 5
while ARGV[at] do
  local what, key = ARGV[at], tonumber(ARGV[at + 2])
  if what == 'append' then
    problem = check('stream', KEYS[key])
  elseif what == 'aside' then
    problem = check('zset', KEYS[key]) or check('hash', KEYS[key + 1])
  end
  if problem then return problem end
  at = at + words[what]
end

-- What the group knows of an entry that this consumer has in hand.
local function in_hand(id)
  local rows = redis.pcall('XPENDING', stream, group, id, id, 1, consumer)
  return not rows.err and rows[1]
end

local applied = 0
local done, delete = {}, {}
at = 5
while ARGV[at] do
  local what, id = ARGV[at], ARGV[at + 1]
  local row = what ~= 'done' and what ~= 'delete' and in_hand(id)
  if what == 'done' then
    done[#done + 1] = id
  elseif what == 'delete' then
    delete[#delete + 1] = id
  elseif row and what == 'release' then
    redis.call('XCLAIM', stream, group, '~released', 0, id,
      'TIME', 0, 'RETRYCOUNT', math.max(row[4] - 1, 0), 'JUSTID')
    applied = applied + 1
  elseif row then
    local key = tonumber(ARGV[at + 2])
    if what == 'append' then
      redis.call('XADD', KEYS[key], '*', unpack(cmsgpack.unpack(ARGV[at + 3])))
    elseif what == 'aside' then
      local before = earliest(KEYS[key])
      local due = due_at(ARGV[at + 3], ARGV[at + 4])
      put_aside(KEYS[key], KEYS[key + 1], ARGV[at + 5], due, ARGV[at + 6])
      ring(KEYS[key], channel, before)
    end
    applied = applied + redis.call('XACK', stream, group, id)
  end
  at = at + words[what]
end

with_ids(done, function(...)
  applied = applied + redis.call('XACK', stream, group, ...)
end)
for _, id in ipairs(delete) do
  -- What is not pending was settled before, or never delivered: it stays.
  if redis.call('XACK', stream, group, id) == 1 then
    redis.call('XDEL', stream, id)
    applied = applied + 1
  end
end
return applied
