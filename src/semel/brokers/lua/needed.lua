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

-- Entries that one call trims at most, so that the script stays short. Later calls trim the rest.
local MOST = 20000

-- Trim at most `over` entries, as far as every group has read and acknowledged them.
-- Returns how many, and the name of the slowest group, false where there is no group.
local function trim(tail, over)
  local at, spare = tonumber(tail.position), 0
  local lowest, whose = needed(at)
  if whose and tail.length - over >= at + 1 - lowest then
    spare = over -- there are no more entries than positions from the lowest on
  elseif whose then
    spare = #call('XRANGE', stream, '-', string.format('(%.0f-0', lowest), 'COUNT', over)
  end
  if spare > 0 then call('XTRIM', stream, 'MAXLEN', '=', tail.length - spare) end
  return spare, whose
end

-- Trim down to the target, unless the stream has a foreign entry: positions are then not reliable.
local function shorten(tail, target)
  if tail.length > target and not tail.strange then
    trim(tail, math.min(tail.length - target, MOST))
  end
end
