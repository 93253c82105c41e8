-- Record a step, and extend the lease.
--
-- ARGV from 5: lease (us), ttl (us, '' for ever), hold (1 or 0), name, data
-- Covered by tests/contract/test_redis_ledger.py.

if not running then return lost() end

local until_us = now + tonumber(ARGV[5])
local expires = nil
if ARGV[7] == '0' and ARGV[6] ~= '' then expires = until_us + tonumber(ARGV[6]) end

call('HSET', key, 's', 'P', 'l', text(until_us), 'S' .. ARGV[8], ARGV[9])
expire(expires)
return 1
