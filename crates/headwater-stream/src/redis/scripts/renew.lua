-- Extends leases. KEYS: for each: lease, its record. ARGV: holder, life of a lease in ms, life of a record, epochs.
-- Answers for each: 1 kept, 0 lost.
local holder = ARGV[1]
for _, key in ipairs(KEYS) do
  local problem = foreign('string', key)
  if problem then return problem end
end
local answers = {}
for i = 1, #KEYS, 2 do
  local lease, record = KEYS[i], KEYS[i + 1]
  local kept = 0
  if redis.call('GET', lease) == holder and current_epoch(lease, record) == ARGV[3 + (i + 1) / 2] then
    redis.call('PEXPIRE', record, ARGV[3])
    kept = redis.call('PEXPIRE', lease, ARGV[2])
  end
  answers[#answers + 1] = kept
end
return answers
