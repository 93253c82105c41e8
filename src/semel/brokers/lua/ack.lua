-- Acknowledge: not fenced, for that a message had its effect is true whoever says it.
--
-- ARGV: group, ids

local count = 0
for i = 2, #ARGV, 1000 do
  count = count + call('XACK', stream, ARGV[1], unpack(ARGV, i, math.min(i + 999, #ARGV)))
end
return count
