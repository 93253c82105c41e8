-- How far a stream may be trimmed. Stands before the scripts that do so.

-- The first position that some group still needs: its oldest pending entry, or else the next one
-- it has not read. `at` is where the stream ends; false for the name where there is no group.
local function needed(at)
  local lowest, whose = at + 1, false
  for _, row in ipairs(call('XINFO', 'GROUPS', stream)) do
    local group = named(row)
    local from = position_of(group['last-delivered-id']) + 1
    if group.pending > 0 then
      local oldest = call('XPENDING', stream, group.name, '-', '+', 1)[1]
      if oldest then from = math.min(from, position_of(oldest[1])) end
    end
    if from < lowest or not whose then lowest, whose = math.min(from, lowest), group.name end
  end
  return lowest, whose
end
