-- Puts entries aside, all or none.
-- KEYS: set, entries. ARGV: channel to tell, then for each: after|at, ms, target, target and fields.
-- Answers: their numbers.
local set, entries, channel = KEYS[1], KEYS[2], ARGV[1]
local problem = foreign('zset', set) or foreign('hash', entries)
if problem then return problem end
if #ARGV == 1 then return {} end
local before = earliest(set)
local numbers = {}
for i = 2, #ARGV, 4 do
  local due = due_at(ARGV[i], ARGV[i + 1])
  numbers[#numbers + 1] = put_aside(set, entries, ARGV[i + 2], due, ARGV[i + 3])
end
ring(set, channel, before)
return numbers
