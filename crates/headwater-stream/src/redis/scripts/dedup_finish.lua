-- Marks ids as done. KEYS: their states. ARGV: time to live in ms, a value for each.
for _, key in ipairs(KEYS) do
  local problem = check_type('string', key)
  if problem then return problem end
end
for i, key in ipairs(KEYS) do
  redis.call('SET', key, 'd' .. ARGV[i + 1], 'PX', ARGV[1])
end
return #KEYS
