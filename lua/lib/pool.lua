-- include: keys clock
-- The pool's counters, read once a script and written once if they changed. Numbers are handed to Redis
-- as numbers, which keeps all 17 digits; Lua's own tostring would keep 14.
local pool
do
  local v = redis.call('HMGET', key.pool, 'born', 'stock', 'queued', 'seq', 'dispatches', 'ended', 'log_seq',
    'queued:0', 'queued:1', 'queued:2', 'ready', 'upper', 'lower', 'settings')
  local n = tonumber
  pool = {
    changed = {}, born = n(v[1] or 0), stock = n(v[2] or 0), queued = n(v[3] or 0), seq = n(v[4] or 0),
    dispatches = n(v[5] or 0), ended = n(v[6] or 0), log_seq = n(v[7] or 0), ['queued:0'] = n(v[8] or 0),
    ['queued:1'] = n(v[9] or 0), ['queued:2'] = n(v[10] or 0), ready = n(v[11] or 0), upper = n(v[12] or 0),
    lower = n(v[13] or 0),
    -- born is set by publish together with bounds and capacities: without it nothing may be admitted.
    known = v[1] and true or false,
    -- Decided, not counted: publish shares them as one JSON field, which is one to read instead of many.
    total_capacity = 0, flow_capacity = 0, lease_ms = 0, grant_lease_ms = 0, silence_ms = 0, fallbacks = 0,
    log_max = 0, window_ms = 0, ema_alpha = 0,
  }
  function pool.share(settings)
    for name, number in pairs(cjson.decode(settings)) do pool[name] = number end
  end
  if v[14] then pool.share(v[14]) end
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
