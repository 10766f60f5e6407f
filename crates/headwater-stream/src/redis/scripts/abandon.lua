-- Takes begun marks back. KEYS: the marks.
for _, key in ipairs(KEYS) do
  local problem = foreign('string', key)
  if problem then return problem end
end
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == 'b' then redis.call('DEL', key) end
end
return #KEYS
