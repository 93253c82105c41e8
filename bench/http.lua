-- The requests that wrk sends for bench/http_load.py, and what it found, as one line at the end.
--
--   wrk ... -s bench/http.lua URL -- first|replay|unkeyed STAMP COUNT
--
-- "first" has a key of its own for every request, "replay" one of COUNT keys by turns. The keys
-- look like the UUIDs that clients send: STAMP makes the first 24 characters, a number the rest.

local BODY = '{"amount":5,"currency":"EUR"}'
local HEAD = "POST /charges HTTP/1.1\r\nHost: bench\r\nX-User-Id: shop-1\r\n"
  .. "Content-Type: application/json\r\nContent-Length: " .. #BODY .. "\r\n"

local function keyed(stamp, number)
  return HEAD .. "Idempotency-Key: " .. stamp .. string.format("%012x", number) .. "\r\n\r\n" .. BODY
end

local phase, stamp, count, number, ready

function init(args)
  phase, stamp, count, number, ready = args[1], args[2], tonumber(args[3]), 0, {}
  for i = 1, count do
    ready[i] = phase == "unkeyed" and HEAD .. "\r\n" .. BODY or keyed(stamp, i - 1)
  end
end

function request()
  number = number + 1
  if phase == "first" then
    return keyed(stamp, number)
  end
  return ready[number % count + 1]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    "found requests=%d us=%d p50=%d p99=%d refused=%d broken=%d\n",
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
