-- Lists delayed entries, earliest first. KEYS: set, entries. ARGV: first, last. Returns for each: member, due time, fields.
local set, entries = KEYS[1], KEYS[2]
local problem = check_type('zset', set) or check_type('hash', entries)
if problem then return problem end
local listed = redis.call('ZRANGE', set, ARGV[1], ARGV[2], 'WITHSCORES')
local results = {}
for i = 1, #listed, 2 do
  local packed = redis.call('HGET', entries, listed[i]:match('^%d+'))
  if packed then results[#results + 1] = {listed[i], listed[i + 1], packed} end
end
return results
