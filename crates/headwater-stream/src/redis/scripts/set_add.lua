-- Adds members to a set. KEYS: set. ARGV: its TTL in ms or '', members. Returns: how many are new.
local set = KEYS[1]
local problem = check_type('set', set)
if problem then return problem end
local members = {}
for i = 2, #ARGV do members[#members + 1] = ARGV[i] end
local added = 0
with_ids(members, function(...) added = added + redis.call('SADD', set, ...) end)
if ARGV[1] ~= '' then redis.call('PEXPIRE', set, ARGV[1]) end
return added
