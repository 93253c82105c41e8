-- Whoever runs the message goes on with it.
--
-- ARGV: id, attempt, lease (us)
-- Answers: 1, 0 when somebody else runs it

if call('HGET', state, 'r') ~= ARGV[2] then return 0 end
call('HSET', state, 'l', text(clock() + ARGV[3]))
return 1
