-- This consumer begins with whatever comes first in each sequence of the topic. Stands alone.
--
-- KEYS: begins; ARGV: topic

return redis.call('SADD', KEYS[1], ARGV[1])
