-- Gives leases up. KEYS: for each: lease, its record. ARGV: holder, channel to tell, epochs.
-- Answers for each: 1 released, 0 not held. A value of another type is not held, and stays.
local holder, channel = ARGV[1], ARGV[2]
local answers = {}
for i = 1, #KEYS, 2 do
  local lease, record = KEYS[i], KEYS[i + 1]
  local released = 0
  if not foreign('string', lease, record) and redis.call('GET', lease) == holder and current_epoch(lease, record) == ARGV[2 + (i + 1) / 2] then
    released = redis.call('DEL', lease)
    -- A hint: whoever may not be told will find out.
    redis.pcall('PUBLISH', channel, lease)
  end
  answers[#answers + 1] = released
end
return answers
