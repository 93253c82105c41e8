-- Where the stream ends. Trims it to the target first, if there is one.
--
-- ARGV: target length, '' if the caller must not trim
-- Answers: {position, id}

local tail = ending(unpack(call('HMGET', helper, 'position', 'id')))
local target = tonumber(ARGV[1])
if target then shorten(tail, target) end
return {tail.position, tail.id}
