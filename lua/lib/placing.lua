-- include: ending
-- Give r an endpoint: chosen and reserved in one step, so that two replicas never both take one for idle (G1).
-- Returns 'placed a,b,c LOADS', or nil, whether only a limit stands in the way, and the endpoints of which it is
-- their own. The stock and the flow's total are the caller's.
local function place_request(r, candidates, turn, picks)
  local picked, seen, endpoint = endpoints.pick(r, candidates, turn, picks)
  if not picked then return nil, seen, endpoint end
  r.endpoints, r.state = picked, 'placed'
  endpoints.reserve(endpoint)
  if r.limit > 0 then endpoints.count_flow(r, endpoint, 1) end
  record.write(r)
  return 'placed ' .. picked .. ' ' .. seen
end
-- A granted request's place. Where every endpoint it may have is at its limit, or its flow is there, it goes back
-- to its place in the queue, uncharged, and its lane waits until one of the flow's requests ends, or one of those
-- endpoints has a place. Where none has one, dispatch waits, and the lane may stay in the order.
local function place_granted(r, candidates, turn, picks)
  news.forget(r.owner, r.id)
  local reply, limited, closed = place_request(r, candidates, turn, picks)
  if reply then
    if settings.log_max > 0 then log('placed', r) end
    return reply
  end
  if not limited or r.deadline_ms <= now_ms then
    finish_request(r, limited and 'expired' or 'refused', limited and '' or 'no-endpoints')
    return limited and 'expired' or 'refused no-endpoints 1'
  end
  later('ZREM', key.inflight, r.id)
  pool.release(r.taken)
  endpoints.count_flow(r, nil, -1)
  workloads.sent_back(r.workload)
  r.state, r.taken = 'queued', 0
  queue.insert(r)
  local lane = queue.lane(r)
  local tag = queue.correct(r, lane, -queue.share(r), r.tag)
  queue.charge_band(r, -r.cost)
  record.write(r)
  log('requeued', r, tag)
  closed = closed or {}
  if #closed == 0 or endpoints.places() > 0 then
    if redis.call('ZSCORE', ahead.anew(key.flows[r.band]), lane) then queue.park(r.band, lane, tag) end
    queue.block(r.band, lane, tag, closed)
  end
  return 'queued ' .. (r.deadline_ms - now_ms)
end
