-- How a change under a claim begins: is the claim the current one? Goes between shape.lua and
-- complete, release, renew and note.
--
-- ARGV 1 to 4: attempt, fence (0: whatever this attempt got), operation, fingerprint
-- Answers: 1 kept; {0} lost; {0, kind, data, status} lost, with what the same call recorded
-- Covered by tests/contract/test_redis_ledger.py.

local state, holder, fence = unpack(call('HMGET', key, 's', 'a', 'e'))

local function lost()
  if state ~= 'C' then return {0} end
  local operation, fingerprint, kind, data, status =
    unpack(call('HMGET', key, 'o', 'f', 'k', 'r', 't'))
  if (operation or '') ~= ARGV[3] or (fingerprint or '') ~= ARGV[4] then return {0} end
  return {0, kind, data, status}
end

if holder ~= ARGV[1] or (fence ~= ARGV[2] and ARGV[2] ~= '0') then
  if call('EXISTS', key) == 0 then return {0} end
  return misshapen(state, holder, fence, call('HGET', key, 'l')) or lost()
end
