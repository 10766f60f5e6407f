-- Removes an entry from a delay set. KEYS: set, entries. ARGV: id. Returns: whether it existed.
local set, entries, number = KEYS[1], KEYS[2], ARGV[1]
local problem = check_type('zset', set) or check_type('hash', entries)
if problem then return problem end
local packed = redis.call('HGET', entries, number)
if not packed then return 0 end
return remove_delayed(set, entries, number .. ':' .. cmsgpack.unpack(packed)[1], number)
