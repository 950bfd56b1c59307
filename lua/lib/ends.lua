-- include: flows marks tombstones
-- End requests: release the stock, endpoint and lease of each request exactly once. Restore requests: acquire stock,
-- endpoint and lease again. This file uses the queue from lib/flows.lua, loads from lib/endpoints.lua, records from
-- lib/registry.lua, `tombstones`. This file defines `stages` and the functions below.

-- Prefills of split requests. While a placed request's prefill runs, `r.prefillers` has its prefill endpoint and
-- fallbacks; else ''. The key `prefills` has the reservations (endpoint and request id), scored by the ends of their
-- leases.
local stages = {SPLIT = '>'} -- between endpoints and prefill endpoints in replies
do
  local NO_FLOW_LIMIT = {limit = 0}

  -- Return the part of `candidates` for `endpoint`: 'd,e>x=1,y=2;f>y=1' has a part for d and e, and one for f.
  local function part_for(endpoint, candidates)
    if not string.find(candidates, '>', 1, true) then return candidates end
    for decoders, part in string.gmatch(candidates, '([^>;]*)>([^>;]*)') do
      if string.find(',' .. decoders .. ',', ',' .. endpoint .. ',', 1, true) then return part end
    end
    return string.match(candidates, '[^>]*$')
  end

  -- Choose prefill endpoints for a request on `endpoint`. Return 'x,y', '' if the request is not to be split; or nil,
  -- and the names of the endpoints at their limit. If the queue is off, no request waits for a prefill endpoint.
  function stages.choose_prefill(candidates, endpoint, turn, picks)
    local picked, limited, first = prefill.choose(NO_FLOW_LIMIT, part_for(endpoint, candidates), turn, picks)
    if not picked then
      if not limited or settings.queue_enabled == 0 then return '' end
      for i, address in ipairs(first) do first[i] = throttle.prefill_of(address) end
      return nil, first
    end
    if first == endpoint then return '' end -- the endpoint computes the prompt itself
    local others = {}
    for address in string.gmatch(picked, '[^,]+') do
      if address ~= endpoint then others[#others + 1] = address end
    end
    return table.concat(others, ',')
  end

  -- Reserve a slot on the first endpoint of r.prefillers for a full lease.
  function stages.reserve_prefill(r)
    local endpoint = prefill.first(r.prefillers)
    prefill.reserve(endpoint)
    defer_write('ZADD', key.prefills, now_ms + settings.lease_ms, joined(endpoint, r.id))
  end

  function stages.release_prefill(endpoint, id)
    prefill.release(endpoint)
    defer_write('ZREM', key.prefills, joined(endpoint, id))
  end

  -- End the prefill of a placed request, which stays in flight. `note`: why the prefill ends; '': the first token of
  -- the answer has come.
  function stages.end_prefill(r, note)
    local endpoint = prefill.first(r.prefillers)
    stages.release_prefill(endpoint, r.id)
    log_event('prefilled', r, nil, nil, note)
    r.prefillers = ''
    record.put(r)
    queue.use_room(throttle.prefill_of(endpoint))
  end

  -- Return the reply that names the endpoints of a request that is already placed.
  function stages.placed(r)
    return 'placed ' .. r.endpoints .. (r.prefillers ~= '' and stages.SPLIT .. r.prefillers or '')
  end
end

local function leave_endpoint(r, listed)
  local endpoint = endpoints.first(listed)
  endpoints.release(endpoint, r.taken)
  endpoints.count_flow(r, endpoint, -1)
end

-- Release the stock, the endpoint and the lease of a granted or placed request.
local function release(r)
  defer_write('ZREM', key.inflight, r.id)
  pool.release(r.taken)
  if r.state == STATE_PLACED then
    leave_endpoint(r, r.endpoints)
    if r.prefillers ~= '' then stages.release_prefill(prefill.first(r.prefillers), r.id) end
  else
    notifications.withdraw(r.owner, r.id)
  end
  endpoints.count_flow(r, nil, -1)
end

-- Acquire stock, endpoint and lease for a granted or placed request whose record is kept or restored. Without
-- `lease_end_ms` the lease has its full length.
local function restore_running(r, lease_end_ms)
  if r.band > LAST_NAMED then bands.count_request(r.band, 1) end
  pool.stock = pool.stock + r.taken
  endpoints.count_flow(r, nil, 1)
  defer_write('ZADD', key.inflight, lease_end_ms or now_ms + settings.lease_ms, r.id)
  if r.state == STATE_PLACED then
    local endpoint = endpoints.first(r.endpoints)
    endpoints.reserve(endpoint, r.taken)
    endpoints.count_flow(r, endpoint, 1)
    if r.prefillers ~= '' then stages.reserve_prefill(r) end
  end
end

-- Restore a placed request whose record was missing, without its prefill reservation and its tenants' charges.
local function restore_placed(r, lease_end_ms)
  r.prefillers, r.tenancy = '', 0
  restore_running(r, lease_end_ms)
  workloads.restored(r.workload)
  tombstones.has_come_back(r.id)
  record.put(r)
  log_event('restored', r, nil, nil, marks.largest_bound())
end

-- The events that end a request unserved, so that its charge to tenants' limits is refunded.
local REFUNDED = {refused = true, cancelled = true, expired = true, preempted = true, evicted = true, abandoned = true,
  withdrawn = true, upstream_failed = true}
-- End a request in any state: remove its record, and remove it from the queue or release its stock, endpoint and lease.
local function finish_request(r, event, note)
  local state, blocker = r.state, throttle.decide(r)
  if state == STATE_QUEUED then
    queue.remove(r)
  elseif state == STATE_ORPHANED then
    timers.stop(r.id)
  else
    release(r)
  end
  record.remove(r)
  if r.band > LAST_NAMED then bands.count_request(r.band, -1) end
  workloads.ended(r.workload)
  pool.ended = pool.ended + 1
  if settings.log_max > 0 then log_event(event, r, nil, nil, note) end
  if settings.tenants then quotas.ended(r, REFUNDED[event]) end
  if state == STATE_PLACED then
    queue.use_room(endpoints.first(r.endpoints))
    if r.prefillers ~= '' then queue.use_room(throttle.prefill_of(prefill.first(r.prefillers))) end
  elseif blocker then
    queue.decided(r, blocker)
  end
  if r.limit > 0 and not record.is_waiting(r) then
    for _, band in ipairs(BANDS) do queue.unthrottle(band, queue.flow_queue(r)) end
  end
end

-- Count a placed request on `endpoint`, to which Envoy has sent it. `listed` has the request's new endpoints.
local function move_placed(r, endpoint, listed)
  local old = endpoints.first(r.endpoints)
  endpoints.release(old, r.taken)
  endpoints.reserve(endpoint, r.taken)
  endpoints.count_flow(r, old, -1)
  endpoints.count_flow(r, endpoint, 1)
  queue.use_room(old)
  r.endpoints = listed
  record.put(r)
  log_event('moved', r)
end

-- End a waiting request past its TTL. Return a refusal if the request waited for a tenant's limit, else 'expired'.
local function expire(r)
  local refusal = settings.tenants and quotas.expiry(r)
  finish_request(r, NOTIFY_EXPIRED)
  return refusal or NOTIFY_EXPIRED
end

-- End a queued request and notify its owner: 'expired', 'preempted', 'evicted', or a refusal and byte 31 if a request
-- that waited for a tenant's limit expired, or may wait no longer (`for_limit`).
local function end_and_notify(r, event, for_limit)
  local refusal = (for_limit or event == NOTIFY_EXPIRED) and settings.tenants and quotas.expiry(r)
  finish_request(r, event)
  notifications.add(r.owner, r.id, refusal and refusal .. '\31' or event)
end
