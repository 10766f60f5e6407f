-- Appends entries whose idempotency ids are new, and remembers the ids.
-- KEYS: stream, then the state of each id. ARGV: time to live of an id in ms, then the fields of each entry.
-- Returns for each: its entry id, then 1 if it is a duplicate.
local stream, keep = KEYS[1], ARGV[1]
local problem = check_type('stream', stream)
if problem then return problem end
local states = {}
for i = 2, #KEYS do
  problem = check_type('string', KEYS[i])
  if problem then return problem end
  local state = redis.call('GET', KEYS[i])
  if state and not state:match('^%d+%-%d+$') then return redis.error_reply('HWTYPE ' .. KEYS[i]) end
  states[KEYS[i]] = state
end
local results = {}
for i = 2, #KEYS do
  local state = states[KEYS[i]]
  results[#results + 1] = state or redis.call('XADD', stream, '*', unpack(cmsgpack.unpack(ARGV[i])))
  results[#results + 1] = state and 1 or 0
  if not state then
    local id = results[#results - 1]
    redis.call('SET', KEYS[i], id, 'PX', keep)
    -- An id listed twice is appended once.
    states[KEYS[i]] = id
  end
end
return results
