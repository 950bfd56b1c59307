-- include: endpoints order throttle quotas
-- The queue, which lib/dispatch.lua serves, consists of bands; each band has flow queues ordered by start tag; each
-- flow queue has requests in the order of lib/order.lua. With tenants, a band is a tree whose leaves are the flow
-- queues. This file also chooses preemption candidates. This file uses fronts from lib/fronts.lua, bands from
-- lib/bands.lua, records and timers from lib/registry.lua, `endpoints`, `order`, `throttle`, `tenants` and `quotas`.
-- This file defines `preemption` and `queue`.

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
      while flow_queue and tenants.is_inner(flow_queue) do
        flow_queue = read('ZRANGE', key.children[band][flow_queue], 0, 0)[1]
      end
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
--
-- With tenants, the queueing is hierarchical (Goyal, Guo, Vin, "A Hierarchical CPU Scheduler for Multimedia Operating
-- Systems", OSDI 1996): each inner node has an order, a virtual time and finish tags for its children. A `member` of an
-- order is a flow queue or an inner node; the `parent` of a member is an inner node, '' for the band itself. A turn
-- goes from the band down to a flow queue, always to the least tag, and charges each member that it passes. An inner
-- node is in its parent's order, or throttled, while any of its own children is in order.
local queue = {flow_queue = order.flow_queue, has_lengths = false, LAST_PAGE = 1e6}
do
  local clamp = bands.clamp

  -- Return the share by which serving request r raises the tag of its flow queue. A damaged record may hold any weight
  -- or cost: clamp weight and cost, so that tags stay finite.
  function queue.share(r)
    if settings.fairness == FAIRNESS_ROUND_ROBIN then return 1 end
    local cost = bands.clamp_cost(r.cost)
    if settings.fairness == FAIRNESS_NONE then return cost end
    local weight = settings.tenants and tenants.weight(r.flow)
    return cost / (weight or clamp(settings.weights[r.flow] or r.weight, LEAST_WEIGHT, MOST_WEIGHT))
  end

  -- Return the share by which serving request r raises the tag of inner node `node`.
  local function share_of_node(node, r)
    if settings.fairness == FAIRNESS_ROUND_ROBIN then return 1 end
    return bands.clamp_cost(r.cost) / (tenants.weight(node) or 1)
  end

  local function parent_of(member) return settings.tenants and tenants.parent(member) or '' end
  local function order_of(band, parent) return parent == '' and key.flows[band] or key.children[band][parent] end
  local function finish_of(band, parent) return parent == '' and key.finish[band] or key.finished[band][parent] end

  -- Return the virtual time that orders the children of an inner node or a band (`parent`).
  local function virtual_time(band, parent)
    return parent == '' and pool[V[band]] or tenants.state(band, parent).v
  end

  -- Move the virtual time of a parent's children forward to `tag`.
  local function advance(band, parent, tag)
    if parent == '' then
      if tag > pool[V[band]] then pool[V[band]] = tag end
      return
    end
    local state = tenants.state(band, parent)
    if tag <= state.v then return end
    state.v = tag
    tenants.touch(state)
  end

  -- Return the flow queue that holds request r. After a change of `fairness` r is in its former flow queue until the
  -- sweep moves it.
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

  -- The number of a band's backlogged flow queues. With tenants, walk the band's tree, at most MOST_WALKED members,
  -- unless the preemption candidates give the number.
  local MOST_WALKED = 1000
  function queue.count_flow_queues(band)
    if not settings.tenants then return read('ZCARD', key.flows[band]) + read('ZCARD', key.throttled[band]) end
    if band > 0 or PREEMPTIBLE[0] then return read('ZCARD', key.candidates[band]) end
    local count = 0
    local has_all = queue.each_order(band, MOST_WALKED, function(members)
      for i = 1, #members, 2 do count = count + (tenants.is_inner(members[i]) and 0 or 1) end
    end)
    return has_all and count or MOST_WALKED
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

  -- Call `act(members, parent)` for the members of a band, in order or throttled: first for the band's own (`parent`
  -- ''), then for the children of each inner node; `members` is a list of member, start tag, member, start tag ...
  -- Stop after `most` members, and return false.
  function queue.each_order(band, most, act)
    local count, parents, at = 0, {''}, 0
    repeat
      at = at + 1
      local sets = {parents[at] == '' and key.flows[band] or key.children[band][parents[at]]}
      if at == 1 then sets[2] = key.throttled[band] end
      for _, set in ipairs(sets) do
        local members = read('ZRANGE', set, 0, most < math.huge and most or -1, 'WITHSCORES')
        count = count + #members / 2
        if count > most then return false end
        act(members, parents[at])
        for i = 1, #members, 2 do
          if tenants.is_inner(members[i]) then parents[#parents + 1] = members[i] end
        end
      end
    until at == #parents
    return true
  end

  local function count_queued(r, change)
    local counters, name = pool, QUEUED[r.band]
    counters.queued, counters[name] = counters.queued + change, counters[name] + change
    if r.bytes > 0 then bands.count_bytes(r, change) end
  end

  -- Return the start tag of a member that becomes backlogged. `finish`: the member's last finish tag; `share`: the
  -- share of its next request. If finish <= v (the virtual time), the flow queue is a newcomer and starts at v. A
  -- client that makes a new flow for each request would thus always be served first, so all newcomers together are
  -- charged to the tag `new`, like one flow. While `new` is at least NEWCOMERS shares ahead of v, a newcomer starts one
  -- share after v, as if it had been served once.
  local NEWCOMERS = 100
  local function start_tag(band, parent, finish, share)
    local v = virtual_time(band, parent)
    if finish > v then return finish end
    local state = parent ~= '' and tenants.state(band, parent)
    local reached = math.max(state and state.new or pool[NEW[band]], v)
    if reached - v >= NEWCOMERS * share then return v + share end
    if state then
      state.new = reached + share
      tenants.touch(state)
    else
      pool[NEW[band]] = reached + share
    end
    return v
  end

  -- Put a backlogged member in its parent's order, and its ancestors in theirs. A band whose order was empty does not
  -- catch up on missed turns. If r is given, r makes the member backlogged, and ancestors may be newcomers.
  local function activate(band, member, tag, r)
    local parent = parent_of(member)
    local members, name = order_of(band, parent), BAND_TAG[band]
    if parent == '' and pool[name] < pool.bv and read('ZCARD', members) == 0 then pool[name] = pool.bv end
    read_ahead.discard(members)
    defer_write('ZADD', members, tag, member)
    if parent == '' then return end
    local above = parent_of(parent)
    if read('ZSCORE', order_of(band, above), parent) or read('ZSCORE', key.throttled[band], parent) then return end
    local finish = tonumber(read('ZSCORE', finish_of(band, above), parent) or 0)
    local tag_above = r and start_tag(band, above, finish, share_of_node(parent, r))
      or math.max(finish, virtual_time(band, above))
    activate(band, parent, tag_above, r)
  end

  -- Queue request r; the caller writes the record. Return the start tag of r's flow queue if r makes it backlogged,
  -- else nil.
  function queue.insert(r)
    local band, flow_queue = r.band, queue.flow_queue(r)
    local requests = key.queue[band][flow_queue]
    local length = queue.length(band, flow_queue)
    local parent = parent_of(flow_queue)
    local is_ordered = length > 0 and (ordered[requests] or read('ZSCORE', order_of(band, parent), flow_queue)
      or read('ZSCORE', key.throttled[band], flow_queue)) -- false although length > 0: all are strays
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
    local finish = tonumber(read('ZSCORE', finish_of(band, parent), flow_queue) or 0)
    local tag = start_tag(band, parent, finish, queue.share(r))
    activate(band, flow_queue, tag, r)
    if band > 0 or PREEMPTIBLE[0] then preemption.add_candidate(band, flow_queue) end
    return tag
  end

  local function deactivate(band, member, tag)
    local parent = parent_of(member)
    read_ahead.set_score(order_of(band, parent), member)
    defer_write('ZADD', finish_of(band, parent), tag, member)
    throttle.forget(band, member)
    if (band > 0 or PREEMPTIBLE[0]) and not tenants.is_inner(member) then preemption.remove_candidate(band, member) end
  end

  -- If an inner node above `member` has no more children in order, remove the inner node from its own order, too.
  local function leave_ancestors(band, member)
    local parent = parent_of(member)
    while parent ~= '' and not read_ahead.first_scored(key.children[band][parent]) do
      local above = parent_of(parent)
      local tag = read('ZSCORE', order_of(band, above), parent) or throttle.remove(band, parent)
      if not tag then return end
      deactivate(band, parent, tonumber(tag))
      parent = above
    end
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
    local tag = read('ZSCORE', order_of(band, parent_of(flow_queue)), flow_queue) or throttle.remove(band, flow_queue)
    if not tag then return end
    deactivate(band, flow_queue, tag)
    leave_ancestors(band, flow_queue)
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

  -- Charge request r, which the starvation guard takes from `flow_queue`, to the inner nodes above.
  local function charge_ancestors(r, flow_queue)
    local band, parent = r.band, parent_of(flow_queue)
    while parent ~= '' do
      local above = parent_of(parent)
      local members = order_of(band, above)
      local first, tag = read_ahead.first_scored(members)
      if first ~= parent then tag = tonumber(read('ZSCORE', members, parent)) end
      if not tag then return end
      tag = tag + share_of_node(parent, r)
      local has_children = read_ahead.first_scored(key.children[band][parent])
      if has_children then read_ahead.set_score(members, parent, tag) else deactivate(band, parent, tag) end
      parent = above
    end
  end

  -- The inner nodes that the last turn passed on its way to a flow queue, from the top: orders, names and start tags.
  local turn_orders, turn_nodes, turn_tags, turn_depth = {}, {}, {}, 0
  -- Charge request r, whose turn it is, to the turn's inner nodes, and move their virtual times. `emptied`: r was the
  -- last request of its flow queue.
  local function charge_turn(r, emptied)
    local band = r.band
    for depth = turn_depth, 1, -1 do
      local node, tag = turn_nodes[depth], turn_tags[depth]
      advance(band, depth > 1 and turn_nodes[depth - 1] or '', tag)
      emptied = emptied and not read_ahead.first_scored(key.children[band][node])
      tag = tag + share_of_node(node, r)
      if emptied then deactivate(band, node, tag) else read_ahead.set_score(turn_orders[depth], node, tag) end
    end
  end

  -- Remove request r from the queue and charge its share to its flow queue, whose start tag is `tag`. A turn of flow
  -- queue `turn_of` moves the virtual time v to `tag`; if the starvation guard serves r (`turn_of` nil), v stays.
  -- Return the share.
  function queue.serve(r, tag, turn_of)
    local flow_queue, band, share = turn_of or queue.current_flow_queue(r), r.band, queue.share(r)
    local emptied, parent = take_out(r, flow_queue), parent_of(flow_queue)
    if turn_of then advance(band, parent, tag) end
    if emptied then
      deactivate(band, flow_queue, tag + share)
    else
      read_ahead.set_score(order_of(band, parent), flow_queue, tag + share)
    end
    if parent ~= '' then
      if turn_of then charge_turn(r, emptied) else charge_ancestors(r, flow_queue) end
    end
    if settings.band_policy == BAND_POLICY_WEIGHTED then
      if turn_of then pool.bv = math.max(pool.bv, pool[BAND_TAG[band]]) end
      queue.charge_band(r, r.cost)
    end
    return share
  end

  -- Add `difference` to the tag of a member. If no tag is stored, add `difference` to the lesser of the virtual time v
  -- and `floor`. Return the new tag.
  local function add_to_tag(band, member, difference, floor)
    local parent = parent_of(member)
    local finish = finish_of(band, parent)
    for _, place in ipairs({order_of(band, parent), key.throttled[band], finish}) do
      local tag = read('ZSCORE', place, member)
      note_original(place, member, tag)
      if tag then
        defer_write('ZADD', place, tag + difference, member)
        return tag + difference
      end
    end
    local tag = math.min(floor, virtual_time(band, parent)) + difference
    defer_write('ZADD', finish, tag, member)
    return tag
  end

  -- Correct a charge for request r: add `difference` to the tag of `flow_queue`, as `add_to_tag` does, and likewise to
  -- the inner nodes above. Return the flow queue's new tag.
  function queue.correct(r, flow_queue, difference, floor)
    local tag, parent = add_to_tag(r.band, flow_queue, difference, floor), parent_of(flow_queue)
    while parent ~= '' do
      add_to_tag(r.band, parent, difference / queue.share(r) * share_of_node(parent, r), math.huge)
      parent = parent_of(parent)
    end
    return tag
  end

  -- Under the band policy `weighted`, charge `cost` to the band of request r. A negative cost is a refund.
  function queue.charge_band(r, cost)
    if settings.band_policy ~= BAND_POLICY_WEIGHTED then return end
    local name = BAND_TAG[r.band]
    pool[name] = pool[name] + cost / BAND_WEIGHT[r.band]
  end

  -- Stop serving a member: its flow or every endpoint that its next request may use is at a limit, or its balance is
  -- short. After `unthrottle` the member does not catch up on missed turns.
  function queue.throttle(band, member, tag)
    read_ahead.set_score(order_of(band, parent_of(member)), member)
    throttle.add(band, member, tag)
    leave_ancestors(band, member)
  end

  -- Put a throttled member back in its parent's order. Return false if it was not throttled or holds no request.
  function queue.unthrottle(band, member)
    local tag = throttle.remove(band, member)
    if not tag then return false end
    local is_empty
    if tenants.is_inner(member) then
      is_empty = read('ZCARD', key.children[band][member]) == 0
    else
      is_empty = queue.length(band, member) == 0
    end
    if is_empty then
      strays = strays + 1
      throttle.forget(band, member)
      return false
    end
    tag = math.max(virtual_time(band, parent_of(member)), tag)
    activate(band, member, tag)
    log_flow_queue('unthrottled', band, member, tag)
    return true
  end

  -- Put a throttled flow queue back in order. If it has blockers, dispatch may grant one of its requests without room.
  function queue.probe(band, member)
    throttle.allow_probe(band, member)
    queue.unthrottle(band, member)
  end

  -- Put a page of each band's throttled members back in order, since limits or balances may have changed. Pages run
  -- from the last to 0, so that members removed from one page do not shift others past the scan. A `page` beyond the
  -- last means the last. Return the next page, nil after page 0.
  local PAGE = 16
  function queue.unthrottle_page(page)
    local longest = 0
    for _, band in ipairs(BANDS) do longest = math.max(longest, read('ZCARD', key.throttled[band])) end
    page = math.max(0, math.min(page, math.ceil(longest / PAGE) - 1))
    for _, band in ipairs(longest > 0 and BANDS or {}) do
      local first = page * PAGE
      for _, member in ipairs(read('ZRANGE', key.throttled[band], first, first + PAGE - 1)) do
        queue.probe(band, member)
      end
    end
    return page > 0 and page - 1 or nil
  end

  -- Return the start tag of a member that is in its parent's order, else false.
  function queue.is_in_order(band, member) return read('ZSCORE', order_of(band, parent_of(member)), member) end

  -- With tenants, whether request r may start before all waiting requests: r fits within the bound, all waiting
  -- requests are throttled, and neither r's flow queue nor an inner node above r is throttled.
  function queue.may_overtake(r)
    local take = pool.stock_for(r.cost, pool.upper)
    if take > 0 and pool.stock + take > pool.upper then return false end
    for _, band in ipairs(BANDS) do
      if pool[QUEUED[band]] > 0 and read_ahead.first_scored(key.flows[band]) then return false end
    end
    local member = queue.flow_queue(r)
    while member ~= '' do
      if read('ZSCORE', key.throttled[r.band], member) then return false end
      member = parent_of(member)
    end
    return true
  end

  -- Throttle the tenant or flow queue `member`, whose limit does not suffice for request r, for `wait_ms`.
  function queue.wait_for_balance(r, member, wait_ms)
    local tag = queue.is_in_order(r.band, member)
    if not tag then return end
    queue.throttle(r.band, member, tonumber(tag))
    if wait_ms < math.huge then quotas.wake_at(r.band, member, math.ceil(now_us / 1000 + wait_ms)) end
  end

  -- Put throttled members back in order once their balances suffice.
  function queue.end_waits()
    for _, due in ipairs(quotas.due()) do queue.unthrottle(due[1], due[2]) end
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

  -- If `blocker` (throttle.lua) has room, put the first throttled flow queue that waits for it back in order. Waiting
  -- flow queues before it may be in order already, below a throttled tenant.
  local ROOM_LOOKS_AT = 64
  function queue.use_room(blocker)
    if not (throttle.is_used() and throttle.has_room(blocker)) then return end
    for _, band in ipairs(bands_in_order()) do
      local waiting = key.blocked[band][blocker]
      for _, flow_queue in ipairs(read('ZRANGE', waiting, 0, ROOM_LOOKS_AT - 1)) do
        if queue.unthrottle(band, flow_queue) then return end
        if not queue.is_in_order(band, flow_queue) then drop_stray('ZREM', waiting, flow_queue) end
      end
    end
  end

  -- Request r, granted for the room of `blocker`, is placed, queued again or ended. Room that r has left free goes to
  -- another request. If r is on none of its queue's blockers, the next request may not need the blockers, either.
  function queue.decided(r, blocker)
    local band, flow_queue = r.band, queue.flow_queue(r)
    local tag = r.state ~= STATE_QUEUED
      and (queue.is_in_order(band, flow_queue) or read('ZSCORE', key.throttled[band], flow_queue))
    local is_on_blocker = tag and throttle.served(r, flow_queue, tag)
    if tag and r.state == STATE_PLACED and not is_on_blocker then queue.probe(band, flow_queue) end
    queue.use_room(blocker)
  end

  -- Append to `ids` the ids of up to `count` requests that the next turns may serve: equally many from each of the
  -- first members of an order. Read one further member, which the next turn needs if a turn removes a member.
  local function first_requests(band, members, count, ids)
    local front = read_ahead.scored_front(members, count + 1)
    local each, odd = math.floor(2 * count / #front), 2 * count % #front
    for i = 1, #front, 2 do
      local part, member = i < odd and each + 1 or each, front[i]
      if part == 0 then break end
      if settings.tenants and tenants.is_inner(member) then
        first_requests(band, key.children[band][member], part, ids)
      elseif settings.ordering == ORDERING_WORKLOAD_AWARE then
        order.first_heads(band, member, part, ids)
      else
        read_ahead.first_members(key.queue[band][member], part, ids)
      end
    end
  end

  -- Read ahead for up to `count` turns: the next flow queues, and the records of their first requests.
  function queue.prefetch(count)
    read_ahead.expect(count)
    if count < 2 then return end
    local in_order, at = bands_in_order(), 1
    while at < #in_order and pool[QUEUED[in_order[at]]] == 0 do at = at + 1 end
    local ids = {}
    first_requests(in_order[at], key.flows[in_order[at]], count, ids)
    record.prefetch(ids, #ids)
    if settings.ordering == ORDERING_WORKLOAD_AWARE then order.prefetch_followers(ids) end
    if settings.tenants then
      local found, known = {}, 0
      for i = 1, #ids do
        found[known + 1] = record.read(ids[i])
        known = #found
      end
      quotas.prefetch(found, known)
    end
  end

  -- Return the flow queue whose turn it is, and its start tag; nil if the band has none.
  local function first_flow_queue(band)
    local members = key.flows[band]
    local member, tag = read_ahead.first_scored(members)
    turn_depth = 0
    for _ = 1, STRAYS do
      if not (member and tenants.is_inner(member)) then return member, tag end
      turn_depth = turn_depth + 1
      turn_orders[turn_depth], turn_nodes[turn_depth], turn_tags[turn_depth] = members, member, tag
      local children = key.children[band][member]
      local child, tag_of_child = read_ahead.first_scored(children)
      if child then
        members, member, tag = children, child, tag_of_child
      else
        strays = strays + 1 -- an empty inner node is a stray
        read_ahead.set_score(members, member)
        members, turn_depth = key.flows[band], 0
        member, tag = read_ahead.first_scored(members)
      end
    end
  end

  -- Return the id of the request that a flow queue serves next.
  function queue.head(band, flow_queue)
    return settings.ordering == ORDERING_WORKLOAD_AWARE and order.head(band, flow_queue)
      or read_ahead.first_member(key.queue[band][flow_queue])
  end

  -- Return the request to serve next: its id, its flow queue's start tag, band and name; nil if no request can be
  -- served.
  function queue.next_turn()
    local in_order = settings.band_policy == BAND_POLICY_WEIGHTED and bands_in_order() or BANDS
    for i = 1, #in_order do
      local band = in_order[i]
      if pool[QUEUED[band]] > 0 then
        local flow_queue, tag = first_flow_queue(band)
        for _ = 1, STRAYS do
          if not flow_queue then break end
          local id = queue.head(band, flow_queue)
          if id then return id, tag, band, flow_queue end
          strays = strays + 1 -- an empty flow queue is a stray
          read_ahead.set_score(order_of(band, parent_of(flow_queue)), flow_queue)
          flow_queue, tag = first_flow_queue(band)
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
        local flow_queue = queue.current_flow_queue(r)
        local parent = parent_of(flow_queue)
        local tag = read('ZSCORE', order_of(r.band, parent), flow_queue)
        while tag and parent ~= '' and read('ZSCORE', order_of(r.band, parent_of(parent)), parent) do
          parent = parent_of(parent)
        end
        if tag and parent == '' then return id, tonumber(tag) end
      else
        drop_stray('ZREM', key.overdue, id)
        pool.overdue = read('ZCARD', key.overdue) -- the stray may have been counted
      end
    end
  end
end
