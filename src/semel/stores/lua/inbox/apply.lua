-- The message has had its effect: remember it, and let what waits behind it run.
--
-- ARGV: ..., ms for which a message without a number is remembered
-- Answers: {'kept'}, and as ended.lua

if had_its_effect() and not runner then return {'kept'} end
local now = clock()
if number == 0 then
  call('HSET', state, 'd', text(now))
else
  call('HSET', state, 'q', text(math.max(seq, number)))
end
call('HINCRBY', state, 't', 1)
call('HDEL', state, 'r', 'l', 'n', 'w')
if head then
  drop(number)
  if number > 0 then wake(number + 1, now) end
  arrange()
end
if number == 0 then call('PEXPIRE', state, ARGV[5]) end
return {'kept'}
