-- Who may read for a group. Stands before the scripts of a consumer.
--
-- ARGV: group, fence, token (of one consumer, for the same owner may begin anew), further ones

local group, fence, token = ARGV[1], ARGV[2], ARGV[3]
local mine = fence .. ' ' .. token
local stored = call('HGET', helper, 'owner:' .. group)
local rank = tonumber(stored and string.match(stored, '^%d+') or 0) - tonumber(fence)
