-- Append a batch, all of it or nothing: every check comes before the first entry.
--
-- ARGV: fence, position and id that the batch follows, target length ('' for no limit), '1' where
--       groups have to be there first, how many messages, position and id of the last one, the name
--       of an entry's only field or ''; then for each message its entry id and that field, or the
--       number of its words and the words
-- Answers: {'taken'}, {'fenced', fence}, {'absent'} no stream, {'strange', position} not ours,
--          {'behind', position, id}, {'forked', position, id}, {'ahead', position, id} the stream
--          has more than the batch follows, {'full', length, slowest group}, {'oom', length}

local fence, follows, count = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[6])
local stored, position, id, retry = unpack(call('HMGET', helper, 'fence', 'position', 'id', 'retry'))
if stored and tonumber(stored) > fence then return {'fenced', stored} end

local tail = ending(position, id)
if not tail.exists and ARGV[5] == '1' then return {'absent'} end
if tail.strange then return {'strange', tail.position} end
local at = tonumber(tail.position)
if at < follows then return {'behind', tail.position, tail.id} end
if at == follows and tail.id ~= '' and ARGV[3] ~= '' and tail.id ~= ARGV[3] then
  return {'forked', tail.position, tail.id}
end
if at > follows or count == 0 then
  -- From here on the batch's owner is known, whatever becomes of the batch. Out of memory, Redis
  -- keeps no note of it; the next batch will.
  if stored ~= ARGV[1] then redis.pcall('HSET', helper, 'fence', ARGV[1]) end
  return at > follows and {'ahead', tail.position, tail.id} or {'taken'}
end

-- Trim what everybody has read, down to the target. What was not possible is tried again when a
-- tenth of the target has come.
local length, target, again = tail.length, tonumber(ARGV[4]), '0'
if target and length + count > target and (length >= 2 * target or length >= tonumber(retry or 0)) then
  local over = math.min(length + count - target, MOST)
  local spare, whose = trim(tail, over)
  length = length - spare
  if length >= 2 * target then return {'full', length, whose} end
  if spare < over then again = string.format('%.0f', length + math.ceil(target / 10)) end
elseif target and retry then
  again = retry
end

-- Only the first entry can be refused for want of memory: behind a write, Redis lets the rest pass.
local add, problem = redis.pcall, nil
local function put(...)
  local reply = add('XADD', stream, ...)
  if type(reply) == 'table' then problem = reply end
  add = call
  return not problem
end

local field, from, all = ARGV[9], 10, #ARGV
if field ~= '' then
  while from < all and put(ARGV[from], field, ARGV[from + 1]) do from = from + 2 end
else
  while from < all and put(ARGV[from], unpack(ARGV, from + 2, from + 1 + ARGV[from + 1])) do
    from = from + 2 + ARGV[from + 1]
  end
end
if problem then
  return string.find(problem.err, 'OOM', 1, true) and {'oom', length} or problem
end
call(
  'HSET', helper,
  'fence', ARGV[1], 'position', ARGV[7], 'id', ARGV[8], 'retry', again, 'target', ARGV[4]
)
return {'taken'}
