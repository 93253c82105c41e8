-- Give the claim up as failed: it can be claimed again at once, its steps stay.
--
-- ARGV from 5: ttl (us, '' for ever), ending, and the error if there is one
-- Covered by tests/contract/test_redis_ledger.py.

if state == 'F' then return 1 end
if not running then return lost() end

local expires = nil
if ARGV[5] ~= '' then expires = now + tonumber(ARGV[5]) end
local try = tonumber(number or 1)
local past = '[' .. fence .. ',' .. cjson.encode(holder) .. ',' .. (begun or fence) .. ',' ..
  text(now) .. ',' .. cjson.encode(ARGV[6]) .. ']'

if ARGV[7] then
  call('HSET', key, 's', 'F', 'l', text(now), 'p' .. text(try), past, 'x', ARGV[7])
  call('HDEL', key, 'p' .. text(try - PAST_KEPT))
else
  call('HSET', key, 's', 'F', 'l', text(now), 'p' .. text(try), past)
  call('HDEL', key, 'p' .. text(try - PAST_KEPT), 'x')
end
expire(expires)
return 1
