-- The row, and the entries from an offset on, its own first if that is still there.
--
-- KEYS: meta, log; ARGV: offset, how many entries
-- Answers: nothing when there is no such stream; {now, {o, t, p, q, e, g, u}, entries}

local row = call('HMGET', KEYS[1], 'o', 't', 'p', 'q', 'e', 'g', 'u')
if not row[1] then return false end
local odd = misshapen(row[1], row[2], row[3])
if odd then return odd end

local offset, entries = tonumber(ARGV[1]), {}
if offset >= tonumber(row[3] or 0) and offset < tonumber(row[1]) then
  entries = call('XRANGE', KEYS[2], ARGV[1] .. '-0', '+', 'COUNT', ARGV[2])
end
local _, now = clock()
return {now, row, entries}
