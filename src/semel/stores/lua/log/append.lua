-- Add an entry, change the state, keep the reply and ring: all of it, or nothing.
--
-- KEYS: meta, log, state
-- ARGV: tag of the beginning; us for which the id is remembered, after which entries and state go,
--       after which all does; how many entries are kept, how many make it full; '1' when this ends
--       it; the command that rings; mark and, behind its 40 digits, the seal; id, '1' with an
--       entry, its data, expected offset or '<offset>.<tag>', reply, number of fences; of each
--       fence its name and number, with a plus in front if it must grow; then nothing, or the
--       state, or a field's name, rank and data. '' stands for never, none and any.
-- Answers: '<offset>.<tag>' appended; {'silent', offset, tag, why} appended, but it could not ring;
--          {'repeated', offset, tag, reply}, {'mismatch'}, {'fenced', which, number},
--          {'ended', offset, tag}, {'conflict', offset, tag}, {'full', length}

local TRIMS_PER_APPEND, FORGETS_PER_APPEND = 16, 4
local PLUS = string.byte('+')

local meta, log, state = KEYS[1], KEYS[2], KEYS[3]
local start, ids_us, gone_us, until_us, most, full, ends, publish, mark, id, has_entry, data, expect,
  reply, fences = unpack(ARGV, 1, 15)
has_entry, ends, fences = has_entry == '1', ends == '1', tonumber(fences)
local sealed, behind = mark, 15 + 2 * fences
mark = string.sub(mark, 1, 40)

local names = {'o', 't', 'p', 'e', 'u', 'i' .. id}
for n = 16, behind, 2 do names[#names + 1] = 'f' .. ARGV[n] end
local found = call('HMGET', meta, unpack(names))
local head, tag, floor, ended, over, known = unpack(found, 1, 6)
local odd = misshapen(head, tag, floor)
if odd then return odd end

local now, stamp = clock()
local anew = not head or come(over, now)
local had_an_end = not anew and tonumber(over or '')
local offset = anew and 0 or tonumber(head)
floor = not anew and floor and tonumber(floor) or 0

if anew then
  tag = start
else
  if known then
    local at, of, came, for_us, rest = string.match(known, '^(%d+) (%x+) (%d+) (%d+) ()', 42)
    if not at then return redis.error_reply('CORRUPT what is kept of an id is not ours') end
    if tonumber(at) > floor or came + for_us > now then
      if string.sub(known, 1, 40) ~= mark then return {'mismatch'} end
      return {'repeated', tonumber(at), of, string.sub(known, rest)}
    end
  end
  for n = 1, fences do
    local held, number = tonumber(found[6 + n] or ''), ARGV[15 + 2 * n]
    local most = string.byte(number) == PLUS and number - 1 or tonumber(number)
    if held and held > most then return {'fenced', n, held} end
  end
  if ended then return {'ended', offset, tag} end
end
if expect ~= '' and expect ~= text(offset) and expect ~= text(offset) .. '.' .. tag then
  return {'conflict', offset, tag}
end
if has_entry and full ~= '' and offset - floor >= tonumber(full) then
  return {'full', offset - floor}
end

-- Everything that is to be written is known before the first write.
if has_entry then
  offset, tag = offset + 1, string.sub(redis.sha1hex(tag .. sealed), 1, 12)
end
local cut, cut_tag = nil, nil
if most ~= '' and offset - floor > tonumber(most) then
  cut = math.min(offset - most, floor + TRIMS_PER_APPEND)
  cut_tag = cut == offset and tag or tag_at(log, cut)
end
local field, rank = ARGV[behind + 1], ARGV[behind + 2]
if rank and not anew then
  local held = call('HGET', state, 'r' .. field)
  if held and tonumber(held) >= tonumber(rank) then field = nil end
elseif field and not anew then
  call('HEXISTS', state, 's')  -- refused where something else lies, as its write would be
end

local position = text(offset)
if anew and (head or call('EXISTS', log, state) > 0) then
  call('HSET', meta, 'o', '0')  -- refused when memory is short, as the next one is not
  call('UNLINK', meta, log, state)
end
if has_entry then
  call('XADD', log, position .. '-0', 'm', tag .. ' ' .. stamp .. ' ' .. id, 'd', data)
end
local written = {
  'o', position, 't', tag,
  'i' .. id, mark .. ' ' .. position .. ' ' .. tag .. ' ' .. stamp .. ' ' .. ids_us .. ' ' .. reply
}
local function put(name, word)
  written[#written + 1] = name
  written[#written + 1] = word
end
for n = 16, behind, 2 do
  local number = ARGV[n + 1]
  put('f' .. ARGV[n], string.byte(number) == PLUS and string.sub(number, 2) or number)
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
call('HSET', meta, unpack(written))
if rank and field then
  call('HSET', state, 'r' .. field, rank, 'd' .. field, ARGV[behind + 3])
elseif field then
  call('HSET', state, 's', field)
end

if cut then
  floor = cut
  call('XTRIM', log, 'MINID', text(cut + 1) .. '-0')
end
-- An id lives as long as its entry: before the first trim there is none to forget. Afterwards a few
-- are looked at, at random. Each append adds one and looks at four: so of all ids that are kept, no
-- more than a quarter are due.
if floor > 0 or offset == 0 then
  local some = call('HRANDFIELD', meta, FORGETS_PER_APPEND, 'WITHVALUES')
  for n = 1, #some, 2 do
    if string.sub(some[n], 1, 1) == 'i' then
      local at, came, for_us = string.match(some[n + 1], '^(%d+) %x+ (%d+) (%d+) ', 42)
      if at and tonumber(at) <= floor and came + for_us <= now then call('HDEL', meta, some[n]) end
    end
  end
end

local stays_us = ends and gone_us or until_us
if stays_us ~= '' or until_us ~= '' or had_an_end then
  -- Redis counts from the millisecond in which the script began: one more, and nothing goes early.
  local function lasts(key, us)
    if us ~= '' then
      call('PEXPIRE', key, text(math.ceil(us / 1000) + 1))
    elseif had_an_end then
      call('PERSIST', key)
    end
  end
  lasts(log, stays_us)
  lasts(state, stays_us)
  lasts(meta, until_us)
end

if has_entry or ends then
  -- Sharded channels are there from 7.0 on, as this number is.
  local rung = redis.pcall(redis.REDIS_VERSION_NUM and publish or 'PUBLISH', log, '')
  if type(rung) == 'table' and rung.err then return {'silent', offset, tag, rung.err} end
end
return position .. '.' .. tag
