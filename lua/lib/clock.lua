-- The only clock: Redis's own. Replica clocks are never compared.
local now_us, now_ms
local function read_clock()
  local time = redis.call('TIME')
  now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
  now_ms = math.floor(now_us / 1000)
end
