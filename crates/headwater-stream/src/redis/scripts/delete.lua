-- Removes a key if it holds what it should. KEYS: key. ARGV: its kind. Answers: whether there was one.
local problem = foreign(ARGV[1], KEYS[1])
if problem then return problem end
return redis.call('UNLINK', KEYS[1])
