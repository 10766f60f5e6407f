-- Moves due entries to their streams, those that are still in the set.
-- KEYS: set, entries, target streams. ARGV: for each: member, number, which key is its target.
-- Answers for each: {0} gone, {1, entry id} moved, {2, error} its stream cannot take it, {3} it carried nothing.
local set, entries = KEYS[1], KEYS[2]
local problem = foreign('zset', set) or foreign('hash', entries)
if problem then return problem end
local answers = {}
for i = 1, #ARGV, 3 do
  local member, number, target = ARGV[i], ARGV[i + 1], KEYS[tonumber(ARGV[i + 2])]
  local answer = {0}
  if redis.call('ZSCORE', set, member) then
    local packed = redis.call('HGET', entries, number)
    if not packed then
      take_out(set, entries, member, number)
      answer = {3}
    else
      local id = redis.pcall('XADD', target, '*', unpack(cmsgpack.unpack(packed), 2))
      if type(id) == 'table' then
        answer = {2, id.err}
      else
        take_out(set, entries, member, number)
        answer = {1, id}
      end
    end
  end
  answers[#answers + 1] = answer
end
return answers
