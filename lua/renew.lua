-- include: dispatch
-- Renew the leases of requests seen alive. One whose record is lost (FLUSHALL, or a lease that ran out
-- while nobody could report) is taken back into the stock from the ticket it carries.
--
-- Guarantees: what reports itself is never reaped; the served endpoint is the one that is counted.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, attempt ('' when an access log reports it),
--   served endpoint ('' unknown), ticket ('' none): flow, band, weight, cost, workload, criticality,
--   model, endpoint, limit, joined by tabs; what follows is the replicas' own
-- Returns {born, news, attempts, served, reply...}:
--   'renewed' | 'restored' | 'waiting' (queued: not yet in flight) | 'unknown'
local RENEW_ITEM = 4
local TICKET = '^([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)'

local function restore(id, attempt, served, ticket)
  local flow, band, weight, cost, workload_id, criticality, model, endpoint, limit = string.match(ticket, TICKET)
  if not (pool.known and flow and tonumber(band) and tonumber(weight) and tonumber(cost)
      and tonumber(criticality) and tonumber(limit)) then
    return 'unknown'
  end
  local r = {
    id = id, owner = news.caller, attempt = attempt, flow = flow, band = tonumber(band),
    weight = tonumber(weight), cost = tonumber(cost), workload = workload_id,
    criticality = tonumber(criticality), model = model, arrived = now_us, deadline_ms = 0,
    endpoints = served ~= '' and served or endpoint, state = 'placed',
    limit = tonumber(limit), taken = tonumber(cost), tag = -1,
  }
  pool.stock = pool.stock + r.taken
  endpoints.reserve(r.endpoints)
  if r.limit > 0 then
    endpoints.count_flow(r, nil, 1)
    endpoints.count_flow(r, r.endpoints, 1)
  end
  workloads.restored(workload_id)
  later('ZADD', key.inflight, now_ms + settings.lease_ms, id)
  record.write(r)
  log('restored', r)
  return 'restored'
end

-- Envoy went on to a fallback: the count follows.
local function move(r, served)
  local old = endpoints.first(r.endpoints)
  if served == '' or served == old then return end
  endpoints.release(old)
  endpoints.reserve(served)
  endpoints.count_flow(r, old, -1)
  endpoints.count_flow(r, served, 1)
  r.endpoints = served
  record.write(r)
  log('moved', r)
end

local function renew(args)
  record.prefetch(column(args, RENEW_ITEM, 1))
  return batch(args, RENEW_ITEM, function(_, id, attempt, served, ticket)
    local r = record.read(id)
    if not r then return restore(id, attempt, served, ticket) end
    if r.state == 'queued' or r.state == 'held' then return 'waiting' end
    later('ZADD', key.inflight, now_ms + settings.lease_ms, id)
    if r.state == 'placed' then move(r, served) end
    return 'renewed'
  end)
end
