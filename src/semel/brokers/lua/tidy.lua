-- Remove the consumers of former owners, who have nothing pending any more.
--
-- ARGV: ..., prefix of their names, our consumers
-- Answers: how many

if rank > 0 or (rank == 0 and stored ~= mine) then return 0 end

local ours = {}
for i = 5, #ARGV do ours[ARGV[i]] = true end
local count = 0
for _, row in ipairs(call('XINFO', 'CONSUMERS', stream, group)) do
  local found = named(row)
  local former = string.sub(found.name, 1, #ARGV[4]) == ARGV[4] and not ours[found.name]
  if former and found.pending == 0 then
    call('XGROUP', 'DELCONSUMER', stream, group, found.name)
    count = count + 1
  end
end
return count
