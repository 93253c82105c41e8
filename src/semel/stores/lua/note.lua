-- Record a step, and extend the lease.
--
-- ARGV from 5: lease (us), expires after (ms, '' never), name, data
-- Covered by tests/contract/test_redis_ledger.py.

if state ~= 'P' then return lost() end

call('HSET', key, 'l', text(clock() + ARGV[5]), 'S' .. ARGV[7], ARGV[8])
expire(ARGV[6])
return 1
