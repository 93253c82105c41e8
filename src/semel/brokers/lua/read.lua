-- Hand out what nobody of the group was handed yet. The same read, asked again after a lost reply,
-- hands out the same: entries that nobody has heard of would stay pending while later ones pass.
--
-- ARGV: ..., consumer, limit, number of this read
-- Answers: {'given', entries}, {'none', last id of the stream}, {'lost'} the group is gone,
--          {'stale', owner}

if rank > 0 or (rank == 0 and stored ~= mine) then return {'stale', stored} end

local before = call('HGET', helper, 'read:' .. group)
if before then
  local number, first, last = string.match(before, '^(%S+) (%S+) (%S+)$')
  if number == ARGV[6] then return {'given', call('XRANGE', stream, first, last)} end
end

local given = redis.pcall(
  'XREADGROUP', 'GROUP', group, ARGV[4], 'COUNT', ARGV[5], 'STREAMS', stream, '>'
)
if not given then
  -- A server that has lost its last writes may have lost this one. It can wait if memory is short.
  if stored ~= mine then redis.pcall('HSET', helper, 'owner:' .. group, mine) end
  return {'none', named(call('XINFO', 'STREAM', stream))['last-generated-id']}
end
if given.err then
  if string.find(given.err, 'NOGROUP', 1, true) then return {'lost'} end
  return given
end
local entries = given[1][2]
local said = ARGV[6] .. ' ' .. entries[1][1] .. ' ' .. entries[#entries][1]
call('HSET', helper, 'read:' .. group, said, 'owner:' .. group, mine)
return {'given', entries}
