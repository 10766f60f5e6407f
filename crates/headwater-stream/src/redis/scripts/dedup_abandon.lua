-- Deletes ids that are in progress; done ones stay. KEYS: their states.
for _, key in ipairs(KEYS) do
  local problem = check_type('string', key)
  if problem then return problem end
end
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == 'b' then redis.call('DEL', key) end
end
return #KEYS
