-- KEYS: for each: lease, its record. Answers for each: nil, or holder, epoch ('0' if it knows none), remaining ms.
local answers = {}
for i = 1, #KEYS, 2 do
  local lease, record = KEYS[i], KEYS[i + 1]
  local problem = foreign('string', lease, record)
  if problem then return problem end
  local holder = redis.call('GET', lease)
  answers[#answers + 1] = holder and {holder, current_epoch(lease, record) or '0', redis.call('PTTL', lease)}
end
return answers
