-- What the rarer cases need on top of record.lua: is this hash a record at all, when does it expire,
-- and what is told of a try that is over.
-- Covered by tests/contract/test_redis_ledger.py and tests/faults/test_redis_faults.py.

local PAST_KEPT = 16

local function misshapen(state, holder, fence, lease)
  if not state then
    return redis.error_reply('CORRUPT it is a hash of something else')
  end
  local known = state == 'P' or state == 'C' or state == 'F' or state == 'U'
  if not (known and holder and tonumber(fence) and tonumber(lease)) then
    return redis.error_reply('CORRUPT its fields are not those of a record')
  end
end

local function expire(after)
  if after ~= '' then call('PEXPIRE', key, after) else call('PERSIST', key) end
end

local function story(fence, holder, begun, ended, ending)
  return '[' .. fence .. ',' .. cjson.encode(holder) .. ',' .. (begun or fence) .. ',' ..
    ended .. ',' .. cjson.encode(ending) .. ']'
end
