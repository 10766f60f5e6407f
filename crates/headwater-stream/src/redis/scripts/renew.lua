-- Extends leases. KEYS: for each: lease, its record. ARGV: holder, life of a lease in ms, life of a record, epochs.
-- Answers for each: 1 kept, 0 lost. A value of another type is the loss of that lease alone.
local holder = ARGV[1]
local answers = {}
for i = 1, #KEYS, 2 do
  local lease, record = KEYS[i], KEYS[i + 1]
  local kept = 0
  if not foreign('string', lease, record) and redis.call('GET', lease) == holder and current_epoch(lease, record) == ARGV[3 + (i + 1) / 2] then
    redis.call('PEXPIRE', record, ARGV[3])
    kept = redis.call('PEXPIRE', lease, ARGV[2])
  end
  answers[#answers + 1] = kept
end
return answers
