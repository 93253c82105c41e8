-- Delete a record unless somebody holds a live lease on it. By force it goes whatever it is: that
-- is the way out of a record nobody can read. Stands alone, without record.lua.
--
-- ARGV: force (1 or 0)
-- Answers: 1 deleted, 0 there is none or it is held
-- Covered by tests/contract/test_redis_ledger.py, and by force in tests/faults/test_redis_faults.py.

if ARGV[1] == '0' then
  local row = redis.call('HMGET', KEYS[1], 's', 'l')
  local lease = tonumber(row[2])
  if redis.call('EXISTS', KEYS[1]) == 1 and not (row[1] and lease) then
    return redis.error_reply('CORRUPT it is a hash of something else')
  end
  local time = redis.call('TIME')
  if row[1] == 'P' and lease > time[1] * 1000000 + time[2] then return 0 end
end
return redis.call('DEL', KEYS[1])
