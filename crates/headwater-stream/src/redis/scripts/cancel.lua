-- Takes an entry out before it is due. KEYS: set, entries. ARGV: number. Answers: whether it was still there.
local set, entries, number = KEYS[1], KEYS[2], ARGV[1]
local problem = foreign('zset', set) or foreign('hash', entries)
if problem then return problem end
local packed = redis.call('HGET', entries, number)
if not packed then return 0 end
return take_out(set, entries, number .. ':' .. cmsgpack.unpack(packed)[1], number)
