-- include: queue endpoints workloads
-- The end of a request, whatever state it is in: everything it holds is given back, exactly once.
local function finish_request(r, event)
  if r.state == 'queued' then
    queue.remove(r)
  elseif r.state == 'held' then
    redis.call('ZREM', key.deadlines, r.id)
  else
    redis.call('ZREM', key.inflight, r.id)
    pool.add('stock', -r.cost)
    if r.state == 'placed' then endpoints.release(endpoints.first(r.endpoints)) end
    if r.state == 'granted' then redis.call('HDEL', key.inbox(r.owner), r.id) end
  end
  redis.call('HDEL', key.requests, r.id)
  workloads.ended(r.workload)
  pool.add('ended', 1)
  log(event, r)
end
