-- include: registry
-- The queue: bands; in each band, flow queues ordered by start tag; in each flow queue, requests by the ordering in
-- force. Also the timers of waiting requests and the preemption candidates.
--
-- Timers: when the next event of each waiting request is due. Between calls this library keeps a lower bound of the
-- earliest due time, and does not ask Redis before that.

local timers = {}
do
  local next_ms -- due time of the earliest timer, or less; nil: unknown
  local set_ms -- the earliest due time that this call has set
  function timers.reset()
    if not cache_is_valid then next_ms = nil end
    set_ms = math.huge
  end

  function timers.set(id, due_ms)
    if next_ms and due_ms < next_ms then next_ms = due_ms end
    if due_ms < set_ms then set_ms = due_ms end
    defer_write('ZADD', key.timers, due_ms, id)
  end

  function timers.stop(id) defer_write('ZREM', key.timers, id) end

  local function first_ms(reader)
    return tonumber(reader('ZRANGE', key.timers, 0, 0, 'WITHSCORES')[2] or math.huge)
  end

  -- Whether a timer is due. If so, all timers that this call has set are already written to Redis.
  function timers.due()
    if next_ms and now_ms < next_ms then return false end
    next_ms = math.min(first_ms(redis.call), set_ms)
    if next_ms > now_ms then return false end
    next_ms = first_ms(read)
    return next_ms <= now_ms
  end
end

-- The order of requests within a flow queue. The sorted set queue:B:L holds all its requests: by deadline under edf,
-- else by arrival. Under workload-aware a separate index decides.
--
-- workload-aware (spec 001): score = wait_weight * min(wait / wait_cap, 1) + g, highest first, where
-- g = criticality_weight * criticality / 5 - rate_weight * min(rate / rate_cap, 1). The requests of a workload in a
-- flow queue form a line; only the oldest, the head, competes. An anonymous request is a line of its own. Below
-- wait_cap all scores grow at the same speed, so `growing` orders heads by a constant key: the arrival minus the wait
-- that adds as much score as g. Heads past wait_cap, and heads scored by their workload's average wait, are in
-- `static`, ordered by -score. The first head of `growing` is compared with the first of `static`, and the higher score
-- is served. A first head of `growing` past wait_cap moves to `static` before that. Other heads past wait_cap may stay
-- in `growing`: their keys overstate their scores, so a head that is not first by key would not win by score either.
local order, queue = {}, {}
do
  local function constant_score(r)
    return settings.criticality_weight * r.criticality / 5
      - settings.rate_weight * math.min(workloads.rate_of(r) / settings.rate_cap, 1)
  end

  local function cap_us() return settings.wait_cap_ms * 1000 end
  local function by_average(r) return settings.wait_signal == WAIT_SIGNAL_WORKLOAD_AVERAGE and r.workload ~= '' end

  -- Set the key of r in `growing` and in `static`; a nil key removes r. Skip a set that cannot hold r under the current
  -- settings, except while requests are moved to a new order, when both sets may hold r.
  local function set_index(r, flow_queue, growing_key, static_key)
    local never_grows = settings.wait_weight == 0 or by_average(r)
    local growing, static = key.growing[r.band][flow_queue], key.static[r.band][flow_queue]
    if growing_key or not never_grows or pool.refiling == 1 then read_ahead.set_score(growing, r.id, growing_key) end
    if static_key or never_grows or now_us - r.arrived >= cap_us() or pool.refiling == 1 then
      read_ahead.set_score(static, r.id, static_key)
    end
  end

  -- Put the head of a line into `growing` or `static` by its current score.
  local function index(r, flow_queue)
    local g, waited = constant_score(r), nil
    if by_average(r) then
      waited = math.min(workloads.wait_ms_of(r) / settings.wait_cap_ms, 1)
    elseif settings.wait_weight == 0 or now_us - r.arrived >= cap_us() then
      waited = 1
    end
    if waited then
      set_index(r, flow_queue, nil, -(settings.wait_weight * waited + g))
    else
      set_index(r, flow_queue, r.arrived - cap_us() / settings.wait_weight * g, nil)
    end
  end

  -- Cache the heads of lines between calls while only this library changes the pool: each arrival needs a head.
  local MOST_HEADS = 256
  local heads, known_heads = {}, 0 -- line -> the fields of its head that `index` needs
  local function forget_heads() heads, known_heads = {}, 0 end

  function order.reset()
    if known_heads == 0 then return end
    if not cache_is_valid or known_heads > MOST_HEADS or settings.ordering ~= ORDERING_WORKLOAD_AWARE then
      forget_heads()
    end
  end

  local function keep_head(line, r)
    local head = heads[line]
    if not r then
      if head then heads[line], known_heads = nil, known_heads - 1 end
      return
    end
    if not head then
      head, known_heads = {}, known_heads + 1
      heads[line] = head
    end
    head.id, head.arrived, head.criticality = r.id, r.arrived, r.criticality
    head.workload, head.band, head.flow = r.workload, r.band, r.flow
  end

  -- Return the oldest waiting request of a line, or nil. Drop ids of requests that no longer wait.
  local function read_head(line)
    for _ = 1, STRAYS do
      local id = read_ahead.first_member(line)
      local r = id and record.read(id)
      if not id or (r and r.state == STATE_QUEUED) then
        keep_head(line, r)
        return r
      end
      drop_stray('ZREM', line, id)
    end
    keep_head(line, nil)
  end

  -- The score of r in its flow queue. Under edf, the arrival's part below 1 ms breaks ties between deadlines (ms).
  function order.score(r)
    if settings.ordering == ORDERING_EDF then return r.deadline_ms * 1000 + r.arrived % 1000 end
    return r.arrived
  end

  -- Add r to the workload-aware index.
  function order.insert(r, flow_queue)
    if r.workload == '' then return index(r, flow_queue) end
    local line = key.line(r.band, flow_queue, r.workload)
    local head = heads[line] or read_head(line)
    read_ahead.discard(line)
    defer_write('ZADD', line, r.arrived, r.id)
    if not head or r.arrived < head.arrived or (r.arrived == head.arrived and r.id < head.id) then
      if head then set_index(head, flow_queue) end
      keep_head(line, r)
      head = r
    end
    index(head, flow_queue) -- an arrival changes the rate of the head's workload
  end

  -- Remove r from a line. If r was the head, index the next head.
  local function leave(line, r, flow_queue)
    local was_head = read_ahead.first_member(line) == r.id
    if not was_head then -- r may still be the head: strays may precede it
      local head = read_head(line)
      was_head = head and head.id == r.id
    end
    read_ahead.remove(line, r.id)
    local next_head = was_head and read_head(line)
    if next_head then index(next_head, flow_queue) end
  end

  -- Remove r from the workload-aware index, if it is there.
  function order.remove(r, flow_queue)
    set_index(r, flow_queue)
    if r.workload ~= '' then leave(key.line(r.band, flow_queue, r.workload), r, flow_queue) end
  end

  -- Return the id that the flow queue serves next; nil if its requests are not indexed yet after a change of ordering.
  -- A call moves at most MOST_CAPPED heads past wait_cap to `static`, then serves its first; the next call continues.
  local MOST_CAPPED = 256
  function order.head(band, flow_queue)
    local growing, static = key.growing[band][flow_queue], key.static[band][flow_queue]
    for _ = 1, MOST_CAPPED do
      local id, grows_from = read_ahead.first_scored(growing)
      local best, best_score = read_ahead.first_scored(static)
      local r = id and record.read(id)
      if id and not (r and r.state == STATE_QUEUED) then
        drop_stray('ZREM', growing, id)
        forget_heads()
      elseif r and now_us - r.arrived >= cap_us() then
        index(r, flow_queue)
      elseif r or best then
        local grown = r and (now_us - grows_from) / cap_us() * settings.wait_weight
        if grown and (not best or grown > -best_score) then return id end
        return best
      else
        return nil
      end
    end
    return read_ahead.first_scored(static)
  end

  function order.drop_stray(id, band, flow_queue)
    for _, part in ipairs({key.growing, key.static}) do read_ahead.set_score(part[band][flow_queue], id) end
    forget_heads()
  end

  -- Append the ids of the first `count` heads in a flow queue's `growing` set to `found`.
  function order.first_heads(band, flow_queue, count, found)
    local front, known = read_ahead.scored_front(key.growing[band][flow_queue]), #found
    for i = 1, math.min(2 * count, #front), 2 do found[known + (i + 1) / 2] = front[i] end
  end

  -- Read the records of the requests that become heads once `ids` have been served.
  function order.prefetch_followers(ids)
    local found, count = {}, 0
    for _, id in ipairs(ids) do
      local r = record.read(id)
      local line = r and r.workload ~= '' and key.line(r.band, queue.flow_queue(r), r.workload)
      local follower = line and read_ahead.second_member(line)
      if follower then
        count = count + 1
        found[count] = follower
      end
    end
    record.prefetch(found, count)
  end

  -- Whether the workload-aware index has r: in its line or, if r is anonymous, in `growing` or `static`.
  function order.is_indexed(r, flow_queue)
    if r.workload ~= '' then return read('ZSCORE', key.line(r.band, flow_queue, r.workload), r.id) end
    return read('ZSCORE', key.growing[r.band][flow_queue], r.id) or read('ZSCORE', key.static[r.band][flow_queue], r.id)
  end

  -- Index r again if it heads its line: the rate of its workload falls with time. Called by the sweep.
  function order.refresh(r, flow_queue)
    if settings.ordering ~= ORDERING_WORKLOAD_AWARE or r.workload == '' then return end
    local head = read_head(key.line(r.band, flow_queue, r.workload))
    if head and head.id == r.id then index(r, flow_queue) end
  end
end

-- The preemption candidates when the queue is full: the backlogged flow queues of each preemptible band, ordered by
-- the time of their last preemption. While pool.pressed is 1, `preempted` keeps the last preemption times of flow
-- queues that have emptied.
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
-- that becomes backlogged starts at S = max(v, F); serving it sets v = S and F = S + share. Tags belong to flow queues,
-- not to requests, so a request that leaves unserved leaves no gap. docs/fairness.md has the proofs.
local reset_lengths
do
  local clamp = bands.clamp

  -- The share that serving r adds to its flow queue's tag. A damaged record may hold any weight or cost, so both are
  -- clamped to numbers that the sums bear.
  function queue.share(r)
    if settings.fairness == FAIRNESS_ROUND_ROBIN then return 1 end
    local cost = clamp(r.cost, 0, MOST_COST)
    if settings.fairness == FAIRNESS_NONE then return cost end
    return cost / clamp(settings.weights[r.flow] or r.weight, LEAST_WEIGHT, MOST_WEIGHT)
  end

  function queue.clamp_cost(cost) return clamp(cost, 0, MOST_COST) end
  function queue.flow_queue(r) return settings.fairness == FAIRNESS_NONE and '' or r.flow end

  -- The flow queue that holds r. While requests are moved to a new order, the previous policy's may still hold r.
  local function current_flow_queue(r)
    local flow_queue, flow_queues = queue.flow_queue(r), key.queue[r.band]
    if pool.refiling == 0 or read('ZSCORE', flow_queues[flow_queue], r.id) then return flow_queue end
    local other = flow_queue == '' and r.flow or ''
    return read('ZSCORE', flow_queues[other], r.id) and other or flow_queue
  end

  local lengths = {} -- key of the requests of a flow queue -> their number, as far as this call knows it
  local ordered = {} -- the same key -> true if the flow queue is known to be ordered or throttled
  function reset_lengths()
    if next(lengths) then lengths = {} end
    if next(ordered) then ordered = {} end
  end

  function queue.length(band, flow_queue)
    local requests = key.queue[band][flow_queue]
    local length = lengths[requests]
    if not length then
      length = read('ZCARD', requests)
      lengths[requests] = length
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

  -- Return the start tag of a flow queue that becomes backlogged with r and whose last finish tag is `finish`. If
  -- finish <= v, the flow queue is a newcomer and starts at v. A client that makes a new flow for each request would
  -- thus always be served first, so all newcomers together are charged to `new`, like one flow. While `new` is at least
  -- NEWCOMERS shares ahead of v, a newcomer starts one share after v, as if it had been served once.
  local NEWCOMERS = 100
  local function start_tag(r, finish)
    local v, new, share = pool[V[r.band]], NEW[r.band], queue.share(r)
    if finish > v then return finish end
    local reached = math.max(pool[new], v)
    if reached - v >= NEWCOMERS * share then return v + share end
    pool[new] = reached + share
    return v
  end

  -- Put a backlogged flow queue in order. A band without ordered flow queues does not catch up on missed turns.
  local function activate(band, flow_queue, tag)
    local flows, name = key.flows[band], BAND_TAG[band]
    if pool[name] < pool.bv and read('ZCARD', flows) == 0 then pool[name] = pool.bv end
    read_ahead.discard(flows)
    defer_write('ZADD', flows, tag, flow_queue)
  end

  -- Whether a flow queue is ordered or throttled.
  local function is_ordered(band, flow_queue)
    return read('ZSCORE', key.flows[band], flow_queue)
      or read('ZSCORE', key.throttled[band], flow_queue)
  end

  -- Queue r; the caller writes the record. Return the start tag of r's flow queue if r makes it backlogged, else nil.
  function queue.insert(r)
    local band, flow_queue = r.band, settings.fairness == FAIRNESS_NONE and '' or r.flow
    local requests = key.queue[band][flow_queue]
    local length = lengths[requests] or queue.length(band, flow_queue)
    local is_new = length == 0 or not (ordered[requests] or is_ordered(band, flow_queue)) -- unordered: strays
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
    if not is_new then return nil end
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

  -- Remove r from its flow queue, timers and indexes. Return whether the flow queue is now empty.
  local function take_out(r, flow_queue)
    local id, band = r.id, r.band
    local requests, is_aware = key.queue[band][flow_queue], settings.ordering == ORDERING_WORKLOAD_AWARE
    if is_aware then queue.length(band, flow_queue) end -- r is rarely first, so read_ahead.remove cannot tell
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

  -- Forget the endpoints that a throttled flow queue waits for.
  function queue.clear_blockers(band, flow_queue)
    local name = joined(band, flow_queue)
    local blockers = read('HGET', key.blockers, name)
    if not blockers then return end
    defer_write('HDEL', key.blockers, name)
    for address in string.gmatch(blockers, '[^,]+') do defer_write('ZREM', key.blocked[band][address], flow_queue) end
  end

  local function deactivate_if_empty(band, flow_queue)
    local tag = read('ZSCORE', key.flows[band], flow_queue)
    if not tag then
      tag = read('ZSCORE', key.throttled[band], flow_queue)
      defer_write('ZREM', key.throttled[band], flow_queue)
      queue.clear_blockers(band, flow_queue)
    end
    if tag then deactivate(band, flow_queue, tag) end
  end

  -- Remove r from the queue unserved; the tag of its flow queue does not change.
  function queue.remove(r)
    local flow_queue = current_flow_queue(r)
    if take_out(r, flow_queue) then deactivate_if_empty(r.band, flow_queue) end
  end

  -- Remove a stray, an id without a queued request, from a flow queue and its indexes.
  function queue.drop_stray(id, band, flow_queue)
    local requests = key.queue[band][flow_queue]
    read_ahead.discard(requests)
    drop_stray('ZREM', requests, id)
    order.drop_stray(id, band, flow_queue)
    lengths[requests] = read('ZCARD', requests)
    if lengths[requests] == 0 then deactivate_if_empty(band, flow_queue) end
  end

  -- Remove r from the queue and charge its share to its flow queue, whose start tag is `tag`. A turn of flow queue
  -- `turn_of` moves v to `tag`; if the starvation guard serves r (`turn_of` nil), v stays. Return the share.
  function queue.serve(r, tag, turn_of)
    local flow_queue, band, share = turn_of or current_flow_queue(r), r.band, queue.share(r)
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

  -- Correct a charge for r: add `difference` to the tag of `flow_queue`. If no tag is stored, add it to v, or to
  -- `floor` if that is less. Return the new tag.
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

  -- Under the band policy `weighted`, charge `cost` to the band of r. A negative cost refunds.
  function queue.charge_band(r, cost)
    if settings.band_policy ~= BAND_POLICY_WEIGHTED then return end
    local name = BAND_TAG[r.band]
    pool[name] = pool[name] + cost / BAND_WEIGHT[r.band]
  end

  -- Take a flow queue out of the order because its flow, or every endpoint that its next request may use, is at its
  -- limit. An unthrottled flow queue does not catch up on missed turns.
  function queue.throttle(band, flow_queue, tag)
    read_ahead.set_score(key.flows[band], flow_queue)
    defer_write('ZADD', key.throttled[band], tag, flow_queue)
    log_flow_queue('throttled', band, flow_queue, tag)
  end

  -- Put a throttled flow queue back in order. Return false if it was not throttled or holds no request.
  function queue.unthrottle(band, flow_queue)
    local tag = read('ZSCORE', key.throttled[band], flow_queue)
    if not tag then return false end
    queue.clear_blockers(band, flow_queue)
    if queue.length(band, flow_queue) == 0 then
      drop_stray('ZREM', key.throttled[band], flow_queue)
      return false
    end
    defer_write('ZREM', key.throttled[band], flow_queue)
    tag = math.max(pool[V[band]], tonumber(tag))
    activate(band, flow_queue, tag)
    log_flow_queue('unthrottled', band, flow_queue, tag)
    return true
  end

  -- Note that a throttled flow queue waits for room on one of the endpoints `closed`. Note only the first 16: the sweep
  -- puts throttled flow queues back in order as well.
  function queue.wait_for_endpoints(band, flow_queue, tag, closed)
    if #closed == 0 then return end
    local name, added = joined(band, flow_queue), {}
    local blockers = read('HGET', key.blockers, name)
    if blockers then added[1] = blockers end
    for i = 1, math.min(#closed, 16) do
      local waiting = key.blocked[band][closed[i]]
      if not read('ZSCORE', waiting, flow_queue) then added[#added + 1] = closed[i] end
      defer_write('ZADD', waiting, tag, flow_queue)
    end
    defer_write('HSET', key.blockers, name, table.concat(added, ','))
  end

  -- Orphan a silent replica's request: remove it from the queue until another replica adopts it, `until_ms` at the
  -- latest. The record keeps the deadline, so the adopter has the rest of the TTL.
  function queue.orphan(r, until_ms)
    queue.remove(r)
    r.state = STATE_ORPHANED
    timers.set(r.id, math.min(r.deadline_ms, until_ms))
    record.put(r)
    log_event('orphaned', r)
  end

  -- Move r to its position under the policy in force. Called by the sweep.
  function queue.reorder(r)
    local flow_queue = current_flow_queue(r)
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

  -- The bands in the order in which they are served.
  local function bands_in_order()
    if settings.band_policy ~= BAND_POLICY_WEIGHTED then return BANDS end
    local by_tag = {unpack(BANDS)}
    table.sort(by_tag, function(a, b)
      local tag_a, tag_b = pool[BAND_TAG[a]], pool[BAND_TAG[b]]
      return tag_a < tag_b or (tag_a == tag_b and RANK[a] < RANK[b])
    end)
    return by_tag
  end

  -- An endpoint at its limit has room again: put the first flow queue that waits for the endpoint back in order.
  function queue.endpoint_has_room(address)
    for _, band in ipairs(bands_in_order()) do
      for _ = 1, STRAYS do
        local waiting = key.blocked[band][address]
        local flow_queue = read('ZRANGE', waiting, 0, 0)[1]
        if not flow_queue then break end
        if queue.unthrottle(band, flow_queue) then return end
        if read('ZSCORE', waiting, flow_queue) then drop_stray('ZREM', waiting, flow_queue) end
      end
    end
  end

  -- Read ahead for up to `count` turns: the next flow queues, and the records of the first requests of each, equally
  -- many of each flow queue.
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

  -- Return the request to serve next: its id, its flow queue's start tag, band and name; nil if none can be served.
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
        local tag = read('ZSCORE', key.flows[r.band], current_flow_queue(r))
        if tag then return id, tonumber(tag) end
      else
        drop_stray('ZREM', key.overdue, id)
        pool.overdue = read('ZCARD', key.overdue) -- the stray may have been counted
      end
    end
  end
end
