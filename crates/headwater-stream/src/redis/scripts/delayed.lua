-- Lists waiting entries, earliest first. KEYS: set, entries. ARGV: first, last. Answers for each: member, due, fields.
local set, entries = KEYS[1], KEYS[2]
local problem = foreign('zset', set) or foreign('hash', entries)
if problem then return problem end
local listed = redis.call('ZRANGE', set, ARGV[1], ARGV[2], 'WITHSCORES')
local answers = {}
for i = 1, #listed, 2 do
  local packed = redis.call('HGET', entries, listed[i]:match('^%d+'))
  if packed then answers[#answers + 1] = {listed[i], listed[i + 1], packed} end
end
return answers
