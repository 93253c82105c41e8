-- Ask for the right to run: one round trip, whatever the answer.
--
-- ARGV: attempt, operation, fingerprint, lease (us), ttl (us, '' for ever), takeover (1 or 0),
--       hold (1 or 0), key as written, tenant
-- Answers: {1, fence, number, steps, orphan's fence, orphan's lease} won (a first try: {1, fence}),
--          {2, fence, kind, data, status} done, {3, us left} busy, {4, what} mismatch,
--          {5, fence, lease} orphan
--
-- A replay is read with the first command and needs no other; steps are read only for an attempt
-- that takes up an earlier one's work.
-- Covered by tests/contract/test_redis_ledger.py.

if state then
  if (operation or '') ~= ARGV[2] then return {4, 'operation'} end
  if (fingerprint or '') ~= ARGV[3] then return {4, 'fingerprint'} end
  if state == 'C' then return {2, tonumber(fence), kind, data, status} end
end

local now = clock()
local mine = state and holder == ARGV[1]
-- A doubled request that arrives after its own attempt is over must not claim for nobody.
if state == 'F' and mine then return {3, 0} end

local orphaned = running and not mine
if orphaned then
  local left = tonumber(lease) - now
  if left > 0 then return {3, left} end
  if ARGV[6] == '0' or (held and ARGV[7] == '0') then
    return {5, tonumber(fence), tonumber(lease)}
  end
end

local until_us = now + tonumber(ARGV[4])
local expires = nil
if ARGV[7] == '0' and ARGV[5] ~= '' then expires = until_us + tonumber(ARGV[5]) end

if not state then
  call('HSET', key, 's', 'P', 'a', ARGV[1], 'e', text(now), 'l', text(until_us),
    'o', ARGV[2], 'f', ARGV[3], 'K', ARGV[8])
  if ARGV[9] ~= '' then call('HSET', key, 'T', ARGV[9]) end
  if ARGV[7] == '1' then call('HSET', key, 'h', '1') end
  expire(expires)
  return {1, now}
end

local try = tonumber(number or 1)
local before = nil
local steps = {}
local all = call('HGETALL', key)
for i = 1, #all, 2 do
  if string.sub(all[i], 1, 1) == 'S' then
    steps[#steps + 1] = string.sub(all[i], 2)
    steps[#steps + 1] = all[i + 1]
  elseif all[i] == 'p' .. text(try - 1) then
    before = all[i + 1]
  end
end

if running and mine then
  call('HSET', key, 's', 'P', 'l', text(until_us))
  expire(expires)
  -- Whoever took over is told of it again: the first answer may have been lost.
  local lapsed = before and string.match(before, ',(%d+),"lease ran out"%]$')
  if not lapsed then return {1, tonumber(fence), try, steps} end
  local orphan = tonumber(string.match(before, '^%[(%d+),'))
  return {1, tonumber(fence), try, steps, orphan, tonumber(lapsed)}
end

local larger = math.max(tonumber(fence) + 1, now)
local fields = {
  's', 'P', 'a', ARGV[1], 'e', text(larger), 'l', text(until_us),
  'n', text(try + 1), 'b', text(now), 'K', ARGV[8], 'T', ARGV[9]
}
local dropped = {'x'}
local function put(name, value)
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end
local function drop(name)
  dropped[#dropped + 1] = name
end

if try == 1 then put('c', fence) end
if ARGV[7] == '1' then put('h', '1') else drop('h') end
if orphaned then
  put('p' .. text(try), '[' .. fence .. ',' .. cjson.encode(holder) .. ',' ..
    (begun or fence) .. ',' .. lease .. ',"lease ran out"]')
  drop('p' .. text(try - PAST_KEPT))
end

call('HSET', key, unpack(fields))
call('HDEL', key, unpack(dropped))
expire(expires)

if not orphaned then return {1, larger, try + 1, steps} end
return {1, larger, try + 1, steps, tonumber(fence), tonumber(lease)}
