-- include: ending news
-- Serve the queue while there is room: stock below the lower bound, and never past the upper (G1).
-- A request past its TTL is not served (G5); one whose replica is silent is held for adoption (G7).
local DISPATCH_LIMIT = 128 -- the next script goes on; every one that frees room ends with a dispatch
local function dispatch()
  local live, served, attempts = {}, 0, 0
  while pool.queued > 0 and pool.stock < pool.lower and attempts < DISPATCH_LIMIT do
    local id, tag = queue.head()
    local r = id and record.read(id)
    if not r or pool.stock + r.cost > pool.upper then break end
    attempts = attempts + 1
    if live[r.owner] == nil then
      local beat = tonumber(redis.call('ZSCORE', key.replicas, r.owner) or 0)
      live[r.owner] = beat > now_ms - pool.silence_ms
    end
    if r.deadline_ms <= now_ms then
      finish_request(r, 'expired')
      news.tell(r.owner, id, 'expired')
    elseif not live[r.owner] then
      queue.hold(r, now_ms + pool.grant_lease_ms)
    else
      queue.serve(r, tag)
      r.state, r.granted_us = 'granted', now_us
      record.write(r)
      redis.call('ZADD', key.inflight, now_ms + pool.grant_lease_ms, id)
      pool.add('stock', r.cost)
      pool.add('dispatches', 1)
      workloads.dispatched(r.workload, (now_us - r.arrived) / 1000)
      news.tell(r.owner, id, 'granted')
      log('granted', r, tag)
      served = served + 1
    end
  end
  return served, attempts
end
-- Every script that may change the queue ends here. Returns what each reply begins with:
-- the pool's birth, the caller's news, dispatch attempts and successes.
local function conclude()
  local served, attempts = dispatch()
  pool.save()
  workloads.save()
  news.send()
  return string.format('%.0f', pool.born), news.mine, attempts, served
end
