-- include: endpoints order throttle
-- The queue consists of bands; each band has flow queues ordered by start tag; each flow queue has requests in the
-- order of lib/order.lua. Also chooses preemption candidates, and applies new settings, which may change the order.
-- Uses fronts from lib/fronts.lua, bands from lib/bands.lua, records and timers from lib/registry.lua, `endpoints`,
-- `order` and `throttle`. Defines `preemption`, `queue` and `put_settings`.

-- The preemption candidates when the queue is full: the backlogged flow queues of each preemptible band, ordered by
-- the time of their last preemption. While pool.pressed is 1, the key `preempted` keeps the last preemption times of
-- flow queues that have emptied.
local preemption = {}
do
  function preemption.add_candidate(band, flow_queue)
    local last = pool.pressed == 1 and read('ZSCORE', key.preempted[band], flow_queue)
    if last then defer_write('ZREM', key.preempted[band], flow_queue) end
    defer_write('ZADD', key.candidates[band], last or 0, flow_queue)
  end

  function preemption.remove_candidate(band, flow_queue)
    if pool.pressed == 1 then
      local last = read('ZSCORE', key.candidates[band], flow_queue)
      if tonumber(last or 0) > 0 then defer_write('ZADD', key.preempted[band], last, flow_queue) end
    end
    defer_write('ZREM', key.candidates[band], flow_queue)
  end

  -- Return the flow queue to preempt from next, and the id of its newest request (under edf, its latest deadline); nil
  -- if the band has none. If the set of candidates was lost, choose among the backlogged flow queues.
  function preemption.next_candidate(band)
    for _ = 1, STRAYS do
      local candidate = read('ZRANGE', key.candidates[band], 0, 0)[1]
      local flow_queue = candidate or read('ZRANGE', key.flows[band], 0, 0)[1]
      if not flow_queue then return nil end
      local last = read('ZRANGE', key.queue[band][flow_queue], -1, -1)[1]
      if last then return flow_queue, last end
      drop_stray('ZREM', candidate and key.candidates[band] or key.flows[band], flow_queue)
    end
  end
end

-- Start-time fair queueing (Goyal, Vin, Cheng, 1996; for several servers: Jin, Chase, Kaur, SFQ(D), 2004): a flow queue
-- that becomes backlogged starts at S = max(v, F); serving it sets the band's virtual time v = S and the flow queue's
-- finish tag F = S + share. Tags belong to flow queues, not to requests, so a request that leaves unserved leaves no
-- gap. docs/fairness.md has the proofs.
local queue = {flow_queue = order.flow_queue, has_lengths = false}
do
  local clamp = bands.clamp

  -- Return the share by which serving request r raises the tag of its flow queue. A damaged record may hold any weight
  -- or cost: clamp weight and cost, so that tags stay finite.
  function queue.share(r)
    if settings.fairness == FAIRNESS_ROUND_ROBIN then return 1 end
    local cost = bands.clamp_cost(r.cost)
    if settings.fairness == FAIRNESS_NONE then return cost end
    return cost / clamp(settings.weights[r.flow] or r.weight, LEAST_WEIGHT, MOST_WEIGHT)
  end

  -- Return the flow queue that holds request r: after a change of `fairness`, the former flow queue until the sweep has
  -- moved r.
  function queue.current_flow_queue(r)
    local flow_queue, flow_queues = queue.flow_queue(r), key.queue[r.band]
    if pool.refiling == 0 or read('ZSCORE', flow_queues[flow_queue], r.id) then return flow_queue end
    local other = flow_queue == '' and r.flow or ''
    return read('ZSCORE', flow_queues[other], r.id) and other or flow_queue
  end

  local lengths = {} -- key of a flow queue -> number of its requests, cached during a call
  local ordered = {} -- the same key -> true if the flow queue is known to be ordered or throttled
  function queue.reset() lengths, ordered, queue.has_lengths = {}, {}, false end

  function queue.length(band, flow_queue)
    local requests = key.queue[band][flow_queue]
    local length = lengths[requests]
    if not length then
      length = read('ZCARD', requests)
      lengths[requests], queue.has_lengths = length, true
    end
    return length
  end

  -- The number of backlogged flow queues in all bands.
  function queue.count_flow_queues()
    local count = 0
    for _, band in ipairs(BANDS) do
      for _, flow_queues in ipairs({key.flows[band], key.throttled[band]}) do
        count = count + read('ZCARD', flow_queues)
      end
    end
    return count
  end

  function queue.due_ms(r)
    local arrived, deadline_ms, patience_ms = r.arrived, r.deadline_ms, settings.starvation_ms
    local arrived_ms = (arrived - arrived % 1000) / 1000
    if patience_ms == 0 then
      local left_ms = deadline_ms - arrived_ms
      patience_ms = (left_ms - left_ms % 2) / 2
    end
    local due_ms = arrived_ms + patience_ms
    return due_ms < deadline_ms and due_ms or deadline_ms
  end

  local function count_queued(r, change)
    local counters, name = pool, QUEUED[r.band]
    counters.queued, counters[name] = counters.queued + change, counters[name] + change
    if r.bytes > 0 then bands.count_bytes(r, change) end
  end

  -- Return the start tag of a flow queue that becomes backlogged with request r and whose last finish tag is `finish`.
  -- If finish <= v (the virtual time), the flow queue is a newcomer and starts at v. A client that makes a new flow for
  -- each request would thus always be served first, so all newcomers together are charged to the tag `new`, like one
  -- flow. While `new` is at least NEWCOMERS shares ahead of v, a newcomer starts one share after v, as if it had been
  -- served once.
  local NEWCOMERS = 100
  local function start_tag(r, finish)
    local v, new, share = pool[V[r.band]], NEW[r.band], queue.share(r)
    if finish > v then return finish end
    local reached = math.max(pool[new], v)
    if reached - v >= NEWCOMERS * share then return v + share end
    pool[new] = reached + share
    return v
  end

  -- Put a backlogged flow queue in its band's order. A band whose order was empty does not catch up on missed turns.
  local function activate(band, flow_queue, tag)
    local flows, name = key.flows[band], BAND_TAG[band]
    if pool[name] < pool.bv and read('ZCARD', flows) == 0 then pool[name] = pool.bv end
    read_ahead.discard(flows)
    defer_write('ZADD', flows, tag, flow_queue)
  end

  -- Queue request r; the caller writes the record. Return the start tag of r's flow queue if r makes it backlogged,
  -- else nil.
  function queue.insert(r)
    local band, flow_queue = r.band, queue.flow_queue(r)
    local requests = key.queue[band][flow_queue]
    local length = queue.length(band, flow_queue)
    local is_ordered = length > 0 and (ordered[requests] or read('ZSCORE', key.flows[band], flow_queue)
      or read('ZSCORE', key.throttled[band], flow_queue)) -- false although length > 0: only strays
    ordered[requests] = true
    read_ahead.discard(requests)
    defer_write('ZADD', requests, order.score(r), r.id)
    lengths[requests] = length + 1
    if settings.ordering == ORDERING_WORKLOAD_AWARE then
      record.know(r)
      order.insert(r, flow_queue)
    end
    local due_ms = queue.due_ms(r)
    r.due_ms = due_ms
    timers.set(r.id, due_ms)
    count_queued(r, 1)
    if is_ordered then return nil end
    local tag = start_tag(r, tonumber(read('ZSCORE', key.finish[band], flow_queue) or 0))
    activate(band, flow_queue, tag)
    if band > 0 or PREEMPTIBLE[0] then preemption.add_candidate(band, flow_queue) end
    return tag
  end

  local function deactivate(band, flow_queue, tag)
    read_ahead.set_score(key.flows[band], flow_queue)
    defer_write('ZADD', key.finish[band], tag, flow_queue)
    if band > 0 or PREEMPTIBLE[0] then preemption.remove_candidate(band, flow_queue) end
  end

  -- Remove request r from its flow queue, timers and indexes. Return whether the flow queue is now empty.
  local function take_out(r, flow_queue)
    local id, band = r.id, r.band
    local requests, is_aware = key.queue[band][flow_queue], settings.ordering == ORDERING_WORKLOAD_AWARE
    if is_aware then queue.length(band, flow_queue) end -- if r is not first, read_ahead.remove returns nil
    local emptied, left = read_ahead.remove(requests, id), lengths[requests]
    if left then
      lengths[requests], emptied = left - 1, left == 1
    elseif emptied == nil then
      emptied = queue.length(band, flow_queue) == 0
    end
    if is_aware or pool.refiling == 1 then order.remove(r, flow_queue) end
    timers.stop(id)
    local overdue_us = pool.overdue > 0 and read('ZSCORE', key.overdue, id)
    if overdue_us then
      note_original(key.overdue, id, overdue_us)
      defer_write('ZREM', key.overdue, id)
      pool.overdue = pool.overdue - 1
    end
    count_queued(r, -1)
    return emptied
  end

  -- When the last request of a flow queue has left unserved, store the flow queue's tag as its finish tag.
  local function empty(band, flow_queue)
    local tag = read('ZSCORE', key.flows[band], flow_queue) or throttle.remove(band, flow_queue)
    if tag then deactivate(band, flow_queue, tag) end
  end

  -- Remove request r from the queue without serving r; the tag of the flow queue stays the same.
  function queue.remove(r)
    local flow_queue = queue.current_flow_queue(r)
    if take_out(r, flow_queue) then empty(r.band, flow_queue) end
  end

  -- Remove a stray (an id without a queued request) from a flow queue and its indexes.
  function queue.drop_stray(id, band, flow_queue)
    local requests = key.queue[band][flow_queue]
    drop_stray('ZREM', requests, id)
    order.drop_stray(id, band, flow_queue)
    lengths[requests] = read('ZCARD', requests)
    if lengths[requests] == 0 then empty(band, flow_queue) end
  end

  -- Remove request r from the queue and charge its share to its flow queue, whose start tag is `tag`. A turn of flow
  -- queue `turn_of` moves the virtual time v to `tag`; if the starvation guard serves r (`turn_of` nil), v stays.
  -- Return the share.
  function queue.serve(r, tag, turn_of)
    local flow_queue, band, share = turn_of or queue.current_flow_queue(r), r.band, queue.share(r)
    local emptied = take_out(r, flow_queue)
    if turn_of and tag > pool[V[band]] then pool[V[band]] = tag end
    if emptied then
      deactivate(band, flow_queue, tag + share)
    else
      read_ahead.set_score(key.flows[band], flow_queue, tag + share)
    end
    if settings.band_policy == BAND_POLICY_WEIGHTED then
      if turn_of then pool.bv = math.max(pool.bv, pool[BAND_TAG[band]]) end
      queue.charge_band(r, r.cost)
    end
    return share
  end

  -- Correct a charge for request r: add `difference` to the tag of `flow_queue`. If no tag is stored, add `difference`
  -- to the lesser of the virtual time v and `floor`. Return the flow queue's new tag.
  function queue.correct(r, flow_queue, difference, floor)
    for _, place in ipairs({key.flows[r.band], key.throttled[r.band], key.finish[r.band]}) do
      local tag = read('ZSCORE', place, flow_queue)
      note_original(place, flow_queue, tag)
      if tag then
        defer_write('ZADD', place, tag + difference, flow_queue)
        return tag + difference
      end
    end
    local tag = math.min(floor, pool[V[r.band]]) + difference
    defer_write('ZADD', key.finish[r.band], tag, flow_queue)
    return tag
  end

  -- Under the band policy `weighted`, charge `cost` to the band of request r. A negative cost is a refund.
  function queue.charge_band(r, cost)
    if settings.band_policy ~= BAND_POLICY_WEIGHTED then return end
    local name = BAND_TAG[r.band]
    pool[name] = pool[name] + cost / BAND_WEIGHT[r.band]
  end

  -- Stop serving a flow queue because its flow, or every endpoint that its next request may use, is at its limit. After
  -- `unthrottle` the flow queue does not catch up on missed turns.
  function queue.throttle(band, flow_queue, tag)
    read_ahead.set_score(key.flows[band], flow_queue)
    throttle.add(band, flow_queue, tag)
  end

  -- Put a throttled flow queue back in order. Return false if the flow queue was not throttled or holds no request.
  function queue.unthrottle(band, flow_queue)
    local tag = throttle.remove(band, flow_queue)
    if not tag then return false end
    if queue.length(band, flow_queue) == 0 then
      strays = strays + 1
      return false
    end
    tag = math.max(pool[V[band]], tag)
    activate(band, flow_queue, tag)
    log_flow_queue('unthrottled', band, flow_queue, tag)
    return true
  end

  -- Orphan a silent replica's request: remove the request from the queue until another replica adopts it, but at most
  -- until `until_ms`. The record keeps the deadline, so the adopter has the rest of the TTL.
  function queue.orphan(r, until_ms)
    queue.remove(r)
    r.state = STATE_ORPHANED
    timers.set(r.id, math.min(r.deadline_ms, until_ms))
    record.put(r)
    log_event('orphaned', r)
  end

  -- Move request r to its position under the policy in force. The sweep calls this function.
  function queue.reorder(r)
    local flow_queue = queue.current_flow_queue(r)
    if flow_queue ~= queue.flow_queue(r) then
      queue.remove(r)
      queue.insert(r)
      record.put(r)
    else
      local requests = key.queue[r.band][flow_queue]
      read_ahead.discard(requests)
      defer_write('ZADD', requests, order.score(r), r.id)
      order.remove(r, flow_queue)
      if settings.ordering == ORDERING_WORKLOAD_AWARE then order.insert(r, flow_queue) end
    end
  end

  -- Return the bands in the order in which dispatch serves them.
  local function bands_in_order()
    if settings.band_policy ~= BAND_POLICY_WEIGHTED then return BANDS end
    local by_tag = {unpack(BANDS)}
    table.sort(by_tag, function(a, b)
      local tag_a, tag_b = pool[BAND_TAG[a]], pool[BAND_TAG[b]]
      return tag_a < tag_b or (tag_a == tag_b and RANK[a] < RANK[b])
    end)
    return by_tag
  end

  -- An endpoint is below its limit again: put the first flow queue that waits for the endpoint back in order.
  function queue.endpoint_has_room(address)
    if read('HLEN', key.blockers) == 0 then return end
    for _, band in ipairs(bands_in_order()) do
      for _ = 1, STRAYS do
        local waiting, flow_queue = throttle.first_waiting(band, address)
        if not flow_queue then break end
        if queue.unthrottle(band, flow_queue) then return end
        if read('ZSCORE', waiting, flow_queue) then drop_stray('ZREM', waiting, flow_queue) end
      end
    end
  end

  -- Read ahead for up to `count` turns: the next flow queues, and the records of the first requests of each flow queue,
  -- the same number from each.
  function queue.prefetch(count)
    read_ahead.expect(count)
    if count < 2 then return end
    local in_order, at = bands_in_order(), 1
    while at < #in_order and pool[QUEUED[in_order[at]]] == 0 do at = at + 1 end
    local band, ids = in_order[at], {}
    local flow_queues, requests = read_ahead.scored_front(key.flows[band]), key.queue[band]
    local each, odd = math.floor(2 * count / #flow_queues), 2 * count % #flow_queues
    for i = 1, #flow_queues, 2 do
      local part = i < odd and each + 1 or each
      if settings.ordering == ORDERING_WORKLOAD_AWARE then
        order.first_heads(band, flow_queues[i], part, ids)
      else
        read_ahead.first_members(requests[flow_queues[i]], part, ids)
      end
    end
    record.prefetch(ids, #ids)
    if settings.ordering == ORDERING_WORKLOAD_AWARE then order.prefetch_followers(ids) end
  end

  -- Return the request to serve next: its id, its flow queue's start tag, band and name; nil if no request can be
  -- served.
  function queue.next_turn()
    local in_order = settings.band_policy == BAND_POLICY_WEIGHTED and bands_in_order() or BANDS
    for i = 1, #in_order do
      local band = in_order[i]
      if pool[QUEUED[band]] > 0 then
        local flow_queue, tag = read_ahead.first_scored(key.flows[band])
        for _ = 1, STRAYS do
          if not flow_queue then break end
          local id = settings.ordering == ORDERING_WORKLOAD_AWARE and order.head(band, flow_queue)
            or read_ahead.first_member(key.queue[band][flow_queue])
          if id then return id, tag, band, flow_queue end
          strays = strays + 1 -- the flow queue is empty
          read_ahead.set_score(key.flows[band], flow_queue)
          flow_queue, tag = read_ahead.first_scored(key.flows[band])
        end
      end
    end
  end

  -- Return the longest overdue request whose flow queue is not throttled, and the start tag of that flow queue; nil if
  -- the first GUARD_LOOKS_AT overdue requests include none.
  local GUARD_LOOKS_AT = 16
  function queue.most_overdue()
    for _, id in ipairs(read('ZRANGE', key.overdue, 0, GUARD_LOOKS_AT - 1)) do
      local r = record.read(id)
      if r and r.state == STATE_QUEUED then
        local tag = read('ZSCORE', key.flows[r.band], queue.current_flow_queue(r))
        if tag then return id, tonumber(tag) end
      else
        drop_stray('ZREM', key.overdue, id)
        pool.overdue = read('ZCARD', key.overdue) -- the stray may have been counted
      end
    end
  end
end

-- Add the limits that the fleet has found to the settings `base`, as `caps` (endpoint -> limit) and `default_cap` (of
-- all other endpoints). A found limit is at most the limit that discovery gives (`base.caps`); a pinned limit replaces
-- it. Limits in tokens become `token_caps` and `default_token_cap`: discovery limits requests.
local function add_limits(base)
  local function bounded(limit) return math.max(base.limit_min, math.min(limit, base.limit_max or limit)) end
  local decoded, found = pcall(cjson.decode, read('HGET', key.pool, 'limits') or '{}')
  local caps = {}
  for address, limit in pairs(decoded and type(found) == 'table' and found or {}) do
    if type(limit) == 'number' then caps[address] = bounded(limit) end
  end
  local default_cap, in_tokens = bounded(base.limit_initial), base.unit == 'tokens'
  for address, limit in pairs(not in_tokens and base.caps or {}) do
    caps[address] = math.min(limit, caps[address] or default_cap)
  end
  for address, limit in pairs(base.pinned or {}) do caps[address] = limit end
  if in_tokens then
    base.token_caps, base.default_token_cap, caps, default_cap = caps, default_cap, base.caps or {}, nil
  end
  base.caps, base.default_cap = caps, default_cap
end

-- Put settings in force: the published configuration `base`, overlaid by the live changes `overrides`.
local function put_settings(base, overrides)
  local changed = false
  for name, value in pairs(overrides) do base[name] = value end
  -- The settings of an older version lack the limits' bounds: then the pool is static.
  if base.adaptive == 1 and base.limit_initial then add_limits(base) else base.adaptive = nil end
  -- The settings that decide the order of queued requests.
  for _, name in ipairs({'fairness', 'ordering', 'wait_signal', 'wait_weight', 'criticality_weight', 'rate_weight',
    'wait_cap_ms', 'rate_cap'}) do
    changed = changed or settings[name] ~= base[name]
  end
  local text = cjson.encode(base)
  if base.log_max == 0 then log_change('tuned', text) end -- the log ends with this entry
  local counted = settings.token_caps
  settings, settings_text = base, nil
  bands.configure(settings)
  -- If the fleet begins or ceases to find limits in tokens, count the tokens in flight from the records.
  if (counted == nil) ~= (settings.token_caps == nil) then
    for _, address in ipairs(endpoints.counted()) do endpoints.add_amount(address, 0, true) end
    for _, id in ipairs(settings.token_caps and read('ZRANGE', key.inflight, 0, -1) or {}) do
      local r = record.read(id)
      if r and r.state == STATE_PLACED then endpoints.add_amount(endpoints.first(r.endpoints), r.taken) end
    end
  end
  defer_write('HSET', key.pool, 'settings', text)
  pool.touched = true
  if changed and pool.queued > 0 then -- the sweep moves all waiting requests to their new positions, chunk by chunk
    pool.refiling = 1
    defer_write('HSET', key.pool, 'walk', '0')
  end
  log_change('tuned', text)
end
