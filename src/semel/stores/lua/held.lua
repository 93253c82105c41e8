-- How a change under a claim begins: is the claim the current one? Goes between record.lua and
-- complete, release, renew and note.
--
-- ARGV 1 to 4: attempt, fence (0: whatever this attempt got), operation, fingerprint
-- Answers: 1 kept; {0} lost; {0, kind, data, status} lost, with what the same call recorded
-- Covered by tests/contract/test_redis_ledger.py.

local function lost()
  if state ~= 'C' or (operation or '') ~= ARGV[3] or (fingerprint or '') ~= ARGV[4] then
    return {0}
  end
  return {0, kind, data, status}
end

if not state or holder ~= ARGV[1] or (ARGV[2] ~= '0' and fence ~= ARGV[2]) then
  return lost()
end

local now = clock()
