-- Extend the lease from now; a lease of 0 ends it and leaves the outcome unknown.
--
-- ARGV from 5: lease (us), expires after (ms, '' never)
-- Covered by tests/contract/test_redis_ledger.py.

local gives_up = ARGV[5] == '0'
-- Given up while this renewal was under way: it must not come back to life for nobody.
if state ~= 'P' and not (state == 'U' and gives_up) then return lost() end

call('HSET', key, 's', gives_up and 'U' or 'P', 'l', text(clock() + ARGV[5]))
expire(ARGV[6])
return 1
