-- What a record is, and what every verb that changes one begins with: this file goes in front.
--
-- A record is one hash, and its fields are:
--   s  state: P running, C completed, F failed, U unknown
--   a  attempt           o  operation          f  fingerprint
--   e  fence             n  number of the try (absent: 1)
--   c  created           b  begun (both absent on a first try: its fence is that moment)
--   l  lease until       h  present when held
--   K  key as written    T  tenant (may be absent: none)
--   d  completed at      k  kind of outcome: v, e, l    r  its data    t  its HTTP status
--   x  error of the last failure
--   p<number>  a try that is over: JSON [fence, attempt, begun, ended, ending]
--   S<name>    a step
-- Times are microseconds since 1970 by this server's clock. When a record expires is the expiry of
-- the Redis key itself, set as a time from now that the caller has worked out; a held record that
-- runs has none.
--
-- Every check comes before the first write, and the first write is an HSET: Redis refuses that one
-- when memory is short, so a refusal changes nothing.
--
-- Numbers are doubles: exact up to 2^53 (as microseconds: the year 2255), but tostring() would
-- round them to 14 digits, and a number handed to redis.call may arrive as 1e+15; `text` prints all
-- of its digits.
--
-- A script runs while every other caller waits, so the common cases are short: a first claim makes
-- four calls, a replay two, a completion four. Fields for rarer cases are read when they are needed.
-- Covered by tests/contract/test_redis_ledger.py, and test_redis_scripts.py for large numbers.

local key, call = KEYS[1], redis.call

local function text(number)
  return string.format('%.0f', number)
end

local function clock()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end
