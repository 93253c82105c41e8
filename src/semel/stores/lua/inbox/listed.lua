-- Sequences of one slot with something that waits. Stands alone.
--
-- KEYS: waits; ARGV: identity behind which to begin ('' for the first), limit
-- Answers: identities, in their order

local from = ARGV[1] == '' and '-' or '(' .. ARGV[1]
return redis.call('ZRANGEBYLEX', KEYS[1], from, '+', 'LIMIT', 0, ARGV[2])
