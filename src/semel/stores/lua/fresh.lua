-- Ask for the right to run, and the two common answers: a first try, and a replay. Goes between
-- record.lua and what claim.lua says about every other case.
--
-- ARGV: attempt, operation, fingerprint, lease (us), expires after (ms, '' never),
--       takeover (1 or 0), hold (1 or 0), key as written, tenant (absent: none)
-- Answers: the fence, won at the first try; {kind, data, status, fence} done
-- Covered by tests/contract/test_redis_ledger.py.

if call('EXISTS', key) == 0 then
  local now = clock()
  call('HSET', key, 's', 'P', 'a', ARGV[1], 'e', text(now), 'l', text(now + ARGV[4]),
    'o', ARGV[2], 'f', ARGV[3], 'K', ARGV[8])
  if ARGV[9] then call('HSET', key, 'T', ARGV[9]) end
  if ARGV[7] == '1' then call('HSET', key, 'h', '1') end
  if ARGV[5] ~= '' then call('PEXPIRE', key, ARGV[5]) end
  return now
end

local state, operation, fingerprint, kind, data, status, fence =
  unpack(call('HMGET', key, 's', 'o', 'f', 'k', 'r', 't', 'e'))

if state == 'C' and operation == ARGV[2] and fingerprint == ARGV[3] then
  return {kind, data, status, fence}
end
