-- Marks ids as begun. KEYS: their marks. ARGV: how long in ms.
-- Answers for each: 'f' fresh, or the mark there is: 'b' begun, 'd' and the value of a done one.
local marks = {}
for i, key in ipairs(KEYS) do
  local problem = foreign('string', key)
  if problem then return problem end
  local mark = redis.call('GET', key)
  if mark and mark ~= 'b' and mark:sub(1, 1) ~= 'd' then return redis.error_reply('HWTYPE ' .. key) end
  marks[i] = mark
end
for i, key in ipairs(KEYS) do
  if not marks[i] then
    -- An id that is given twice is fresh once.
    marks[i] = redis.call('SET', key, 'b', 'NX', 'PX', ARGV[1]) and 'f' or 'b'
  end
end
return marks
