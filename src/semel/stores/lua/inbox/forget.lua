-- Forget a message without a number, if it had its effect long enough ago. Stands alone.
--
-- KEYS: state; ARGV: us
-- Answers: 1 when it was forgotten

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local done = redis.call('HGET', KEYS[1], 'd')
if not done or now - done < tonumber(ARGV[1]) then return 0 end
return redis.call('DEL', KEYS[1])
