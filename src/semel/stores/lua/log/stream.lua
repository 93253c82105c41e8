-- What a log keeps of a stream, and what every script begins with: this file goes in front.
--
-- KEYS, all in one slot of a cluster:
--   meta   a hash, with the stream's row:
--            o t   offset and tag of the head          p q   of the last entry that was trimmed
--            e     present when it has ended           g u   when entries and state go, when all does
--          of each fence f<name>, its number; and of each id i<id>, what became of it: mark, offset,
--          tag, when it came, for how long it is remembered, reply, with spaces between them
--   log    the entries, a Redis stream. An entry's id is <offset>-0, and its fields are m (tag, when
--          it came and id, with spaces between them) and d (data). Whoever appends rings on the
--          channel of the same name
--   state  a hash: s the state; of each field r<name> rank, d<name> data
-- Times are microseconds since 1970 by this server's clock. What is absent of the row is zero, the
-- beginning, or never. Redis drops log and state at g, and meta at u, or a little later: the row
-- says what is over. A log without its meta is what is left of another stream, and goes.
--
-- Every check comes before the first write, and the first write is one that Redis refuses when
-- memory is short, so a refusal changes nothing. Every script may be repeated.
--
-- A script runs while every other caller waits. An append of an entry, with nothing else, makes five
-- calls. To print a number costs half of one: the time is put together from its digits.
-- The rules are those of semel.stores.log_rules. Covered by tests/contract/test_redis_log.py.

local call = redis.call

local function text(number)
  return string.format('%.0f', number)
end

-- The time, and how it is written.
local function clock()
  local time = call('TIME')
  return time[1] * 1000000 + time[2], time[1] .. string.sub('00000' .. time[2], -6)
end

-- An error, where this is no row of ours.
local function misshapen(head, tag, floor)
  if head and not (tonumber(head) and tag and tonumber(floor or 0)) then
    return redis.error_reply('CORRUPT its fields are not those of a stream')
  end
end

-- Has this time of a row come? It is absent, or empty, when it never does.
local function come(time, now)
  time = tonumber(time or '')
  return time and time <= now
end

local function tag_at(log, offset)
  local id = text(offset) .. '-0'
  local entry = call('XRANGE', log, id, id)[1]
  return entry and string.sub(entry[2][2], 1, 12) or ''
end
