-- Record how it ended. A late completion under the current fence counts; a repeated one with the
-- same outcome is kept, so a lost reply costs nothing.
--
-- ARGV from 5: kind, data, status ('' for none), expires after (ms, '' never)
-- Covered by tests/contract/test_redis_ledger.py.

if state ~= 'P' and state ~= 'U' then
  local kind, data, status = unpack(call('HMGET', key, 'k', 'r', 't'))
  local same = kind == ARGV[5] and data == ARGV[6] and (status or '') == ARGV[7]
  if state == 'C' and same then return 1 end
  return lost()
end

if ARGV[7] == '' then
  call('HSET', key, 's', 'C', 'k', ARGV[5], 'r', ARGV[6], 'd', text(clock()))
else
  call('HSET', key, 's', 'C', 'k', ARGV[5], 'r', ARGV[6], 'd', text(clock()), 't', ARGV[7])
end
expire(ARGV[8])
return 1
