-- Updates an existing map. KEYS: map. ARGV: '0', or '1' with an expected name and value; then names and values to write.
-- Returns: whether it was updated.
local map = KEYS[1]
local problem = check_type('hash', map)
if problem then return problem end
if redis.call('EXISTS', map) == 0 then return 0 end
local first = 2
if ARGV[1] == '1' then
  if redis.call('HGET', map, ARGV[2]) ~= ARGV[3] then return 0 end
  first = 4
end
redis.call('HSET', map, unpack(ARGV, first))
return 1
