-- Sequences of one slot whose first message is due. Stands alone.
--
-- KEYS: due; ARGV: limit
-- Answers: identities, the longest due first

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
