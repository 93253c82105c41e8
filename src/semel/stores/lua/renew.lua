-- Extend the lease from now; a lease of 0 ends it and leaves the outcome unknown.
--
-- ARGV from 5: lease (us), ttl (us, '' for ever), hold (1 or 0)
-- Covered by tests/contract/test_redis_ledger.py.

if not running then return lost() end

local until_us = now + tonumber(ARGV[5])
local expires = nil
if ARGV[7] == '0' and ARGV[6] ~= '' then expires = until_us + tonumber(ARGV[6]) end

call('HSET', key, 's', ARGV[5] == '0' and 'U' or 'P', 'l', text(until_us))
expire(expires)
return 1
