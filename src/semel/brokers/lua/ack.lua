-- Acknowledge: not fenced, for that a message had its effect is true whoever says it.
-- Then trim to the target of the last publish, as far as every group has acknowledged.
--
-- ARGV: group, ids

local count = 0
for i = 2, #ARGV, 1000 do
  count = count + call('XACK', stream, ARGV[1], unpack(ARGV, i, math.min(i + 999, #ARGV)))
end

-- The entries are acknowledged even if an ACL refuses XLEN or XTRIM to a worker. The relay trims later.
pcall(function()
  local target, position, id = unpack(call('HMGET', helper, 'target', 'position', 'id'))
  target = tonumber(target or '')
  if target and call('XLEN', stream) > target then shorten(ending(position, id), target) end
end)
return count
