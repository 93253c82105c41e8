-- Give the claim up as failed: it can be claimed again at once, its steps stay.
--
-- ARGV from 5: expires after (ms, '' never), ending, and the error if there is one
-- Covered by tests/contract/test_redis_ledger.py.

if state == 'F' then return 1 end
if state ~= 'P' and state ~= 'U' then return lost() end

local number, begun = unpack(call('HMGET', key, 'n', 'b'))
local try = tonumber(number or 1)
local now = text(clock())
local past = story(fence, holder, begun, now, ARGV[6])

if ARGV[7] then
  call('HSET', key, 's', 'F', 'l', now, 'p' .. text(try), past, 'x', ARGV[7])
  call('HDEL', key, 'p' .. text(try - PAST_KEPT))
else
  call('HSET', key, 's', 'F', 'l', now, 'p' .. text(try), past)
  call('HDEL', key, 'p' .. text(try - PAST_KEPT), 'x')
end
expire(ARGV[5])
return 1
