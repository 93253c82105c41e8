-- Where a stream ends. Stands before the other scripts.
--
-- KEYS: the stream, and the hash beside it: `fence`, `position` and `id` of the last entry that a
-- relay has added, `retry` (the length at which trimming is tried again), `target` (the length that
-- trimming aims at, '' for no limit); of each group `owner:` (fence and token of the one who may
-- read) and `read:` (what was handed out last). The hash of the topic's own name has `shards`, too.
-- Covered by tests/contract/test_redis_broker.py.

local call = redis.call
local stream, helper = KEYS[1], KEYS[2]

-- XINFO answers with names and values by turns; newer servers have more of them.
local function named(row)
  local found = {}
  for i = 1, #row, 2 do found[row[i]] = row[i + 1] end
  return found
end

local function position_of(id)
  return tonumber(string.match(id, '^%d+'))
end

-- The hash says which event the last entry is, if it speaks of that entry. An entry behind it was
-- written by somebody else, and nothing of ours can ever follow.
local function ending(position, id)
  if call('EXISTS', stream) == 0 then return {length = 0, position = '0', id = ''} end
  local seen = named(call('XINFO', 'STREAM', stream))
  local at, rest = string.match(seen['last-generated-id'], '^(%d+)-(%d+)$')
  return {
    exists = true,
    length = seen.length,
    position = at,
    id = position == at and id or '',
    strange = rest ~= '0' or (position and tonumber(position) < tonumber(at)),
  }
end
