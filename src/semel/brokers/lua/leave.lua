-- Forget a group: nothing is kept for it any more.
--
-- ARGV: group

call('HDEL', helper, 'owner:' .. ARGV[1], 'read:' .. ARGV[1])
if call('EXISTS', stream) == 1 then call('XGROUP', 'DESTROY', stream, ARGV[1]) end
return 1
