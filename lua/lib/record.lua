-- include: keys
-- One request as a string: its fields, each closed by \31, which no field may hold (replicas refuse
-- control characters). state: queued, held (its replica is silent), granted, placed. Written out field by
-- field: a loop over names costs twice the time.
local record = {}
function record.read(id)
  local text = redis.call('HGET', key.requests, id)
  if not text then return nil end
  local state, owner, attempt, flow, band, weight, cost, workload, criticality, model, arrived, deadline_ms,
    endpoints_, granted_us = string.match(text, '^(.-)\31(.-)\31(.-)\31(.-)\31(.-)\31(.-)\31(.-)\31(.-)\31'
      .. '(.-)\31(.-)\31(.-)\31(.-)\31(.-)\31(.-)\31$')
  return {
    id = id, state = state, owner = owner, attempt = attempt, flow = flow, band = tonumber(band),
    weight = tonumber(weight), cost = tonumber(cost), workload = workload,
    criticality = tonumber(criticality), model = model, arrived = tonumber(arrived),
    deadline_ms = tonumber(deadline_ms), endpoints = endpoints_, granted_us = tonumber(granted_us),
  }
end
function record.write(r)
  redis.call('HSET', key.requests, r.id, string.format(
    '%s\31%s\31%s\31%s\31%d\31%.17g\31%.17g\31%s\31%d\31%s\31%.0f\31%.0f\31%s\31%.0f\31',
    r.state, r.owner, r.attempt, r.flow, r.band, r.weight, r.cost, r.workload, r.criticality, r.model,
    r.arrived, r.deadline_ms, r.endpoints, r.granted_us))
end
