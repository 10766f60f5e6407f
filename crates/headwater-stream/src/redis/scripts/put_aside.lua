-- Puts entries aside, all or none.
-- KEYS: set, entries, doorbell. ARGV: for each: after|at, ms, target, target and fields. Answers: their numbers.
local set, entries, wake = KEYS[1], KEYS[2], KEYS[3]
local problem = foreign('zset', set) or foreign('hash', entries) or foreign('stream', wake)
if problem then return problem end
if #ARGV == 0 then return {} end
local before = earliest(set)
local numbers = {}
for i = 1, #ARGV, 4 do
  local due = due_at(ARGV[i], ARGV[i + 1])
  numbers[#numbers + 1] = put_aside(set, entries, ARGV[i + 2], due, ARGV[i + 3])
end
ring(set, wake, before)
return numbers
