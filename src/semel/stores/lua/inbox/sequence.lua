-- What an inbox keeps of a sequence for one consumer, and what every script begins with: this file
-- goes in front. A message without a number is a sequence of its own, and its number is 0.
--
-- KEYS, all in one slot of a cluster:
--   state   a hash: q the last number that had its effect, h the first that waits, t counts the
--           changes, d when a message without a number had its effect; of the message that runs: r
--           the attempt, l until when, n how often it was begun and not ended, w its number
--   rows    a hash, of each number that waits: <number> the message, <number>s why, attempts, since
--           when, edited; <number>d when it is due; <number>e the error
--   order   the numbers that wait, by number
--   due     identities of sequences whose first message has a time, by that; shared by a slot
--   waits   identities of all sequences with something that waits; shared by a slot
--   begins  topics of which the consumer takes what comes first; shared by a slot
--   audit   settlements, the newest first; shared by a slot
-- Times are microseconds since 1970 by this server's clock.
--
-- Every check comes before the first write, and the first write is an HSET: Redis refuses that one
-- when memory is short, so a refusal changes nothing. Every script may be repeated: after a lost
-- reply it is asked again, by the same attempt.
-- The rules are those of semel.stores.inbox_rules. Covered by tests/contract/test_redis_inbox.py.

local call = redis.call
local state, rows, order, due, waits, begins, audit = unpack(KEYS)
local id = ARGV[1]

local function text(number)
  return string.format('%.0f', number)
end

local function clock()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

local function first()
  local found = call('ZRANGE', order, 0, 0)[1]
  return found and tonumber(found)
end

-- Of those that wait, the first decides when the sequence is looked at.
local function arrange()
  local head = first()
  if not head then
    call('HDEL', state, 'h')
    call('ZREM', due, id)
    call('ZREM', waits, id)
    return
  end
  call('HSET', state, 'h', text(head))
  call('ZADD', waits, 0, id)
  local at = call('HGET', rows, text(head) .. 'd')
  if at then call('ZADD', due, at, id) else call('ZREM', due, id) end
end

local function drop(number)
  local n = text(number)
  call('ZREM', order, n)
  call('HDEL', rows, n, n .. 's', n .. 'd', n .. 'e')
end

-- Everything before this number is done: what waits next may run now, or waits for what has not come.
local function wake(number, now)
  local head = first()
  if not head then return end
  local n = text(head)
  local rest = string.match(call('HGET', rows, n .. 's'), '^%S+(.*)$')
  if head == number then
    call('HSET', rows, n .. 's', 'retry' .. rest, n .. 'd', text(now))
  else
    call('HSET', rows, n .. 's', 'gap' .. rest)
  end
end

-- Take the message for this attempt, and count that it is begun, if it is to be counted. False when
-- it was begun too often: it is taken all the same, so that the attempt may say so, and one more is
-- counted, so that the attempt hears the same when it asks again.
local function take(attempt, runner, until_us, number, begun, most, more)
  local fields = {'r', attempt, 'l', text(until_us), unpack(more)}
  local times = tonumber(begun or 0)
  local fine = true
  if most then
    if runner ~= attempt then times = math.min(times, most) + 1 end
    fine = times <= most
    for _, word in ipairs({'n', text(times), 'w', number}) do fields[#fields + 1] = word end
  end
  call('HSET', state, unpack(fields))
  return fine
end
