-- Adds entries to a delay set, all or none.
-- KEYS: set, entries. ARGV: notification channel, then for each: after|at, ms, target, target and fields.
-- Returns: their ids.
local set, entries, channel = KEYS[1], KEYS[2], ARGV[1]
local problem = check_type('zset', set) or check_type('hash', entries)
if problem then return problem end
if #ARGV == 1 then return {} end
local before = earliest(set)
local numbers = {}
for i = 2, #ARGV, 4 do
  local due = due_at(ARGV[i], ARGV[i + 1])
  numbers[#numbers + 1] = add_delayed(set, entries, ARGV[i + 2], due, ARGV[i + 3])
end
notify_due(set, channel, before)
return numbers
