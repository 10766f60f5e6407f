-- Statistics of a stream.
-- KEYS: stream. Returns: nil, or length, first id, last id, last generated id, entries ever added, newest deleted id
--   (both nil before Redis 7.0), bytes, groups
--   (each: name, pending, lag, last delivered id, consumers (each: name, pending, idle in ms)).
local stream = KEYS[1]
local problem = check_type('stream', stream)
if problem then return problem end
if redis.call('EXISTS', stream) == 0 then return false end

local function fields(list)
  local map = {}
  for i = 1, #list, 2 do map[list[i]] = list[i + 1] end
  return map
end

local info = fields(redis.call('XINFO', 'STREAM', stream))
local bytes = redis.pcall('MEMORY', 'USAGE', stream)
local groups = {}
for _, list in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  local group = fields(list)
  local consumers = {}
  for _, each in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group.name)) do
    local consumer = fields(each)
    consumers[#consumers + 1] = {consumer.name, consumer.pending, consumer.idle}
  end
  groups[#groups + 1] =
    {group.name, group.pending, group.lag or false, group['last-delivered-id'], consumers}
end
local first, last = info['first-entry'], info['last-entry']
return {
  info.length,
  first and first[1],
  last and last[1],
  info['last-generated-id'],
  info['entries-added'] or false,
  info['max-deleted-entry-id'] or false,
  type(bytes) == 'number' and bytes,
  groups,
}
