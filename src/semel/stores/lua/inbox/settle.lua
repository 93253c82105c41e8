-- Carry out a settlement, if what it is about is as it was seen.
--
-- ARGV: id, number, changes of the sequence as seen, meta as seen; new last number or '', '1' to
--       drop the message, '1' to take it for one that had its effect and for how many ms; new
--       message, meta and due ('' each for the old one); audit
-- Answers: 1, 0 when something has changed since

local number, n = tonumber(ARGV[2]), ARGV[2]
if (call('HGET', state, 't') or '0') ~= ARGV[3] then return 0 end
if call('HGET', rows, n .. 's') ~= ARGV[4] then return 0 end

local now = clock()
call('HINCRBY', state, 't', 1)
if ARGV[5] ~= '' then call('HSET', state, 'q', ARGV[5]) end
if ARGV[7] == '1' then
  call('HSET', state, 'd', text(now))
  call('PEXPIRE', state, ARGV[8])
end
if ARGV[9] ~= '' then call('HSET', rows, n, ARGV[9]) end
if ARGV[10] ~= '' then call('HSET', rows, n .. 's', ARGV[10]) end
if ARGV[11] ~= '' then call('HSET', rows, n .. 'd', ARGV[11]) end
if ARGV[6] == '1' then drop(number) end
if ARGV[5] ~= '' then wake(ARGV[5] + 1, now) end
arrange()
call('LPUSH', audit, ARGV[12])
call('LTRIM', audit, 0, 9999)
return 1
