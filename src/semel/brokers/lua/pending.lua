-- What was handed out and not acknowledged, by id.
--
-- ARGV: group, from, to, limit
-- Answers: rows of id, consumer, ms since it was handed out, times; nothing without the group

local found = redis.pcall('XPENDING', stream, ARGV[1], ARGV[2], ARGV[3], ARGV[4])
if found.err and string.find(found.err, 'NOGROUP', 1, true) then return {} end
return found
