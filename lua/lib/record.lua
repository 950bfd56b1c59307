-- include: keys
-- One request as a string: its fields, each closed by \31, which no field may hold (replicas refuse
-- control characters). state: queued, held (its replica is silent), granted, placed.
local record = {}
do
  local fields = {
    'state', 'owner', 'attempt', 'flow', 'band', 'weight', 'cost', 'workload', 'criticality', 'model',
    'arrived', 'deadline_ms', 'endpoints', 'granted_us',
  }
  local numeric = {
    band = '%d', weight = '%.17g', cost = '%.17g', criticality = '%d', arrived = '%.0f',
    deadline_ms = '%.0f', granted_us = '%.0f',
  }
  local pattern = '^' .. string.rep('([^\31]*)\31', #fields) .. '$'
  function record.read(id)
    local text = redis.call('HGET', key.requests, id)
    if not text then return nil end
    local values = {string.match(text, pattern)}
    local r = {id = id}
    for i, name in ipairs(fields) do
      r[name] = numeric[name] and tonumber(values[i]) or values[i]
    end
    return r
  end
  function record.write(r)
    local values = {}
    for i, name in ipairs(fields) do
      local form = numeric[name]
      values[i] = form and string.format(form, r[name]) or r[name]
    end
    redis.call('HSET', key.requests, r.id, table.concat(values, '\31') .. '\31')
  end
end
