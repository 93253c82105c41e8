-- Settlements of one slot, the newest first. Stands alone.
--
-- KEYS: audit; ARGV: limit

return redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)
