-- Settles delivered entries. Follow-ups are written before acknowledgements.
-- KEYS: stream, then lease and its epoch record (with an epoch), then the keys that ARGV refers to by index.
-- ARGV: group, consumer, epoch or '', notification channel, then for each entry one of
--   ack ID | delete ID | release ID | ack_owned ID (acknowledges only if pending for the consumer)
--   append ID key fields | reschedule ID key (set; its entries key follows) after|at ms target target-and-fields
-- Returns: how many were settled.
local stream, group, consumer, epoch, channel = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]

-- Whether an owner repeats a completed delete after its lease has ended: the lease had no other holder since, and
-- every entry is to be deleted and no longer exists.
local function is_repeated_delete()
  if epoch == '' or check_type('string', KEYS[2], KEYS[3]) or redis.call('EXISTS', KEYS[2]) == 1 then return false end
  if (redis.call('GET', KEYS[3]) or ''):match('^%d+') ~= epoch then return false end
  for i = 5, #ARGV, 2 do
    local id = ARGV[i + 1]
    if ARGV[i] ~= 'delete' or #redis.call('XRANGE', stream, id, id) > 0 then return false end
    local rows = redis.pcall('XPENDING', stream, group, id, id, 1)
    if rows.err or rows[1] then return false end
  end
  return ARGV[5] ~= nil
end

local problem = check_type('stream', stream)
if not problem then
  problem = fenced(epoch, KEYS[2], KEYS[3])
  if problem and is_repeated_delete() then return 0 end
end
if problem then return problem end

local arg_count = {ack = 2, delete = 2, release = 2, ack_owned = 2, append = 4, reschedule = 7}
local checked = {}
local function check(kind, key)
  if checked[key] == kind then return nil end
  checked[key] = kind
  return check_type(kind, key)
end

local at = 5
while ARGV[at] do
  local action, key = ARGV[at], tonumber(ARGV[at + 2])
  if action == 'append' then
    problem = check('stream', KEYS[key])
  elseif action == 'reschedule' then
    problem = check('zset', KEYS[key]) or check('hash', KEYS[key + 1])
  end
  if problem then return problem end
  at = at + arg_count[action]
end

-- The pending record of an entry, if it is pending for this consumer.
local function owned_pending(id)
  local rows = redis.pcall('XPENDING', stream, group, id, id, 1, consumer)
  return not rows.err and rows[1]
end

local applied = 0
local acks, deletes = {}, {}
at = 5
while ARGV[at] do
  local action, id = ARGV[at], ARGV[at + 1]
  local row = action ~= 'ack' and action ~= 'delete' and owned_pending(id)
  if action == 'ack' then
    acks[#acks + 1] = id
  elseif action == 'delete' then
    deletes[#deletes + 1] = id
  elseif row and action == 'release' then
    redis.call('XCLAIM', stream, group, '~released', 0, id,
      'TIME', 0, 'RETRYCOUNT', math.max(row[4] - 1, 0), 'JUSTID')
    applied = applied + 1
  elseif row then
    local key = tonumber(ARGV[at + 2])
    if action == 'append' then
      redis.call('XADD', KEYS[key], '*', unpack(cmsgpack.unpack(ARGV[at + 3])))
    elseif action == 'reschedule' then
      local before = earliest(KEYS[key])
      local due = due_at(ARGV[at + 3], ARGV[at + 4])
      add_delayed(KEYS[key], KEYS[key + 1], ARGV[at + 5], due, ARGV[at + 6])
      notify_due(KEYS[key], channel, before)
    end
    applied = applied + redis.call('XACK', stream, group, id)
  end
  at = at + arg_count[action]
end

with_ids(acks, function(...)
  applied = applied + redis.call('XACK', stream, group, ...)
end)
for _, id in ipairs(deletes) do
  -- An entry that is not pending was settled before or never delivered: keep it.
  if redis.call('XACK', stream, group, id) == 1 then
    redis.call('XDEL', stream, id)
    applied = applied + 1
  end
end
return applied
