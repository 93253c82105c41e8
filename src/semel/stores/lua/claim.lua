-- Ask for the right to run, where the record is there and has no outcome to replay: somebody works
-- on it, gave it up, failed or vanished. One round trip, whatever the answer.
--
-- ARGV: as in fresh.lua
-- Answers: {1, fence, number, steps, orphan's fence, orphan's lease} won, {3, us left} busy,
--          {4, what} mismatch, {5, fence, lease} orphan
-- Covered by tests/contract/test_redis_ledger.py.

local holder, lease, number, held, begun = unpack(call('HMGET', key, 'a', 'l', 'n', 'h', 'b'))
local odd = misshapen(state, holder, fence, lease)
if odd then return odd end

if (operation or '') ~= ARGV[2] then return {4, 'operation'} end
if (fingerprint or '') ~= ARGV[3] then return {4, 'fingerprint'} end
if state == 'C' then return {kind, data, status, fence} end

local now = clock()
local mine = holder == ARGV[1]
-- A doubled request that arrives after its own attempt is over must not claim for nobody.
if mine and state ~= 'P' then return {3, 0} end

local orphaned = not mine and state ~= 'F'
if orphaned then
  local left = tonumber(lease) - now
  if left > 0 then return {3, left} end
  if ARGV[6] == '0' or (held and ARGV[7] == '0') then
    return {5, tonumber(fence), tonumber(lease)}
  end
end

local until_us = text(now + ARGV[4])
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

if mine then
  call('HSET', key, 'l', until_us)
  expire(ARGV[5])
  -- Whoever took over is told of it again: the first answer may have been lost.
  local lapsed = before and string.match(before, ',(%d+),"lease ran out"%]$')
  if not lapsed then return {1, tonumber(fence), try, steps} end
  local orphan = tonumber(string.match(before, '^%[(%d+),'))
  return {1, tonumber(fence), try, steps, orphan, tonumber(lapsed)}
end

local larger = math.max(tonumber(fence) + 1, now)
local fields = {
  's', 'P', 'a', ARGV[1], 'e', text(larger), 'l', until_us,
  'n', text(try + 1), 'b', text(now), 'K', ARGV[8]
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
if ARGV[9] then put('T', ARGV[9]) else drop('T') end
if ARGV[7] == '1' then put('h', '1') else drop('h') end
if orphaned then
  put('p' .. text(try), story(fence, holder, begun, lease, 'lease ran out'))
  drop('p' .. text(try - PAST_KEPT))
end

call('HSET', key, unpack(fields))
call('HDEL', key, unpack(dropped))
expire(ARGV[5])

if not orphaned then return {1, larger, try + 1, steps} end
return {1, larger, try + 1, steps, tonumber(fence), tonumber(lease)}
