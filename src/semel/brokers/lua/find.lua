-- What is at some positions: to see whether a batch that begins before the tail was published.
--
-- ARGV: the first position, the last
-- Answers: {the entries, the stream's first entry, 1 when the last entry is known to be ours}

local tail = ending(unpack(call('HMGET', helper, 'position', 'id')))
local entries = call('XRANGE', stream, ARGV[1] .. '-0', ARGV[2] .. '-0')
local first = call('XRANGE', stream, '-', '+', 'COUNT', 1)
return {entries, first, tail.id ~= '' and 1 or 0}
