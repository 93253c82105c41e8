-- Ask for the right to run: one round trip, whatever the answer.
--
-- ARGV: attempt, operation, fingerprint, lease (us), ttl (us, '' for ever), takeover (1 or 0),
--       hold (1 or 0), key as written, tenant
-- Answers: {1, fence, number, steps, orphan's fence, orphan's lease} won (a first try: {1, fence}),
--          {2, fence, kind, data, status} done, {3, us left} busy, {4, what} mismatch,
--          {5, fence, lease} orphan
--
-- A replay reads the outcome's three fields and nothing else of it; steps are read only for an
-- attempt that takes up an earlier one's work.
-- Covered by tests/contract/test_redis_ledger.py.

if state then
  if (operation or '') ~= ARGV[2] then return {4, 'operation'} end
  if (fingerprint or '') ~= ARGV[3] then return {4, 'fingerprint'} end
  if state == 'C' then
    local outcome = redis.call('HMGET', key, 'k', 'r', 't')
    return {2, tonumber(fence), outcome[1], outcome[2], outcome[3]}
  end
end

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

local function steps()
  local found = {}
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 1) == 'S' then
      found[#found + 1] = string.sub(fields[i], 2)
      found[#found + 1] = fields[i + 1]
    end
  end
  return found
end

if running and mine then
  redis.call('HSET', key, 's', 'P', 'l', text(until_us))
  expire(expires)
  return {1, tonumber(fence), tonumber(number or 1), steps()}
end

local try = state and tonumber(number or 1) + 1 or 1
local next_fence = now
if state then next_fence = math.max(tonumber(fence) + 1, now) end

local fields = {'s', 'P', 'a', ARGV[1], 'e', text(next_fence), 'l', text(until_us)}
local function put(name, value)
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end
local dropped = {}
local function put_or_drop(name, value)
  if value ~= '' then
    put(name, value)
  elseif state then
    dropped[#dropped + 1] = name
  end
end

put_or_drop('K', ARGV[8])
put_or_drop('T', ARGV[9])
put_or_drop('h', ARGV[7] == '1' and '1' or '')
if not state then
  if ARGV[2] ~= '' then put('o', ARGV[2]) end
  if ARGV[3] ~= '' then put('f', ARGV[3]) end
else
  dropped[#dropped + 1] = 'x'
  put('n', text(try))
  put('b', text(now))
  if try == 2 then put('c', fence) end
end
if orphaned then
  put('p' .. text(try - 1), '[' .. fence .. ',' .. cjson.encode(holder) .. ',' ..
    (begun or fence) .. ',' .. lease .. ',"lease ran out"]')
  dropped[#dropped + 1] = 'p' .. text(try - 1 - PAST_KEPT)
end

redis.call('HSET', key, unpack(fields))
if #dropped > 0 then redis.call('HDEL', key, unpack(dropped)) end
expire(expires)

if not state then return {1, next_fence} end
if not orphaned then return {1, next_fence, try, steps()} end
return {1, next_fence, try, steps(), tonumber(fence), tonumber(lease)}
