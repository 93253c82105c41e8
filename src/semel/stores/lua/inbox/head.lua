-- The first message that waits, if it is due: it is begun, and counted.
--
-- ARGV: id, attempt, lease (us), how often it may have been begun
-- Answers: {'run', number, message, meta, error}, {'crashed', ...the same}, {'drop', message} it had
--          its effect already and waits no longer, {'gap'} it waits for others, {'none'}

local seq, head, done, runner, lease, begun, whose =
  unpack(call('HMGET', state, 'q', 'h', 'd', 'r', 'l', 'n', 'w'))
if not head then return {'none'} end
local now, number = clock(), tonumber(head)
local document, meta, at, why = unpack(call('HMGET', rows, head, head .. 's', head .. 'd', head .. 'e'))
if not at or tonumber(at) > now then return {'none'} end
if runner and runner ~= ARGV[2] and tonumber(lease) > now then return {'none'} end

seq = tonumber(seq or 0)
if (number > 0 and number <= seq) or (number == 0 and done) then
  call('HINCRBY', state, 't', 1)
  drop(number)
  if number > 0 then wake(seq + 1, now) end
  arrange()
  return {'drop', document}
end
if number > seq + 1 then
  call('HINCRBY', state, 't', 1)
  call('HSET', rows, head .. 's', 'gap' .. string.match(meta, '^%S+(.*)$'))
  call('HDEL', rows, head .. 'd')
  arrange()
  return {'gap'}
end

local times = whose == head and begun
local fine = take(ARGV[2], runner, now + ARGV[3], head, times, tonumber(ARGV[4]), {})
return {fine and 'run' or 'crashed', number, document, meta, why or ''}
