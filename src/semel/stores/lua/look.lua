-- The whole record for people, with the time and the key's expiry at that very moment. Stands
-- alone, without record.lua, and changes nothing.
--
-- Answers: {now (us), ms left (-1: for ever, -2: no record), all fields}
-- Covered by tests/contract/test_redis_ledger.py.

local time = redis.call('TIME')
local fields = redis.call('HGETALL', KEYS[1])
return {time[1] * 1000000 + time[2], redis.call('PTTL', KEYS[1]), fields}
