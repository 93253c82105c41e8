-- Forget all but the last entries, as far as every group has read and acknowledged them.
--
-- ARGV: how many to keep
-- Answers: how many were forgotten

local tail = ending(unpack(call('HMGET', helper, 'position', 'id')))
local over = tail.length - tonumber(ARGV[1])
if over <= 0 then return 0 end
local lowest, whose = needed(tonumber(tail.position))
if not whose then return 0 end
local spare = #call('XRANGE', stream, '-', string.format('(%.0f-0', lowest), 'COUNT', over)
if spare > 0 then call('XTRIM', stream, 'MAXLEN', '=', tail.length - spare) end
return spare
