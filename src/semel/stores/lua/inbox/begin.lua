-- May this message have its effect now? If so, nobody else may begin it while the lease lasts.
--
-- ARGV: id, number, attempt, lease (us), '1' to count that it is begun, how often it may have been,
--       topic, ms after which a message without a number is forgotten; then, when it turned out
--       that it has to wait, the message
-- Answers: {'run'}, {'seen'}, {'there'} it waits already, {'wait'} ask again with the message,
--          {'held', why}, {'busy', us left}, {'crashed'} begun too often

local number, attempt, document = tonumber(ARGV[2]), ARGV[3], ARGV[9]
local seq, head, done, runner, lease, begun, whose =
  unpack(call('HMGET', state, 'q', 'h', 'd', 'r', 'l', 'n', 'w'))
head = head and tonumber(head)
local begins_here = false

if number == 0 then
  if done then return {'seen'} end
  if head then return {'there'} end
else
  begins_here = not seq and call('SISMEMBER', begins, ARGV[7]) == 1
  seq = begins_here and number - 1 or tonumber(seq or 0)
  if number <= seq then return {'seen'} end
  if number == head then return {'there'} end
  local why = (head and number > head and 'behind') or (number > seq + 1 and 'gap')
  if why then
    if not document then return {'wait'} end
    call('HINCRBY', state, 't', 1)
    local n = text(number)
    if not call('ZSCORE', order, n) then
      call('HSET', rows, n, document, n .. 's', why .. ' 0 ' .. text(clock()) .. ' 0')
      call('ZADD', order, n, n)
      arrange()
    end
    return {'held', why}
  end
end

local now = clock()
if runner and runner ~= attempt and tonumber(lease) > now then
  return {'busy', tonumber(lease) - now}
end
local more = begins_here and {'q', text(seq)} or {}
local most = ARGV[5] == '1' and tonumber(ARGV[6])
local times = whose == ARGV[2] and begun
local fine = take(attempt, runner, now + ARGV[4], ARGV[2], times, most, more)
if number == 0 then call('PEXPIRE', state, ARGV[8]) end
return {fine and 'run' or 'crashed'}
