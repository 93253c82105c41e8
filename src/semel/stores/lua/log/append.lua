-- Add an entry, change the state, keep the reply and ring: all of it, or nothing.
--
-- KEYS: meta, log, state, ids
-- ARGV: tag of the beginning; us for which the id is remembered, after which entries and state go,
--       after which all does; how many entries are kept, how many make it full; '1' when this ends
--       it; the command that rings; mark, id, '1' with an entry, its data, expected offset, reply,
--       number of fences; of each fence its name and number; then nothing, or the state, or a
--       field's name, rank and data. '' stands for never, none and any.
-- Answers: {'appended', offset, tag} and why it could not ring, if so; {'repeated', offset, tag,
--          reply}, {'mismatch'}, {'fenced', which, number}, {'ended', offset, tag}, {'conflict',
--          offset, tag}, {'full', length}

local TRIMS_PER_APPEND, FORGETS_PER_APPEND = 16, 4

local meta, log, state, ids = unpack(KEYS)
local start, ids_us, gone_us, until_us, most, full, ends, publish, mark, id, has_entry, data, expect,
  reply, fences = unpack(ARGV)
has_entry, ends, fences = has_entry == '1', ends == '1', tonumber(fences)
local behind = 15 + 2 * fences

local names = {'o', 't', 'p', 'e', 'u', 'i' .. id}
for n = 16, behind, 2 do names[#names + 1] = 'f' .. ARGV[n] end
local found = call('HMGET', meta, unpack(names))
local now = clock()
local anew = not found[1] or come(found[5], now)
local had_an_end = not anew and tonumber(found[5] or '')
local offset, tag, floor = 0, start, 0

if not anew then
  offset, tag, floor = tonumber(found[1]), found[2], tonumber(found[3] or 0)
  local known = found[6]
  if known then
    local at, of, time, rest = string.match(known, '^(%d+) (%x+) (%d+) ()', 42)
    if tonumber(at) > floor or tonumber(time) > now then
      if string.sub(known, 1, 40) ~= mark then return {'mismatch'} end
      return {'repeated', tonumber(at), of, string.sub(known, rest)}
    end
  end
  for n = 1, fences do
    local held = tonumber(found[6 + n] or 0)
    if held > tonumber(ARGV[15 + 2 * n]) then return {'fenced', n, held} end
  end
  if found[4] then return {'ended', offset, tag} end
end
if expect ~= '' and tonumber(expect) ~= offset then return {'conflict', offset, tag} end
if has_entry and full ~= '' and offset - floor >= tonumber(full) then
  return {'full', offset - floor}
end

-- Everything that is to be written is known before the first write.
if has_entry then
  offset, tag = offset + 1, string.sub(redis.sha1hex(tag .. mark), 1, 12)
end
local cut, cut_tag = nil, nil
if most ~= '' and offset - floor > tonumber(most) then
  cut = math.min(offset - most, floor + TRIMS_PER_APPEND)
  cut_tag = cut == offset and tag or tag_at(log, cut)
end
local field, rank, value = ARGV[behind + 1], ARGV[behind + 2], ARGV[behind + 3]
local moves = field
if rank and not anew then
  local held = call('HGET', state, 'r' .. field)
  moves = not held or tonumber(held) < tonumber(rank)
end

if anew and (found[1] or call('EXISTS', log, state, ids) > 0) then
  call('HSET', meta, 'o', '0')  -- refused when memory is short, as the next two are not
  call('UNLINK', meta, log, state, ids)
end
if has_entry then
  call('XADD', log, text(offset) .. '-0', 't', tag, 'i', id, 'a', text(now), 'd', data)
end
local time = text(now + ids_us)
local written = {
  'o', text(offset), 't', tag,
  'i' .. id, mark .. ' ' .. text(offset) .. ' ' .. tag .. ' ' .. time .. ' ' .. reply
}
local function put(name, word)
  written[#written + 1] = name
  written[#written + 1] = word
end
if cut then
  put('p', text(cut))
  put('q', cut_tag)
end
if ends then
  put('e', '1')
  put('g', gone_us ~= '' and text(now + gone_us) or '')
end
if until_us ~= '' or had_an_end then put('u', until_us ~= '' and text(now + until_us) or '') end
for n = 16, behind, 2 do put('f' .. ARGV[n], ARGV[n + 1]) end
call('HSET', meta, unpack(written))
call('RPUSH', ids, time .. ' ' .. id)

if rank and moves then
  call('HSET', state, 'r' .. field, rank, 'd' .. field, value)
elseif moves and not rank then
  call('HSET', state, 's', field)
end
if cut then
  call('XTRIM', log, 'MINID', text(cut + 1) .. '-0')
  floor = cut
end

-- An id lives as long as its entry: before the first trim there is none to forget.
local forgets = (floor == 0 and offset > 0) and 0 or FORGETS_PER_APPEND
for _ = 1, forgets do
  local oldest = call('LINDEX', ids, 0)
  local due, name = string.match(oldest or '', '^(%d+) (.*)$')
  if not due or tonumber(due) > now then break end
  local known = call('HGET', meta, 'i' .. name)
  local at, until_then = string.match(known or '', '^(%d+) %x+ (%d+) ', 42)
  -- Another time: it was forgotten, came again, and is in the list again.
  if until_then == due then
    if tonumber(at) > floor then break end
    call('HDEL', meta, 'i' .. name)
  end
  call('LPOP', ids)
end

-- Redis counts from the millisecond in which the script began: one more, and nothing goes too early.
local function lasts(key, us)
  if us ~= '' then
    call('PEXPIRE', key, text(math.ceil(us / 1000) + 1))
  elseif had_an_end then
    call('PERSIST', key)
  end
end
local stays_us = ends and gone_us or until_us
if stays_us ~= '' or until_us ~= '' or had_an_end then
  lasts(log, stays_us)
  lasts(state, stays_us)
  lasts(meta, until_us)
  lasts(ids, until_us)
end

if not (has_entry or ends) then return {'appended', offset, tag} end
-- Sharded channels are there from 7.0 on, as this number is.
local rung = redis.pcall(redis.REDIS_VERSION_NUM and publish or 'PUBLISH', log, '')
return {'appended', offset, tag, type(rung) == 'table' and rung.err or nil}
