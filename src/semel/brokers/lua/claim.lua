-- Take over entries that others were handed, and count that. Asked again after a lost reply, those
-- that are ours already are told again.
--
-- ARGV: ..., consumer, ms that others must have had them for, ids
-- Answers: {'claimed', entries, ids whose entries were deleted}, {'stale', owner}

if rank > 0 or (rank == 0 and stored ~= mine) then return {'stale', stored} end

local entries, gone = {}, {}
for i = 6, #ARGV do
  local id = ARGV[i]
  local held = call('XPENDING', stream, group, id, id, 1)[1]
  if held then
    local entry = call('XRANGE', stream, id, id)[1]
    if not entry then
      gone[#gone + 1] = id
    elseif held[2] == ARGV[4]
      or #call(
        'XCLAIM', stream, group, ARGV[4], ARGV[5], id, 'RETRYCOUNT', held[4] + 1, 'JUSTID'
      ) > 0
    then
      entries[#entries + 1] = entry
    end
  end
end
return {'claimed', entries, gone}
