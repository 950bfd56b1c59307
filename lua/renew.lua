-- include: dispatch
-- Renew the leases of requests seen alive. One whose record is lost (FLUSHALL, or a lease that ran out
-- while nobody could report) is taken back into the stock from the ticket it carries.
--
-- Guarantees: what reports itself is never reaped; the served endpoint is the one that is counted.
--
-- KEYS[1] epp:{POOL}:pool
-- ARGV[1] the calling replica; then for each request: id, attempt ('' when an access log reports it),
--   served endpoint ('' unknown), ticket ('' none): flow, band, weight, cost, workload, criticality,
--   model, endpoint, joined by tabs
-- Returns {born, news, attempts, served, reply...}:
--   'renewed' | 'restored' | 'waiting' (queued: not yet in flight) | 'unknown'
local ITEM = 4
local TICKET = '^' .. string.rep('([^\t]*)\t', 7) .. '([^\t]*)$'
news.caller = ARGV[1]

local function restore(id, attempt, served, ticket)
  local flow, band, weight, cost, workload, criticality, model, endpoint = string.match(ticket, TICKET)
  if not (pool.known and flow and tonumber(band) and tonumber(weight) and tonumber(cost)
      and tonumber(criticality)) then
    return 'unknown'
  end
  local r = {
    id = id, owner = news.caller, attempt = attempt, flow = flow, band = tonumber(band),
    weight = tonumber(weight), cost = tonumber(cost), workload = workload,
    criticality = tonumber(criticality), model = model, arrived = now_us, deadline_ms = 0,
    endpoints = served ~= '' and served or endpoint, granted_us = now_us, state = 'placed',
  }
  pool.add('stock', r.cost)
  endpoints.reserve(r.endpoints)
  workloads.restored(workload)
  redis.call('ZADD', key.inflight, now_ms + pool.lease_ms, id)
  record.write(r)
  log('restored', r)
  return 'restored'
end

local replies = {}
for at = 2, #ARGV, ITEM do
  local id, attempt, served, ticket = unpack(ARGV, at, at + ITEM - 1)
  local r = record.read(id)
  local reply
  if not r then
    reply = restore(id, attempt, served, ticket)
  elseif r.state == 'queued' or r.state == 'held' then
    reply = 'waiting'
  else
    reply = 'renewed'
    redis.call('ZADD', key.inflight, 'XX', 'GT', now_ms + pool.lease_ms, id)
    if r.state == 'placed' and served ~= '' and served ~= endpoints.first(r.endpoints) then
      endpoints.release(endpoints.first(r.endpoints))
      endpoints.reserve(served)
      r.endpoints = served
      record.write(r)
    end
  end
  replies[#replies + 1] = reply
end
local born, mine, attempts, served = conclude()
return {born, mine, attempts, served, unpack(replies)}
