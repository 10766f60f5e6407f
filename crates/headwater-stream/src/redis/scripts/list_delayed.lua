-- Lists delayed entries, earliest first. KEYS: set, entries. ARGV: first, last. Returns for each: member, due time, fields.
-- A member without fields is no entry: a further one is listed instead, so that only the end of the set shortens the list.
local set, entries, from, to = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local problem = check_type('zset', set) or check_type('hash', entries)
if problem then return problem end
local wanted = tonumber(to) - tonumber(from) + 1
local results, asked, skipped = {}, wanted, 0
repeat
  local listed = redis.call('ZRANGE', set, from, to, 'WITHSCORES')
  for i = 1, #listed, 2 do
    local packed = redis.call('HGET', entries, listed[i]:match('^%d+'))
    if packed then
      results[#results + 1] = {listed[i], listed[i + 1], packed}
    else
      skipped = skipped + 1
    end
  end
  if skipped > 10000 then return redis.error_reply('ERR more than 10000 members of the delay set have no fields') end
  local is_end = #listed < 2 * asked
  asked = wanted - #results
  from, to = to_integer(tonumber(to) + 1), to_integer(tonumber(to) + asked)
until is_end or asked == 0
return results
