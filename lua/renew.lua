-- include: dispatch tombstones
-- Renew the leases of requests seen alive. One whose record is lost (FLUSHALL, or a lease that ran out
-- while nobody could report) is taken back into the stock from the ticket it carries.
--
-- Guarantees: what reports itself is never reaped; the served endpoint is the one that is counted; what has ended is
-- not restored while its tombstone lasts (bury), but for a later request of the same id that the caller let go; a
-- ticket takes back no more than an admission gives, and only at an endpoint that the pool knows (G1). A ticket that an
-- access log brings, which anybody who has seen it can, restores nothing whose end has been counted: only what the
-- pool may lack (pool.lacks), what was given up unheard, and for a lease what was let go without the shared state.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, attempt ('' when an access log reports it),
--   served endpoint ('' unknown), ticket ('' none): flow, band, weight, cost, workload, criticality,
--   model, endpoint, limit, and alone=MS if it was let go without the shared state, when by the pool's clock, joined by
--   tabs, what follows is the replicas' own; how long ago it was last seen alive, ms
-- Returns {born, news, attempts, served, reply...}:
--   'renewed' | 'restored' | 'waiting' (queued: not yet in flight) | 'unknown' (and not restored)
local RENEW_ITEM = 5
local FIELD = '([^\t]*)\t'
local TICKET -- made at the first call: a library being loaded has no `string`

local MOST = 1e12 -- sums of so much stay exact
local HIGHEST_LIMIT = 65535

-- What an access log tells may be anything: a ticket that is damaged restores nothing.
local function figure(text, most)
  local number = tonumber(text)
  return number and number >= 0 and number <= most and number or nil
end

local function is_address(text) return string.find(text, '^[^,%c]+$') end

-- Whether the pool may have no record of a request that runs.
local function may_lack(id, alone)
  local alone_ms = tonumber(string.match(alone, '^alone=(%d+)$'))
  return pool.lacks() or tombstones.gave_up(id)
    or (alone_ms and now_ms - alone_ms < settings.lease_ms + LONGER_MS)
end

local function restore(id, attempt, served, ticket, ago_ms)
  if string.find(ticket, '%z') then return 'unknown' end -- it would end a packed string early
  TICKET = TICKET or '^' .. string.rep(FIELD, 8) .. '([^\t]*)\t?([^\t]*)'
  local flow, band, weight, cost, workload_id, criticality, model, endpoint, limit, alone =
    string.match(ticket, TICKET)
  if not (pool.known and flow and (attempt ~= '' or may_lack(id, alone))) then return 'unknown' end
  band, weight, cost = figure(band, 2), figure(weight, MOST), figure(cost, MOST)
  cost = cost and queue.cost(cost)
  criticality, limit = figure(criticality, 5), figure(limit, HIGHEST_LIMIT)
  if is_address(served) and endpoints.is_known(served) then endpoint = served end
  if not (band and band % 1 == 0 and weight and cost and criticality and limit and limit % 1 == 0
    and is_address(endpoint) and endpoints.is_known(endpoint)) then
    return 'unknown'
  end
  if tombstones.covers(id, attempt ~= '' and now_ms - tonumber(ago_ms)) then return 'unknown' end
  local r = record.new(id)
  r.state, r.owner, r.attempt, r.flow, r.band, r.weight, r.cost, r.workload, r.criticality, r.model, r.arrived,
    r.deadline_ms, r.endpoints, r.limit, r.taken, r.tag = 'placed', news.caller, attempt, flow, band, weight, cost,
    workload_id, criticality, model, now_us, record.NO_DEADLINE, endpoint, limit,
    pool.share(cost, pool.most()), -1
  pool.stock = pool.stock + r.taken
  endpoints.reserve(r.endpoints)
  if r.limit > 0 then
    endpoints.count_flow(r, nil, 1)
    endpoints.count_flow(r, r.endpoints, 1)
  end
  workloads.restored(workload_id)
  tombstones.has_come_back(id)
  later('ZADD', key.inflight, now_ms + settings.lease_ms, id)
  record.write(r)
  log('restored', r)
  return 'restored'
end

-- Envoy went on to a fallback: the count follows.
local function move(r, served)
  local old = endpoints.first(r.endpoints)
  if not is_address(served) or served == old then return end
  endpoints.release(old)
  endpoints.reserve(served)
  endpoints.count_flow(r, old, -1)
  endpoints.count_flow(r, served, 1)
  if settings.caps and endpoints.has_place(old) then queue.unblock(old) end
  r.endpoints = served
  record.write(r)
  log('moved', r)
end

local function renew(args)
  record.prefetch(column(args, RENEW_ITEM, 1))
  return batch(args, RENEW_ITEM, function(_, id, attempt, served, ticket, ago_ms)
    local r = record.read(id)
    if not r then return restore(id, attempt, served, ticket, ago_ms) end
    if r.state == 'queued' or r.state == 'held' then return 'waiting' end
    later('ZADD', key.inflight, now_ms + settings.lease_ms, id)
    if r.state == 'placed' then move(r, served) end
    return 'renewed'
  end)
end
