-- What is at a position: to see whether a batch that lies before the tail was published.
--
-- ARGV: position
-- Answers: {the entry, the first entry's id, 1 when the last entry is known to be ours}

local tail = ending(unpack(call('HMGET', helper, 'position', 'id')))
local id = ARGV[1] .. '-0'
local entry = call('XRANGE', stream, id, id)[1]
local first = call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
return {entry or false, first and first[1] or false, tail.id ~= '' and 1 or 0}
