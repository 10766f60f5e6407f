-- Takes over pending entries.
-- KEYS: stream, then lease and its epoch record (with an epoch).
-- ARGV: group, consumer, epoch or '', minimum idle time in ms, cursor or '', count, then
--   anyone | others | consumer NAME | ids ID... | own ID... (pending for the consumer; not one more delivery)
-- Returns: entries, their delivery counts, ids of deleted entries, the next cursor or nil.
local stream, group, consumer, epoch = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local min_idle, cursor, count, from = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6]), ARGV[7]
local problem = check_type('stream', stream) or fenced(epoch, KEYS[2], KEYS[3])
if problem then return problem end

local rows, next_cursor = {}, false
if from == 'ids' or from == 'own' then
  -- Distinguishes a missing group from an entry that is not pending.
  local none = redis.pcall('XPENDING', stream, group, '-', '+', 1)
  if none.err then return none end
  for i = 8, math.min(#ARGV, 7 + count) do
    local row = redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1)[1]
    if row and (from == 'ids' or row[2] == consumer) then rows[#rows + 1] = row end
  end
else
  local start = cursor == '' and '-' or '(' .. cursor
  if from == 'consumer' then
    rows = redis.pcall('XPENDING', stream, group, start, '+', count, ARGV[8])
  else
    rows = redis.pcall('XPENDING', stream, group, start, '+', count)
  end
  if rows.err then return rows end
  if #rows == count then next_cursor = rows[#rows][1] end
end

local ids, deliveries = {}, {}
for _, row in ipairs(rows) do
  if row[3] >= min_idle and not (from == 'others' and row[2] == consumer) and not deliveries[row[1]] then
    ids[#ids + 1] = row[1]
    deliveries[row[1]] = from == 'own' and row[4] or row[4] + 1
  end
end

local entries, counts, found = {}, {}, {}
local function take(claimed)
  for _, entry in ipairs(claimed) do
    -- Servers before Redis 7 return nil for a deleted entry.
    if entry then
      entries[#entries + 1] = entry
      counts[#counts + 1] = deliveries[entry[1]]
      found[entry[1]] = true
    end
  end
end
if from == 'own' then
  for _, id in ipairs(ids) do
    take(redis.call('XCLAIM', stream, group, consumer, 0, id, 'RETRYCOUNT', deliveries[id]))
  end
else
  with_ids(ids, function(...) take(redis.call('XCLAIM', stream, group, consumer, 0, ...)) end)
end
local deleted = {}
for _, id in ipairs(ids) do
  if not found[id] then deleted[#deleted + 1] = id end
end
with_ids(deleted, function(...) redis.call('XACK', stream, group, ...) end)
return {entries, counts, deleted, next_cursor}
