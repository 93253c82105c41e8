-- What waits in a sequence, for people.
--
-- ARGV: id, number behind which to begin, limit
-- Answers: {now, q, t, how many wait, rows}, each row {number, message, meta, due, error}

local found = {}
local numbers = call('ZRANGEBYSCORE', order, ARGV[2], '+inf', 'LIMIT', 0, ARGV[3])
for i, n in ipairs(numbers) do
  local document, meta, at, why = unpack(call('HMGET', rows, n, n .. 's', n .. 'd', n .. 'e'))
  found[i] = {n, document, meta, at or '', why or ''}
end
local seq, turn = unpack(call('HMGET', state, 'q', 't'))
return {text(clock()), seq or '0', turn or '0', call('ZCARD', order), found}
