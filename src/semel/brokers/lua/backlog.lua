-- What lies in the stream, and how far each group is.
--
-- Answers: {length, position, id, groups}, each group {name, unread or -1, pending, ms since the
--          oldest pending entry was handed out}

local tail = ending(unpack(call('HMGET', helper, 'position', 'id')))

-- Before 7.0 Redis does not tell, and entries are counted as far as that is cheap.
local MOST = 1000

local function unread(group)
  if group.lag then return group.lag end
  if group['last-delivered-id'] == tail.position .. '-0' then return 0 end
  local rest = #call('XRANGE', stream, '(' .. group['last-delivered-id'], '+', 'COUNT', MOST)
  return rest < MOST and rest or -1
end

local groups = {}
if tail.exists then
  for _, row in ipairs(call('XINFO', 'GROUPS', stream)) do
    local group = named(row)
    local oldest = call('XPENDING', stream, group.name, '-', '+', 1)[1]
    groups[#groups + 1] = {group.name, unread(group), group.pending, oldest and oldest[3] or 0}
  end
end
return {tail.length, tail.position, tail.id, groups}
