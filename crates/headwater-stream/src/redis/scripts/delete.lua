-- Deletes a key of the given type. KEYS: key. ARGV: type. Returns: whether it existed.
local problem = check_type(ARGV[1], KEYS[1])
if problem then return problem end
return redis.call('UNLINK', KEYS[1])
