-- Removes the oldest entries of a stream: exactly, or (with slack) approximately and only beyond the slack.
-- KEYS: stream. ARGV: maximum entries, maximum age in ms, maximum bytes ('' = unlimited), 'safe' or 'force', slack ('' = exact).
-- Returns: entries removed, 1 if entries remain only because a group needs them.
local stream = KEYS[1]
local keep, max_age, max_bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local force, slack = ARGV[4] == 'force', tonumber(ARGV[5])

local problem = check_type('stream', stream)
if problem then return problem end
local length = redis.call('XLEN', stream)
if length == 0 then return {0, 0} end

if max_bytes then
  local bytes = redis.call('MEMORY', 'USAGE', stream)
  if bytes > max_bytes then
    keep = math.min(keep or length, math.floor(length * max_bytes / bytes))
  end
end
local oldest = max_age and to_integer(math.max(now_ms() - max_age, 0)) .. '-0'
if slack and not oldest and (not keep or length <= keep + slack) then return {0, 0} end

local function increment(digits)
  local head, nines = digits:match('^(.-)(9*)$')
  local zeros = ('0'):rep(#nines)
  if head == '' then return '1' .. zeros end
  return head:sub(1, -2) .. string.char(head:byte(-1) + 1) .. zeros
end

local function next_id(id)
  local ms, seq = id:match('^(%d+)%-(%d+)$')
  if seq == '18446744073709551615' then return increment(ms) .. '-0' end
  return ms .. '-' .. increment(seq)
end

-- Ids are pairs of 64-bit numbers, which do not fit Lua's numbers: they are compared as strings of digits.
local function is_before(a, b)
  local a_ms, a_seq = a:match('^(%d+)%-(%d+)$')
  local b_ms, b_seq = b:match('^(%d+)%-(%d+)$')
  if a_ms == b_ms then a_ms, b_ms = a_seq, b_seq end
  if #a_ms ~= #b_ms then return #a_ms < #b_ms end
  return a_ms < b_ms
end

local function field(map, name)
  for i = 1, #map, 2 do
    if map[i] == name then return map[i + 1] end
  end
end

-- The first id that a group still needs; nil without groups.
local bound
if not force then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local needed
    if field(group, 'pending') > 0 then
      needed = redis.call('XPENDING', stream, field(group, 'name'), '-', '+', 1)[1][1]
    else
      needed = next_id(field(group, 'last-delivered-id'))
    end
    if not bound or is_before(needed, bound) then bound = needed end
  end
end

local removed = 0
if oldest then
  local cutoff = oldest
  if bound and is_before(bound, cutoff) then cutoff = bound end
  removed = removed + redis.call('XTRIM', stream, 'MINID', slack and '~' or '=', cutoff)
end

local excess = keep and redis.call('XLEN', stream) - keep or 0
if excess > (slack or 0) then
  if not bound then
    removed = removed + redis.call('XTRIM', stream, 'MAXLEN', slack and '~' or '=', keep)
  else
    -- Whole nodes first: at most `excess` entries, and none that is needed.
    local gone = redis.call('XTRIM', stream, 'MINID', '~', bound, 'LIMIT', excess)
    removed, excess = removed + gone, excess - gone
    while not slack and excess > 0 do
      local rest = redis.call('XRANGE', stream, '-', '(' .. bound, 'COUNT', math.min(excess, 100))
      if #rest == 0 then break end
      gone = redis.call('XTRIM', stream, 'MINID', '=', next_id(rest[#rest][1]))
      removed, excess = removed + gone, excess - gone
    end
  end
end

local held_back = 0
if bound then
  -- An approximate trim leaves up to one node of entries that no group holds back.
  local rest = slack and slack + 100 or 0
  if keep and redis.call('XLEN', stream) > keep + rest then held_back = 1 end
  local first = oldest and redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  if first and is_before(first[1], oldest) then held_back = 1 end
end
return {removed, held_back}
