-- Gives a group a new position and forgets what was pending.
-- KEYS: stream. ARGV: group, the id it has read to or '$'. Answers: whether there was such a group.
local stream, group, start = KEYS[1], ARGV[1], ARGV[2]
local problem = foreign('stream', stream)
if problem then return problem end
if redis.call('EXISTS', stream) == 0 then return 0 end
if redis.call('XGROUP', 'DESTROY', stream, group) == 0 then return 0 end
redis.call('XGROUP', 'CREATE', stream, group, start)
return 1
