-- Marks new ids as in progress. KEYS: their states. ARGV: time to live in ms.
-- Returns for each: 'f' new, or the existing state: 'b' in progress, 'd' followed by the value if done.
local states = {}
for i, key in ipairs(KEYS) do
  local problem = check_type('string', key)
  if problem then return problem end
  local state = redis.call('GET', key)
  if state and state ~= 'b' and state:sub(1, 1) ~= 'd' then return redis.error_reply('HWTYPE ' .. key) end
  states[i] = state
end
for i, key in ipairs(KEYS) do
  if not states[i] then
    -- An id listed twice is new once.
    states[i] = redis.call('SET', key, 'b', 'NX', 'PX', ARGV[1]) and 'f' or 'b'
  end
end
return states
