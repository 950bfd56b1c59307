-- include: pool
-- The throttled members of each band, which dispatch skips: flow queues whose flow, or every endpoint that the next
-- request may use, is at its limit; with tenants, also flow queues and inner nodes whose own limits do not suffice for
-- the next request (lib/quotas.lua). The key `throttled:B` holds the start tags of throttled members in band B. The key
-- `blockers` has the endpoints on which a flow queue waits for room; `blocked:B:E` has the flow queues of band B that
-- wait for endpoint E. Uses reads, writes and keys from lib/storage.lua, the log from lib/pool.lua. Defines `throttle`.

local throttle = {}
do
  local MOST_BLOCKERS = 16 -- most endpoints that a call notes; if others get room, the sweep unthrottles the flow queue
  function throttle.add(band, flow_queue, tag)
    defer_write('ZADD', key.throttled[band], tag, flow_queue)
    log_flow_queue('throttled', band, flow_queue, tag)
  end

  -- Remove a flow queue or inner node from the throttled members. Return its start tag; nil if it was not throttled.
  function throttle.remove(band, flow_queue)
    local tag = read('ZSCORE', key.throttled[band], flow_queue)
    if not tag then return nil end
    defer_write('ZREM', key.throttled[band], flow_queue)
    local name = joined(band, flow_queue)
    if settings.tenants then defer_write('ZREM', key.budget_waits, name) end
    local blockers = read('HGET', key.blockers, name)
    if blockers then
      defer_write('HDEL', key.blockers, name)
      for address in string.gmatch(blockers, '[^,]+') do defer_write('ZREM', key.blocked[band][address], flow_queue) end
    end
    return tonumber(tag)
  end

  -- Record that a throttled flow queue waits for room on one of the endpoints `closed`.
  function throttle.wait_for(band, flow_queue, tag, closed)
    if #closed == 0 then return end
    local name, added = joined(band, flow_queue), {}
    local blockers = read('HGET', key.blockers, name)
    if blockers then added[1] = blockers end
    for i = 1, math.min(#closed, MOST_BLOCKERS) do
      local waiting = key.blocked[band][closed[i]]
      if not read('ZSCORE', waiting, flow_queue) then added[#added + 1] = closed[i] end
      defer_write('ZADD', waiting, tag, flow_queue)
    end
    defer_write('HSET', key.blockers, name, table.concat(added, ','))
  end

  -- Call `act(band, flow_queue, waiting)` for each endpoint that a flow queue waits for; `waiting` is the key of the
  -- flow queues that wait for the endpoint.
  function throttle.each_waiting(act)
    local found = read('HGETALL', key.blockers)
    for i = 1, #found, 2 do
      local band, flow_queue = string.match(found[i], '^(%d+)\31(.*)$')
      for address in string.gmatch(band and found[i + 1] or '', '[^,]+') do
        act(tonumber(band), flow_queue, key.blocked[tonumber(band)][address])
      end
    end
  end
end
