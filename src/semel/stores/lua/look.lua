-- The whole record for people, with the time and the key's expiry at that very moment. Stands
-- alone, without record.lua, and changes nothing.
--
-- Answers: {now (us), expires at (ms; negative: never), all fields}
-- Covered by tests/contract/test_redis_ledger.py.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fields = redis.call('HGETALL', KEYS[1])
local expires = redis.pcall('PEXPIRETIME', KEYS[1])
if type(expires) == 'table' then  -- an error: Redis before 7.0 has no such command
  if not string.find(expires.err, 'nknown', 1, true) then return expires end
  expires = redis.call('PTTL', KEYS[1])
  if expires >= 0 then expires = math.floor(now / 1000) + expires end
end
return {now, expires, fields}
