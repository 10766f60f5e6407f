-- Appends entries that are not known yet, and remembers them.
-- KEYS: stream, then the mark of each entry. ARGV: how long to remember in ms, then the fields of each entry.
-- Answers: for each its id, then whether it was known before.
local stream, keep = KEYS[1], ARGV[1]
local problem = foreign('stream', stream)
if problem then return problem end
local marks = {}
for i = 2, #KEYS do
  problem = foreign('string', KEYS[i])
  if problem then return problem end
  local mark = redis.call('GET', KEYS[i])
  if mark and not mark:match('^%d+%-%d+$') then return redis.error_reply('HWTYPE ' .. KEYS[i]) end
  marks[KEYS[i]] = mark
end
local answers = {}
for i = 2, #KEYS do
  local mark = marks[KEYS[i]]
  answers[#answers + 1] = mark or redis.call('XADD', stream, '*', unpack(cmsgpack.unpack(ARGV[i])))
  answers[#answers + 1] = mark and 1 or 0
  if not mark then
    local id = answers[#answers - 1]
    redis.call('SET', KEYS[i], id, 'PX', keep)
    -- An id that is given twice is appended once.
    marks[KEYS[i]] = id
  end
end
return answers
