-- Forget all but the last entries, as far as every group has read and acknowledged them.
--
-- ARGV: how many to keep
-- Answers: how many were forgotten

local tail = ending(unpack(call('HMGET', helper, 'position', 'id')))
local over = tail.length - tonumber(ARGV[1])
if over <= 0 or tail.strange then return 0 end
return (trim(tail, over))
