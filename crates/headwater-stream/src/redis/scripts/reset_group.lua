-- Moves a group to a new position and removes its consumers and pending entries.
-- KEYS: stream. ARGV: group, the last read id or '$'. Returns: whether the group existed.
local stream, group, start = KEYS[1], ARGV[1], ARGV[2]
local problem = check_type('stream', stream)
if problem then return problem end
if redis.call('EXISTS', stream) == 0 then return 0 end
if redis.call('XGROUP', 'DESTROY', stream, group) == 0 then return 0 end
redis.call('XGROUP', 'CREATE', stream, group, start)
return 1
