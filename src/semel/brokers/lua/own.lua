-- Become the one who reads for a group; make the group if it is not there.
--
-- Answers: {'begun', last id that was handed out to the group}, {'stale', owner}

if rank > 0 then return {'stale', stored} end
-- A command that frees memory comes first. Behind it, a Redis that is out of memory lets the rest
-- pass: somebody has to read, or it stays full. A request that comes twice forgets nothing.
if stored ~= mine then call('HDEL', helper, 'read:' .. group) end
local made = redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
call('HSET', helper, 'owner:' .. group, mine)
for _, row in ipairs(call('XINFO', 'GROUPS', stream)) do
  local found = named(row)
  if found.name == group then return {'begun', found['last-delivered-id']} end
end
