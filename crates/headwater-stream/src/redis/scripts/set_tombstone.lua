-- Sets the tombstone of a reader. KEYS: tombstone. ARGV: its TTL in ms. Returns: OK.
return redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
