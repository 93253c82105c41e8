-- What a record is, and how every verb that changes one begins: this file goes in front of it.
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
-- the Redis key itself; a held one that runs has none.
--
-- Every check comes before the first write, and the first write is an HSET: Redis refuses that one
-- when memory is short, so a refusal changes nothing.
--
-- Numbers are doubles: exact up to 2^53 (as microseconds: the year 2255), but tostring() would
-- round them to 14 digits; `text` prints all of them.
-- Covered by tests/contract/test_redis_ledger.py, and test_redis_scripts.py for large numbers.

local key = KEYS[1]
local call = redis.call
local FOR_EVER = 9007199254740992
local PAST_KEPT = 16

local function text(number)
  return string.format('%.0f', number)
end

local function expire(at)
  if at and at < FOR_EVER then
    call('PEXPIREAT', key, text(math.ceil(at / 1000)))
  else
    call('PERSIST', key)
  end
end

local function clock()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

local state, holder, fence, operation, fingerprint, lease, number, held, begun, kind, data, status =
  unpack(call('HMGET', key, 's', 'a', 'e', 'o', 'f', 'l', 'n', 'h', 'b', 'k', 'r', 't'))
local running = state == 'P' or state == 'U'

if state then
  local known = running or state == 'C' or state == 'F'
  if not (known and holder and tonumber(fence) and tonumber(lease)) then
    return redis.error_reply('CORRUPT its fields are not those of a record')
  end
elseif call('EXISTS', key) == 1 then
  return redis.error_reply('CORRUPT it is a hash of something else')
end
