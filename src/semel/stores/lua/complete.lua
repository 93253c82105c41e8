-- Record how it ended. A late completion under the current fence counts; a repeated one with the
-- same outcome is kept, so a lost reply costs nothing.
--
-- ARGV from 5: kind, data, status ('' for none), ttl (us, '' for ever)
-- Covered by tests/contract/test_redis_ledger.py.

if state == 'C' and kind == ARGV[5] and data == ARGV[6] and (status or '') == ARGV[7] then
  return 1
end
if not running then return lost() end

local expires = nil
if ARGV[8] ~= '' then expires = now + tonumber(ARGV[8]) end

if ARGV[7] == '' then
  call('HSET', key, 's', 'C', 'k', ARGV[5], 'r', ARGV[6], 'd', text(now))
else
  call('HSET', key, 's', 'C', 'k', ARGV[5], 'r', ARGV[6], 'd', text(now), 't', ARGV[7])
end
expire(expires)
return 1
