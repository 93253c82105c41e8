-- The message has failed: keep it, for its next try or for people, with what it belongs to behind.
--
-- ARGV: ..., why, attempts, error, us until it is due ('' for never), message
-- Answers: {'kept'}, and as ended.lua

if had_its_effect() then
  call('HDEL', state, 'r', 'l', 'n', 'w')
  return {'seen'}
end
local now, n = clock(), text(number)
local since, edited = now, 0
local before = call('HGET', rows, n .. 's')
if before then since, edited = string.match(before, '^%S+ %S+ (%S+) (%S+)$') end

call('HINCRBY', state, 't', 1)
call('HSET', rows, n .. 's',
  ARGV[5] .. ' ' .. ARGV[6] .. ' ' .. text(since) .. ' ' .. text(edited), n .. 'e', ARGV[7])
if not before then call('HSET', rows, n, ARGV[9]) end
if ARGV[8] == '' then
  call('HDEL', rows, n .. 'd')
else
  call('HSET', rows, n .. 'd', text(now + ARGV[8]))
end
call('ZADD', order, n, n)
call('HDEL', state, 'r', 'l', 'n', 'w')
call('PERSIST', state)
arrange()
return {'kept'}
