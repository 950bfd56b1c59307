-- include: pool
-- The workload registry (specs/001): total, active, dispatched, ema_ms (average wait), last_ms, slot,
-- and seven counts of arrivals, newest first, each over a sixth of the rate window. The rate slides: it
-- is the newest count, the five before, and the part of the seventh that the window still covers.
-- An anonymous request has workload '' and leaves nothing here.
local workloads = {touched = {}}
function workloads.parse(text)
  local a, b, c, d, e, f, g, h, i, j, k, l, m = string.match(text,
    '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
  local n = tonumber
  return {n(a), n(b), n(c), n(d), n(e), n(f), n(g), n(h), n(i), n(j), n(k), n(l), n(m)}
end
function workloads.get(id)
  local w = workloads.touched[id]
  if not w then
    w = workloads.parse(redis.call('HGET', key.workloads, id) or '0 0 0 0 0 0 0 0 0 0 0 0 0')
    workloads.touched[id] = w
  end
  return w
end
function workloads.arrived(id)
  if id == '' then return end
  local w = workloads.get(id)
  local slot = math.floor(now_ms / (pool.window_ms / 6))
  local passed = math.min(slot - w[6], 7)
  for i = 13, 7, -1 do w[i] = i - passed >= 7 and w[i - passed] or 0 end
  w[1], w[2], w[5], w[6], w[7] = w[1] + 1, w[2] + 1, now_ms, slot, w[7] + 1
end
function workloads.dispatched(id, wait_ms)
  if id == '' then return end
  local w = workloads.get(id)
  w[4] = w[3] == 0 and wait_ms or pool.ema_alpha * wait_ms + (1 - pool.ema_alpha) * w[4]
  w[3] = w[3] + 1
end
function workloads.ended(id)
  if id == '' then return end
  local w = workloads.get(id)
  w[2], w[5] = math.max(w[2] - 1, 0), now_ms
end
-- A request known to be running, of which the registry has lost sight.
function workloads.restored(id)
  if id == '' then return end
  local w = workloads.get(id)
  w[2], w[5] = w[2] + 1, now_ms
end
function workloads.save()
  local write = {}
  for id, w in pairs(workloads.touched) do
    write[#write + 1] = id
    write[#write + 1] = string.format('%d %d %d %.3f %.0f %.0f %d %d %d %d %d %d %d', unpack(w))
  end
  if #write > 0 then redis.call('HSET', key.workloads, unpack(write)) end
end
