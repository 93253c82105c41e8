-- Settle a record whose lease has run out: with an outcome, or without one to let it run again.
--
-- ARGV: fence, expires after (ms, '' never), ending, and kind, data, status if there is an outcome
-- Answers: 1 settled, 0 nothing changed
-- Covered by tests/contract/test_redis_ledger.py.

if call('EXISTS', key) == 0 then return 0 end
local state, holder, fence, lease, number, begun =
  unpack(call('HMGET', key, 's', 'a', 'e', 'l', 'n', 'b'))
local odd = misshapen(state, holder, fence, lease)
if odd then return odd end

if (state ~= 'P' and state ~= 'U') or fence ~= ARGV[1] then return 0 end
local now = clock()
if tonumber(lease) > now then return 0 end

local try = tonumber(number or 1)
local past = story(fence, holder, begun, text(now), ARGV[3])

if ARGV[4] then
  local fields = {'s', 'C', 'k', ARGV[4], 'r', ARGV[5], 'd', text(now), 'p' .. text(try), past}
  if ARGV[6] ~= '' then fields[11], fields[12] = 't', ARGV[6] end
  call('HSET', key, unpack(fields))
else
  call('HSET', key, 's', 'F', 'x', ARGV[3], 'p' .. text(try), past)
end
call('HDEL', key, 'p' .. text(try - PAST_KEPT))
expire(ARGV[2])
return 1
