-- include: fronts registry
-- The order of requests within a flow queue. The sorted set queue:B:L holds all requests of flow queue L in band B:
-- under the ordering `edf` by deadline minus predicted service time, else by arrival. Under the ordering
-- `workload-aware` the index described below decides. This file uses fronts from lib/fronts.lua, records and rates from
-- lib/registry.lua. This file defines `order`.
--
-- workload-aware (spec 001): score = wait_weight * min(wait / wait_cap, 1) + g, highest first, where
-- g = criticality_weight * criticality / 5 - rate_weight * min(rate / rate_cap, 1). The requests of a workload in a
-- flow queue form a line; only the oldest, the head, competes. An anonymous request is a line of its own. Below
-- wait_cap all scores grow at the same speed, so the sorted set `growing` orders heads by a constant key: the arrival
-- minus the wait that adds as much score as g. Heads past wait_cap, and heads scored by their workload's average wait,
-- are in the sorted set `static`, ordered by -score. The first head of `growing` is compared with the first head of
-- `static`, and the head with the higher score is served. If the first head of `growing` is past wait_cap, it first
-- moves to `static`. Other heads past wait_cap may stay in `growing`: their keys overstate their scores, so a head that
-- is not first by key would not win by score either.
local order = {}
do
  -- Return the name of the flow queue that holds request r under the fairness policy in force.
  function order.flow_queue(r) return settings.fairness == FAIRNESS_NONE and '' or r.flow end

  local function constant_score(r)
    return settings.criticality_weight * r.criticality / 5
      - settings.rate_weight * math.min(workloads.rate_of(r) / settings.rate_cap, 1)
  end

  local function cap_us() return settings.wait_cap_ms * 1000 end
  local function by_average(r) return settings.wait_signal == WAIT_SIGNAL_WORKLOAD_AVERAGE and r.workload ~= '' end

  -- Set the key of request r in the sets `growing` and `static`; a nil key removes r. Skip a set that cannot hold r
  -- under the current settings. While the sweep moves requests to a new order, either set may hold r.
  local function set_index(r, flow_queue, growing_key, static_key)
    local never_grows = settings.wait_weight == 0 or by_average(r)
    local growing, static = key.growing[r.band][flow_queue], key.static[r.band][flow_queue]
    if growing_key or not never_grows or pool.refiling == 1 then read_ahead.set_score(growing, r.id, growing_key) end
    if static_key or never_grows or now_us - r.arrived >= cap_us() or pool.refiling == 1 then
      read_ahead.set_score(static, r.id, static_key)
    end
  end

  -- Put the head of a line (a workload's oldest request) into the set `growing` or `static`, by its current score.
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

  -- Cache the head of each line between calls, while only this library changes the pool: each arrival needs a head.
  local MOST_HEADS = 256
  local heads, known_heads = {}, 0 -- line -> the fields of its head that `index` needs
  function order.forget() heads, known_heads = {}, 0 end

  local function keep_head(line, r)
    if known_heads >= MOST_HEADS then order.forget() end
    known_heads = known_heads + (r and 1 or 0) - (heads[line] and 1 or 0)
    heads[line] = r and {id = r.id, arrived = r.arrived, criticality = r.criticality, workload = r.workload,
      band = r.band, flow = r.flow}
  end

  -- Return the oldest waiting request of a line, or nil. Drop the ids of requests that no longer wait.
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

  -- Return the score of request r in its flow queue. Under `edf`, the last three digits of the arrival (us) order equal
  -- times (ms).
  function order.score(r)
    if settings.ordering ~= ORDERING_EDF then return r.arrived end
    return (r.deadline_ms - pool.early_ms(r)) * 1000 + r.arrived % 1000
  end

  -- Add request r to the workload-aware index.
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

  -- Remove request r from a line. If r was the head, index the next head.
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

  -- Remove request r from the workload-aware index, if present.
  function order.remove(r, flow_queue)
    set_index(r, flow_queue)
    if r.workload ~= '' then leave(key.line(r.band, flow_queue, r.workload), r, flow_queue) end
  end

  -- Return the id that the flow queue serves next; nil if the sweep has not indexed its requests under a new ordering.
  -- First move at most MOST_CAPPED heads past wait_cap from `growing` to `static`; if more are left, serve the first
  -- head of `static`, and the next call moves more.
  local MOST_CAPPED = 256
  function order.head(band, flow_queue)
    local growing, static = key.growing[band][flow_queue], key.static[band][flow_queue]
    for _ = 1, MOST_CAPPED do
      local id, grows_from = read_ahead.first_scored(growing)
      local best, best_score = read_ahead.first_scored(static)
      local r = id and record.read(id)
      if id and not (r and r.state == STATE_QUEUED) then
        drop_stray('ZREM', growing, id)
        order.forget()
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
    order.forget()
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
      local line = r and r.workload ~= '' and key.line(r.band, order.flow_queue(r), r.workload)
      local follower = line and read_ahead.second_member(line)
      if follower then
        count = count + 1
        found[count] = follower
      end
    end
    record.prefetch(found, count)
  end

  -- For the sweep: index request r again if it heads its line, since the rate of its workload falls with time. Return
  -- false if the index lacks r: its line or, if r is anonymous, both sets.
  function order.refresh(r, flow_queue)
    if r.workload == '' then
      return read('ZSCORE', key.growing[r.band][flow_queue], r.id)
        or read('ZSCORE', key.static[r.band][flow_queue], r.id)
    end
    local line = key.line(r.band, flow_queue, r.workload)
    local head = read_head(line)
    if not (head and head.id == r.id) then return read('ZSCORE', line, r.id) end
    index(r, flow_queue)
    return true
  end
end
