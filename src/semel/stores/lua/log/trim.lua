-- Forget the entries up to an offset.
--
-- KEYS: meta, log; ARGV: offset, and its tag, if it must have that one
-- Answers: how many there were

local meta, log = unpack(KEYS)
local head, tag, floor, gone, over = unpack(call('HMGET', meta, 'o', 't', 'p', 'g', 'u'))
local odd = misshapen(head, tag, floor)
if odd then return odd end

local now = clock()
if not head or come(gone, now) or come(over, now) then return 0 end

head, floor = tonumber(head), tonumber(floor or 0)
local cut = math.min(tonumber(ARGV[1]), head)
if cut <= floor then return 0 end
local cut_tag = cut == head and tag or tag_at(log, cut)
if ARGV[2] and (ARGV[2] ~= cut_tag or tonumber(ARGV[1]) > head) then return 0 end
-- The other way round it would be refused when memory is short, which is when it is needed.
call('XTRIM', log, 'MINID', text(cut + 1) .. '-0')
call('HSET', meta, 'p', text(cut), 'q', cut_tag)
return cut - floor
