-- How an attempt's ending begins: is it still the one that runs, and what it ran still as it was?
-- Goes between sequence.lua and apply and fail. An attempt that nobody has replaced counts, however
-- late.
--
-- ARGV: id, number, attempt, meta of what waited as it was when it was begun, '' when it did not
--       wait; ...
-- Answers: {'lost'} somebody else runs the message, {'seen'} it is known to have had its effect,
--          {'changed'} people have changed it meanwhile, and it is as if it had not run

local number, attempt = tonumber(ARGV[2]), ARGV[3]
local seq, done, runner, head = unpack(call('HMGET', state, 'q', 'd', 'r', 'h'))
seq = tonumber(seq or 0)
local function had_its_effect()
  if number == 0 then return done end
  return number <= seq
end
if runner and runner ~= attempt then
  return {had_its_effect() and 'seen' or 'lost'}
end
if runner and ARGV[4] ~= '' and call('HGET', rows, ARGV[2] .. 's') ~= ARGV[4] then
  call('HDEL', state, 'r', 'l', 'n', 'w')
  return {'changed'}
end
