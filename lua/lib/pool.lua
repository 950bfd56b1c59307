-- include: keys clock
-- The pool's counters, read once a script and written once if they changed. Numbers are handed to Redis
-- as numbers, which keeps all 17 digits; Lua's own tostring would keep 14.
local pool = {changed = {}}
do
  local names = {
    'stock', 'queued', 'seq', 'ready', 'upper', 'lower', 'total_capacity', 'flow_capacity', 'lease_ms',
    'grant_lease_ms', 'silence_ms', 'fallbacks', 'log_max', 'window_ms', 'ema_alpha', 'dispatches',
    'ended', 'log_seq', 'born', 'queued:0', 'queued:1', 'queued:2',
  }
  local values = redis.call('HMGET', key.pool, unpack(names))
  for i, name in ipairs(names) do pool[name] = tonumber(values[i] or 0) end
  -- born is set by publish together with bounds and capacities: without it nothing may be admitted.
  pool.known = pool.born > 0
end
function pool.set(name, value)
  pool[name] = value
  pool.changed[name] = true
end
function pool.add(name, amount) pool.set(name, pool[name] + amount) end
function pool.save()
  local write = {}
  for name in pairs(pool.changed) do
    write[#write + 1] = name
    write[#write + 1] = pool[name]
  end
  if #write > 0 then redis.call('HSET', key.pool, unpack(write)) end
end
-- A number no earlier arrival has had, which is also the arrival time in µs: it orders a flow.
function pool.arrival(age_ms)
  if age_ms > 0 then return now_us - age_ms * 1000 end
  pool.set('seq', math.max(pool.seq + 1, now_us))
  return pool.seq
end
