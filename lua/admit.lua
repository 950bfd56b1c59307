-- include: dispatch
-- Admit a batch of arriving requests: place each request at once (bypass), queue it or refuse it. If the pool knows a
-- request's id already, the calling replica adopts the request.
--
-- Guarantees: the stock never exceeds the upper bound (G1). A request with a known id keeps its position, grant or
-- endpoint, and the calling replica becomes its owner, so repeating a call changes nothing (G6, G7). An arrival takes
-- over a known request only if flow, model and body are equal too: clients choose ids, so an id alone proves nothing. A
-- refused or expired request leaves no record; if its call is repeated, its workload counts two arrivals.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then each request, packed (picker_fleet/state/schema.py): texts, each ended by byte 0:
--   id, attempt (NUMBER.DIGEST of its body), flow, workload ('' anonymous), model, candidates, prefill (both as in
--   place.lua); then doubles: priority, weight, cost, ttl_ms, age_ms, criticality, limit (of the flow on each endpoint;
--   0 none), learn (1: cost lacks the answer's part, which is estimated by the flow's mean), bytes (of its body; 0
--   unknown), prompt_tokens, answer_tokens (estimates for the limits of tenants; with `learn`, the answer's part is
--   added). A request that is queued with candidates '*' and prefill '' is placed by the call that grants it.
--
-- Returns {epoch, notifications, attempts, served, reply...}, one reply per request:
--   'placed a,b,c LOADS' (as in place.lua), and with tenants byte 31 and the balances (quotas.shown)
--   | 'queued TTL_LEFT_MS'; either is followed by ' adopted' for a known id
--   | 'refused REASON RETRY_AFTER_S', REASON one of no-endpoints, saturated, insufficient-flow-capacity,
--     too-many-flows, band-capacity, band-bytes, total-capacity, over-limit, over-burst; after the last two follow byte
--     31 and 'UNIT PER_MS PATH' of the tenant's limit, then byte 31 and the balances (quotas.balances)
--   | 'expired' | 'unknown-pool' (publish first) | 'foreign' (another request has this id; nothing was done)

-- Return whether an arrival with the id of request r is r itself: flow, model and body digest are equal, whichever
-- stream brings the arrival. A record without an attempt was restored from an access log: Envoy already knows the
-- request's endpoint, and never sends the request again.
local function is_same(r, arrival)
  return r.flow == arrival.flow and r.model == arrival.model and r.attempt ~= ''
    and string.match(r.attempt, '%..*') == string.match(arrival.attempt, '%..*')
end

local function adopt(r, arrival, turn, picks)
  local old_owner, old_attempt, attempt = r.owner, r.attempt, arrival.attempt
  r.owner, r.attempt = notifications.caller, attempt
  if record.is_waiting(r) then
    if r.deadline_ms <= now_ms then
      return expire(r)
    end
    local tag
    if r.state == STATE_ORPHANED then
      r.state = STATE_QUEUED
      tag = queue.insert(r)
    end
    r.any_endpoint = arrival.candidates == endpoints.ANY and arrival.prefill == ''
    notifications.withdraw(r.owner, r.id) -- drop a notification about an earlier request with this id
    record.put(r)
    log_event('adopted', r, tag)
    return 'queued ' .. (r.deadline_ms - now_ms) .. ' adopted'
  end
  log_event('adopted', r)
  defer_write('ZADD', key.inflight, now_ms + settings.lease_ms, r.id)
  if r.state == STATE_PLACED then
    -- Two streams know the endpoint of request r, and the pool cannot tell which stream Envoy still uses: a suspended
    -- replica may resend a request that Envoy gave up long ago. So neither stream can cancel r: r stays until its end
    -- is reported or its lease ends.
    if old_owner ~= notifications.caller or old_attempt ~= attempt then
      r.attempt = string.match(attempt, '%..*') or ''
    end
    notifications.withdraw(old_owner, r.id) -- no longer needed: this reply names the endpoint
    record.put(r)
    return stages.placed(r) .. ' adopted'
  end
  notifications.withdraw(old_owner, r.id)
  local reply = place_granted(r, arrival.candidates, arrival.prefill, turn, picks)
  return string.find(reply, '^[pq]') and reply .. ' adopted' or reply
end

local function refuse(r, reason)
  local retry_after_s = reason == REFUSED.NO_ENDPOINTS and 1 or pool.retry_after_s()
  log_event('refused', r, nil, nil, reason)
  return 'refused ' .. reason .. ' ' .. retry_after_s
end

-- Make room for request r: preempt the newest request of the least recently preempted flow queue of the lowest
-- preemptible band below r's band (spec 003). Return whether a request was preempted.
local function preempt_for(r)
  for i = #BANDS, RANK[r.band] + 1, -1 do
    local band = BANDS[i]
    for _ = 1, PREEMPTIBLE[band] and pool[QUEUED[band]] > 0 and STRAYS or 0 do
      local flow_queue, newest = preemption.next_candidate(band)
      if not newest then break end
      local other = record.read(newest)
      if other and other.state == STATE_QUEUED then
        pool.pressed = 1
        defer_write('ZADD', key.candidates[band], pool.next_arrival_us(), flow_queue)
        end_and_notify(other, NOTIFY_PREEMPTED)
        return true
      end
      queue.drop_stray(newest, band, flow_queue)
    end
  end
  return false
end

-- Place request r at once. Return the reply, which may be a refusal; nil if r must queue.
local function bypass(r, turn, picks)
  if settings.paused == 1 then return nil end
  local take = pool.stock_for(r.cost, pool.upper)
  if (take > 0 and pool.stock + take > pool.upper) or endpoints.flow_at_limit(r) then return nil end
  if settings.tenants and quotas.lacking(r) then return nil end
  if endpoints.caps and not endpoints.stock_bounds_slots() and endpoints.free_slots() <= RESIDUE then return nil end
  r.taken = take
  if settings.tenants then quotas.start(r, 1) end
  local reply, limited = place_request(r, r.candidates, r.prefill, turn, picks)
  if not reply then
    r.taken = 0
    if settings.tenants then quotas.start(r, -1) end
    return not limited and refuse(r, REFUSED.NO_ENDPOINTS) or nil
  end
  pool.stock = pool.stock + take
  if r.limit > 0 then endpoints.count_flow(r, nil, 1) end
  defer_write('ZADD', key.inflight, now_ms + settings.lease_ms, r.id)
  workloads.dispatched(r, r.age_ms)
  log_event('bypassed', r)
  return reply
end

local last_left_ms, last_queued -- cached: most TTLs are equal, and formatting costs as much as a command
local function queued_for(left_ms)
  if left_ms ~= last_left_ms then last_left_ms, last_queued = left_ms, 'queued ' .. left_ms end
  return last_queued
end

-- Return the number of backlogged flow queues in all bands.
local function count_flow_queues()
  local count = 0
  for _, band in ipairs(BANDS) do count = count + queue.count_flow_queues(band) end
  return count
end

-- Decide about an arrival whose id is unknown. Return the reply.
local function arrive(r, turn, picks)
  local left_ms = r.ttl_ms - r.age_ms
  if left_ms <= 0 then return 'expired' end
  local band = bands.of(r.priority)
  r.band = band
  if settings.tenants then
    local refusal = quotas.arrive(r)
    if refusal then
      log_event('refused', r, nil, nil, quotas.reason(refusal))
      return refusal
    end
    band = r.band
  end
  if pool.ready == 0 and settings.queue_unready ~= 1 then return refuse(r, REFUSED.NO_ENDPOINTS) end
  r.deadline_ms = now_ms + left_ms
  local is_first = pool.queued == 0 or settings.tenants and queue.may_overtake(r)
  local reply = is_first and pool.ready > 0 and bypass(r, turn, picks)
  if reply then return reply end
  -- If the queue is off, refuse a request that cannot start because of a limit.
  if settings.queue_enabled == 0 and settings.paused ~= 1 and is_first then
    return refuse(r, REFUSED.SATURATED)
  end
  if settings.overload == OVERLOAD_REJECT_NONCRITICAL and not GUARANTEED[band] then
    return refuse(r, REFUSED.SATURATED)
  end
  if settings.fairness ~= FAIRNESS_NONE and queue.length(band, r.flow) >= settings.flow_capacity then
    return refuse(r, REFUSED.INSUFFICIENT_FLOW_CAPACITY)
  end

  -- Count the flow queues only if at least max_flows requests wait: else there are fewer flow queues than max_flows.
  if pool.queued >= (settings.max_flows or math.huge) and not GUARANTEED[band]
    and count_flow_queues() >= settings.max_flows and queue.length(band, queue.flow_queue(r)) == 0 then
    return refuse(r, REFUSED.TOO_MANY_FLOWS)
  end
  if pool[QUEUED[band]] >= CAPACITY[band] then return refuse(r, REFUSED.BAND_CAPACITY) end
  if r.bytes > MOST_BYTES then r.bytes = MOST_BYTES end
  if bands.limit_bytes and not bands.has_room_for_bytes(r) then return refuse(r, REFUSED.BAND_BYTES) end
  if pool.queued >= settings.total_capacity and not (settings.overload == OVERLOAD_PREEMPT and preempt_for(r)) then
    return refuse(r, REFUSED.TOTAL_CAPACITY)
  end
  r.state, r.any_endpoint = STATE_QUEUED, r.candidates == endpoints.ANY and r.prefill == ''
  if settings.tenants then quotas.wait(r) end
  local tag = queue.insert(r)
  record.put(r)
  if settings.log_max > 0 then log_event('queued', r, tag) end
  return queued_for(left_ms)
end

-- The arrival number of a request that has waited for `age_ms` at a replica. A replica's clock counts ms, so requests
-- of one call often have equal ages: number such requests in the order of the call (G4).
local counts = {} -- time of arrival in us -> number of this call's requests that waited at a replica since that time
local function arrival_us(age_ms)
  if age_ms > 0 then
    local arrived = math.floor(now_us - age_ms * 1000 + 0.5)
    local earlier = counts[arrived] or 0
    counts[arrived] = earlier + 1
    return arrived + earlier
  end
  return pool.next_arrival_us()
end

local asked, ids, workload_ids = {}, {}, {} -- kept from call to call, since creating a table is slow
local function admit(args)
  local count = #args - 1
  if not pool.known then
    local replies = {}
    for i = 1, count do replies[i] = 'unknown-pool' end
    return {'0', {}, 0, 0, unpack(replies)}
  end
  reset_notifications(args[1])
  counts = {}
  local replies = {}
  for i = 1, count do
    local r = record.new('')
    unpack_arrival(r, args[i + 1])
    asked[i], ids[i], workload_ids[i] = r, r.id, r.workload
  end
  record.prefetch(ids, count)
  workloads.prefetch(workload_ids, count)
  workloads.prefetch_scores(asked, count)
  if settings.tenants then quotas.prefetch(asked, count) end
  for i = 1, count do
    local r, turn = asked[i], now_us + i + 1
    local known = record.read(r.id)
    if known then
      replies[i] = is_same(known, r) and adopt(known, r, turn, count) or 'foreign'
    else
      -- Count the arrival in its workload before the decision, so the rate includes refused requests (specs 000, 001).
      r.state, r.owner, r.workload, r.arrived, r.deadline_ms, r.endpoints, r.taken, r.tag = 'new', args[1],
        workloads.arrived(r.flow, r.workload), arrival_us(r.age_ms), 0, '', 0, -1
      r.age_ms = math.floor(r.age_ms)
      if r.learn == 1 then
        local answer = usage.mean_answer(r.flow, r.model)
        r.cost, r.answer_tokens = r.cost + answer, r.answer_tokens + answer
      end
      r.cost = bands.clamp_cost(r.cost)
      replies[i] = arrive(r, turn, count)
      if r.state == 'new' then -- refused or expired
        if settings.tenants then quotas.refused(r) end
        workloads.refused(r.flow, r.workload)
      elseif r.band > LAST_NAMED then
        bands.count_request(r.band, 1)
      end
    end
  end
  return finish_call(replies)
end
