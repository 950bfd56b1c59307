-- include: dispatch
-- Admit a batch of arrivals: place at once (bypass), queue, or refuse; adopt what is already known.
--
-- Guarantees: stock never passes the upper bound (G1); an id that is known keeps its place, its grant or
-- its endpoint and changes its owner, so that repeating a call changes nothing (G6, G7).
--
-- KEYS[1] epp:{POOL}:pool
-- ARGV[1] the calling replica; then for each request ITEM arguments:
--   id, attempt, flow, band, weight, cost, ttl_ms, age_ms, workload ('' anonymous), criticality, model,
--   candidates ('*' or 'a,b,c')
-- Returns {born, news, attempts, served, reply...}, one reply a request:
--   'placed a,b,c' | 'queued TTL_LEFT_MS' | 'refused too-many-flows' | 'refused insufficient-flow-capacity'
--   | 'refused no-endpoints' | 'expired' | 'unknown-pool' (publish first); of a known id the first two end
--   in ' adopted'
local ITEM = 12
news.caller = ARGV[1]

local function place(r, candidates, turn)
  local picked = endpoints.pick(candidates, turn)
  if not picked then return nil end
  r.endpoints, r.state = picked, 'placed'
  endpoints.reserve(endpoints.first(picked))
  redis.call('ZADD', key.inflight, now_ms + pool.lease_ms, r.id)
  record.write(r)
  return 'placed ' .. picked
end

local function adopt(r, attempt, candidates, turn)
  local old_owner = r.owner
  r.owner, r.attempt = news.caller, attempt
  if r.state == 'queued' or r.state == 'held' then
    if r.deadline_ms <= now_ms then
      finish_request(r, 'expired')
      return 'expired'
    end
    if r.state == 'held' then
      redis.call('ZREM', key.deadlines, r.id)
      r.state = 'queued'
      queue.insert(r)
    end
    record.write(r)
    log('adopted', r)
    return 'queued ' .. (r.deadline_ms - now_ms) .. ' adopted'
  end
  log('adopted', r)
  if r.state == 'placed' then
    redis.call('ZADD', key.inflight, now_ms + pool.lease_ms, r.id)
    record.write(r)
    return 'placed ' .. r.endpoints .. ' adopted'
  end
  redis.call('HDEL', key.inbox(old_owner), r.id)
  local reply = place(r, candidates, turn)
  if not reply then
    finish_request(r, 'refused')
    return 'refused no-endpoints'
  end
  log('placed', r)
  return reply .. ' adopted'
end

local function refuse(r, reason)
  log('refused', r, reason)
  return 'refused ' .. reason
end

local function arrive(r, ttl_ms, age_ms, candidates, turn)
  if ttl_ms <= age_ms then return 'expired' end
  if pool.ready == 0 then return refuse(r, 'no-endpoints') end
  if pool.queued == 0 and pool.stock + r.cost <= pool.upper then
    pool.add('stock', r.cost)
    r.granted_us = now_us
    local reply = place(r, candidates, turn)
    if not reply then
      pool.add('stock', -r.cost)
      return refuse(r, 'no-endpoints')
    end
    workloads.arrived(r.workload)
    workloads.dispatched(r.workload, age_ms)
    log('bypassed', r)
    return reply
  end
  if redis.call('ZCARD', key.queue(r.band, r.flow)) >= pool.flow_capacity then
    return refuse(r, 'insufficient-flow-capacity')
  end
  if pool.queued >= pool.total_capacity then return refuse(r, 'too-many-flows') end
  r.state, r.deadline_ms = 'queued', now_ms + ttl_ms - age_ms
  queue.insert(r)
  record.write(r)
  workloads.arrived(r.workload)
  log('queued', r)
  return 'queued ' .. (ttl_ms - age_ms)
end

local replies = {}
for at = 2, #ARGV, ITEM do
  local id, attempt, flow, band, weight, cost, ttl_ms, age_ms, workload, criticality, model, candidates =
    unpack(ARGV, at, at + ITEM - 1)
  local turn = now_us + at
  local reply
  if not pool.known then
    reply = 'unknown-pool'
  else
    local r = record.read(id)
    if r then
      reply = adopt(r, attempt, candidates, turn)
    else
      r = {
        id = id, owner = news.caller, attempt = attempt, flow = flow, band = tonumber(band),
        weight = tonumber(weight), cost = tonumber(cost), workload = workload,
        criticality = tonumber(criticality), model = model, arrived = pool.arrival(tonumber(age_ms)),
        deadline_ms = 0, endpoints = '', granted_us = 0, state = 'new',
      }
      reply = arrive(r, tonumber(ttl_ms), tonumber(age_ms), candidates, turn)
    end
  end
  replies[#replies + 1] = reply
end
if not pool.known then return {'0', {}, 0, 0, unpack(replies)} end
local born, mine, attempts, served = conclude()
return {born, mine, attempts, served, unpack(replies)}
