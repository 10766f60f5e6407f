-- KEYS: for each: lease, its record. Answers for each: nil, or holder, epoch ('0' if it knows none), remaining ms. A value
-- of another type has no holder ('') and no end (-1).
local answers = {}
for i = 1, #KEYS, 2 do
  local lease, record = KEYS[i], KEYS[i + 1]
  local answer
  if foreign('string', lease, record) then
    answer = {'', '0', -1}
  else
    local holder = redis.call('GET', lease)
    answer = holder and {holder, current_epoch(lease, record) or '0', redis.call('PTTL', lease)}
  end
  answers[#answers + 1] = answer
end
return answers
