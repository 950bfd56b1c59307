-- include: endpoints order
-- Keeps the throttled members of each band, which dispatch skips: flow queues whose flow, or every endpoint that the
-- next request may use, is at its limit; with tenants, also flow queues and inner nodes whose own limits do not suffice
-- for the next request (lib/quotas.lua). The key `throttled:B` holds the start tags of throttled members in band B.
--
-- A flow queue that waits for room on endpoints keeps their names, its blockers, until it is empty: in the key
-- `blockers`; the key `blocked:B:E` has the flow queues of band B with the blocker E. A flow queue with blockers is
-- granted only as many requests as its blockers have room for, so no request loses the race for the last slot to a
-- later request of its flow (G4). Until a granted request is placed, queued again or ended, it takes its blocker's
-- room: its record names the blocker as the endpoint, and the key `pending` lists it.
--
-- Uses the stages from lib/endpoints.lua, records from lib/registry.lua, and `order`. Defines `throttle`.

local throttle = {}
do
  local MOST_BLOCKERS = 16 -- most endpoints that a call notes; if others get room, the sweep unthrottles the flow queue
  local AMPLE = 24 -- a flow queue forgets its blockers once one has room for as many requests as a call may grant
  local PREFILL = '=' -- begins a blocker that is the stage prefill of an endpoint
  -- Begins the blockers of a flow queue that may be granted one request without room, since the endpoints that its next
  -- request may use can have changed.
  local PROBES = '?'

  function throttle.prefill_of(address) return PREFILL .. address end
  function throttle.is_prefill(blocker) return string.sub(blocker, 1, 1) == PREFILL end

  -- Return whether any flow queue has blockers. The field `used`, nil if unknown, keeps false between calls while only
  -- this library changes the pool (lib/dispatch.lua).
  function throttle.is_used()
    if throttle.used == nil then throttle.used = read('HLEN', key.blockers) > 0 end
    return throttle.used
  end

  local function blockers_of(band, flow_queue)
    return throttle.is_used() and read('HGET', key.blockers, joined(band, flow_queue)) or nil
  end

  local function each(blockers) return string.gmatch(blockers or '', '[^,?]+') end

  function throttle.add(band, flow_queue, tag)
    defer_write('ZADD', key.throttled[band], tag, flow_queue)
    log_flow_queue('throttled', band, flow_queue, tag)
  end

  -- Remove a throttled flow queue or inner node. Return the member's start tag; nil if it was not throttled.
  function throttle.remove(band, flow_queue)
    local tag = read('ZSCORE', key.throttled[band], flow_queue)
    if not tag then return nil end
    defer_write('ZREM', key.throttled[band], flow_queue)
    if settings.tenants then defer_write('ZREM', key.budget_waits, joined(band, flow_queue)) end
    return tonumber(tag)
  end

  -- Add the endpoints `closed` to the blockers of a flow queue with start tag `tag`, or let them replace the blockers.
  function throttle.wait_for(band, flow_queue, tag, closed, replaces)
    local former, blockers = {}, {}
    for blocker in each(blockers_of(band, flow_queue)) do former[blocker] = true end
    for i = 1, math.min(#closed, MOST_BLOCKERS) do
      if not former[closed[i]] then defer_write('ZADD', key.blocked[band][closed[i]], tag, flow_queue) end
      blockers[i], former[closed[i]] = closed[i], nil
    end
    for blocker in pairs(former) do
      if replaces then
        defer_write('ZREM', key.blocked[band][blocker], flow_queue)
      else
        blockers[#blockers + 1] = blocker
      end
    end
    local name = joined(band, flow_queue)
    if blockers[1] then
      defer_write('HSET', key.blockers, name, table.concat(blockers, ','))
      throttle.used = true
    elseif throttle.is_used() then
      defer_write('HDEL', key.blockers, name)
    end
  end

  function throttle.forget(band, flow_queue)
    local blockers = blockers_of(band, flow_queue)
    if blockers then defer_write('HDEL', key.blockers, joined(band, flow_queue)) end
    for blocker in each(blockers) do defer_write('ZREM', key.blocked[band][blocker], flow_queue) end
  end

  -- Return how many more requests may be granted for the room of `blocker`, and whether a request of `flow_queue` is
  -- pending there. A silent replica decides nothing, so its requests do not count.
  local function room(blocker, band, flow_queue)
    local is_prefill, has_own = throttle.is_prefill(blocker), false
    local left = is_prefill and prefill.slots(string.sub(blocker, 2)) or not is_prefill and endpoints.slots(blocker)
    local members = read('ZRANGE', key.pending, '[' .. joined(blocker, ''), '(' .. blocker .. '\32', 'BYLEX')
    for _, member in ipairs(members) do
      local r = record.read(string.sub(member, #blocker + 2))
      if not (r and r.state == STATE_GRANTED and r.endpoints == blocker) then
        drop_stray('ZREM', key.pending, member)
      elseif pool.is_live(r.owner) then
        left, has_own = left - 1, has_own or r.band == band and order.flow_queue(r) == flow_queue
      end
    end
    return left, has_own
  end

  function throttle.has_room(blocker) return room(blocker) > 0 end

  -- Return whether request r, the next of `flow_queue`, may be granted; and for the room of which blocker, if the flow
  -- queue has any.
  function throttle.admits(r, flow_queue)
    local band, best, most, has_own = r.band, nil, -math.huge, false
    local blockers = not r.any_endpoint and blockers_of(band, flow_queue)
    if not blockers then return true end
    for blocker in each(blockers) do
      local left, own = room(blocker, band, flow_queue)
      if left > most or left == most and blocker < best then best, most = blocker, left end
      has_own = has_own or own
    end
    if most >= AMPLE then
      throttle.forget(band, flow_queue)
      return true
    end
    if most > 0 then return true, best end
    if string.sub(blockers, 1, 1) ~= PROBES then return false end
    defer_write('HSET', key.blockers, joined(band, flow_queue), string.sub(blockers, 2))
    return not has_own, best
  end

  -- Allow dispatch to grant one request of a flow queue although its blockers have no room.
  function throttle.allow_probe(band, flow_queue)
    local blockers = blockers_of(band, flow_queue)
    if not blockers or string.sub(blockers, 1, 1) == PROBES then return end
    defer_write('HSET', key.blockers, joined(band, flow_queue), PROBES .. blockers)
  end

  -- Record that request r is granted to take room on the endpoint `blocker`.
  function throttle.grant(r, blocker)
    r.endpoints = blocker
    defer_write('ZADD', key.pending, 0, joined(blocker, r.id))
  end

  -- A granted request is about to be placed, queued again or ended. Return the blocker for whose room the request was
  -- granted, which no longer counts the request; nil if there is none.
  function throttle.decide(r)
    local blocker = r.endpoints
    if r.state ~= STATE_GRANTED or blocker == '' then return nil end
    r.endpoints = ''
    defer_write('ZREM', key.pending, joined(blocker, r.id))
    return blocker
  end

  -- A request of `flow_queue`, r, was served: let the flow queue wait by its present start tag. Return whether r is
  -- placed on a blocker.
  function throttle.served(r, flow_queue, tag)
    local endpoint, prefiller, found = endpoints.first(r.endpoints), PREFILL .. prefill.first(r.prefillers), false
    for blocker in each(blockers_of(r.band, flow_queue)) do
      defer_write('ZADD', key.blocked[r.band][blocker], tag, flow_queue)
      found = found or blocker == endpoint or blocker == prefiller
    end
    return found
  end

  -- Call `act(band, flow_queue, waiting)` for each blocker of each flow queue; `waiting` is the key of the flow queues
  -- that have the blocker.
  function throttle.each_waiting(act)
    local found = read('HGETALL', key.blockers)
    for i = 1, #found, 2 do
      local band, flow_queue = string.match(found[i], '^(%d+)\31(.*)$')
      for blocker in each(band and found[i + 1]) do
        act(tonumber(band), flow_queue, key.blocked[tonumber(band)][blocker])
      end
    end
  end
end
