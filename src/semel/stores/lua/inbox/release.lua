-- It was not the message's fault, or it was put down: as if it had never been begun.
--
-- ARGV: id, attempt
-- Answers: 1, 0 when somebody else runs it

local runner, begun = unpack(call('HMGET', state, 'r', 'n'))
if runner ~= ARGV[2] then return 0 end
if begun then call('HINCRBY', state, 'n', -1) end
call('HDEL', state, 'r', 'l')
return 1
