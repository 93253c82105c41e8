-- The row, and the state.
--
-- KEYS: meta, state
-- Answers: nothing when there is no such stream; {now, {o, t, p, q, e, g, u}, fields of the state}

local row = call('HMGET', KEYS[1], 'o', 't', 'p', 'q', 'e', 'g', 'u')
if not row[1] then return false end
local odd = misshapen(row[1], row[2], row[3])
if odd then return odd end

local _, now = clock()
return {now, row, call('HGETALL', KEYS[2])}
